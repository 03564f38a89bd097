"""Does it learn, and is it the reinforcement that does it? `python benchmarks/learning.py [--recipe R] [--arms A ...]`

For each seed one warm start, and from its weights (with `--recipe calculator` from those that ship, then without
the arm `sft`, which would go on with a warm start):

    grpo       the recipe as it is
    shuffled   the same with advantages permuted over the batch, half of the steps: must not learn
    flipped    the same with the opposite sign, a third of the steps: must fall
    sft        the warm start continued on new demonstrations for as many seconds as GRPO took; the learning rate is the
               best of three on the first seed
    faults     no training: the policy of `grpo` once more, with tools of which 5 % of the attempts raise, 5 % hang and
               5 % answer nonsense
    own        supervised steps on the policy's own successes, sampled anew each step, for as many seconds

Every arm runs through the command line in a process of its own, but `own`, which is no feature of the package. Success
is the mean of the recipe's samples at temperature 1 over its held-out tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from runs import finish_run, last_checkpoint, steps_of

from mtgrpo.batch.forest import build_batch
from mtgrpo.config.compose import compose, parse
from mtgrpo.config.experiment import Experiment
from mtgrpo.policy.optimizer import Optimizer, Schedule
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.policy.trainer import negative_log_likelihood
from mtgrpo.record.writing import write_summary
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages.evaluate import evaluate_fully
from mtgrpo.stages.run import Run, open_run
from mtgrpo.types import Status, Trajectory
from mtgrpo.weights.source import ModelWeights

LEARNING_RATES = (0.02, 0.01, 0.005)  # of the matrices, for the arm `sft`; the warm start's is the first
# Fixed before the benchmark was run. What a recipe must show: for the calculator alone.
MUST = {
    "before at least": 0.10,
    "before at most": 0.45,
    "after at least": 0.85,
    "gain at least": 0.45,
    "shuffled gain at most": 0.10,
    "flipped gain below": 0.0,
    "sft gain at most": 0.20,
}
ARMS = ("grpo", "shuffled", "flipped", "sft", "faults", "own")
FAULTS = ("faults.error_rate=0.05", "faults.hang_rate=0.05", "faults.garbage_rate=0.05", "environment.call_timeout_s=2")
Summary = dict[str, float]


def command(words: list[str], folder: Path) -> Summary:
    """What a run of `mtgrpo` with `words` measured, before and after."""
    return finish_run([*words, "eval.every_steps=0"], folder)


def share_with_variance(folder: Path) -> list[float]:
    """For every step of a run, the share of groups whose rewards differ."""
    return [step["reward/groups_with_variance"] for step in steps_of(folder)]


def succeeded(trajectory: Trajectory, experiment: Experiment) -> bool:
    """Whether an evaluation would count it: it ended by itself, with the right answer."""
    return trajectory.status is Status.COMPLETED and trajectory.reward >= experiment.reward.success_at


async def imitate(run: Run, seconds: float) -> int:
    """Sample, keep what succeeded, imitate it; for `seconds`. Returns the number of steps."""
    experiment = run.experiment
    settings = replace(experiment.optimizer, schedule=Schedule.constant)  # how many steps fit is not known
    model = run.trainer.rank.model
    optimizer = Optimizer(model, settings, 0)
    policy = Policy(model, optimizer, experiment.batch.token_budget, 1.0)
    stream, began, step = Stream(run.runner, run.tasks, experiment.rollout), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        groups = (await stream.batch(version=step)).groups
        step += 1
        good = [t for group in groups for t in group.trajectories if succeeded(t, experiment)]
        if good:
            batch = build_batch(good)
            weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
            at_once(policy.updating(batch, torch.arange(len(batch)), weights, negative_log_likelihood))
        await run.engine.load_weights(ModelWeights(model, step))
    return step


async def own_successes(experiment: Experiment, seconds: float, folder: Path) -> Summary:
    """The arm `own`; evaluation is not counted."""
    if (folder / "summary.json").exists():
        return json.loads((folder / "summary.json").read_text())
    async with open_run(experiment, folder) as run:
        await imitate(run, seconds)
        write_summary(folder, {f"{name}/after": value for name, value in (await evaluate_fully(run)).items()})
    return json.loads((folder / "summary.json").read_text())


@dataclass(frozen=True)
class Seed:
    """Where the arms of one seed begin: the weights of its warm start."""

    recipe: str
    seed: int
    folder: Path
    before: str  # the recipe whose warm start comes first; "" = from scratch
    extra: list[str]

    @property
    def start(self) -> list[str]:
        """The words that every arm has in common."""
        weights = [f"model.name={last_checkpoint(self.folder / 'warm_start')}"] if self.imitates else []
        return [f"recipe={self.recipe}", *weights, *self.extra]

    @property
    def imitates(self) -> bool:
        """Whether the recipe has a warm start."""
        return compose(parse([f"recipe={self.recipe}", *self.extra])).experiment.sft.steps > 0

    def warm(self) -> Summary:
        """The warm start itself, or what the recipe's weights do without one."""
        if not self.imitates:
            found = command(["eval", *self.start, f"seed={self.seed}"], self.folder / "warm_start")
            return {f"{name}/after": value for name, value in found.items()} | {"time/sft_s": 0.0}
        words = ["sft", f"recipe={self.recipe}", f"seed={self.seed}", *self.extra]
        if self.before:
            first = self.folder.parents[1] / self.before / self.folder.name / "warm_start"
            command(["sft", f"recipe={self.before}", f"seed={self.seed}"], first)
            words.append(f"model.name={last_checkpoint(first)}")
        return command(words, self.folder / "warm_start")

    def train(self, name: str, *words: str) -> Summary:
        """One arm of reinforcement learning."""
        return command(["train", *self.start, f"seed={self.seed}", "sft.steps=0", *words], self.folder / name)

    def failing(self, start: Path) -> Summary:
        """What the last checkpoint of the run in `start` does with tools that fail."""
        words = ["eval", f"checkpoint={last_checkpoint(start)}", "trust_code=true", *FAULTS]
        found = command(words, self.folder / "faults")
        return {f"{name}/after": value for name, value in found.items()}

    def continued(self, rate: float, steps: int) -> Summary:
        """More supervised steps, on demonstrations of other tasks where they are generated."""
        words = [f"seed={self.seed + 1000}", f"sft.steps={steps}", f"sft.optimizer.muon_lr={rate}"]
        return command(["sft", *self.start, *words], self.folder / f"sft_{rate}")


def run_seed(seed: Seed, names: list[str], rates: tuple[float, ...]) -> dict[str, Any]:
    """The arms `names` of one seed. `rates` are the learning rates that the arm `sft` tries."""
    warm = seed.warm()
    experiment = compose(parse([*seed.start, f"seed={seed.seed}"])).experiment
    arms = {"grpo": seed.train("grpo")}
    seconds = arms["grpo"]["time/rl_s"]
    variance = share_with_variance(seed.folder / "grpo")
    best = rates[0]
    if "shuffled" in names:
        steps = max(1, experiment.trainer.steps // 2)
        arms["shuffled"] = seed.train("shuffled", "debug.advantages=shuffled", f"trainer.steps={steps}")
    if "flipped" in names:
        steps = max(1, experiment.trainer.steps // 3)
        arms["flipped"] = seed.train("flipped", "debug.advantages=flipped", f"trainer.steps={steps}")
    if "sft" in names:
        steps = max(1, round(seconds * experiment.sft.steps / warm["time/sft_s"]))
        tried = {rate: seed.continued(rate, steps) for rate in rates}
        best = max(tried, key=lambda rate: tried[rate]["eval/success/after"])
        arms["sft"] = tried[best]
    if "faults" in names:
        arms["faults"] = seed.failing(seed.folder / "grpo")
    if "own" in names:
        arms["own"] = asyncio.run(own_successes(experiment, seconds, seed.folder / "own"))
    before = warm["eval/success/after"]
    for name, arm in arms.items():
        print(f"seed {seed.seed}  {name:9} success {before:.3f} -> {arm['eval/success/after']:.3f}", flush=True)
    return {
        "before": {name: value for name, value in warm.items() if name.startswith("eval/")},
        "arms": arms,
        "sft_learning_rate": best,
        "groups_with_variance": {"first step": variance[0], "mean": sum(variance) / len(variance)},
        "seconds": {"warm start": warm["time/sft_s"], "grpo": seconds},
    }


def judge(seeds: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of MUST hold for every seed."""
    before = [s["before"]["eval/success/after"] for s in seeds]
    after = {arm: [s["arms"][arm]["eval/success/after"] for s in seeds] for arm in seeds[0]["arms"]}
    gain = {arm: [a - b for a, b in zip(values, before, strict=True)] for arm, values in after.items()}
    return {
        "before at least": min(before) >= MUST["before at least"],
        "before at most": max(before) <= MUST["before at most"],
        "after at least": min(after["grpo"]) >= MUST["after at least"],
        "gain at least": min(gain["grpo"]) >= MUST["gain at least"],
        "shuffled gain at most": max(gain["shuffled"]) <= MUST["shuffled gain at most"],
        "flipped gain below": max(gain["flipped"]) < MUST["flipped gain below"],
        "sft gain at most": max(gain["sft"]) <= MUST["sft gain at most"],
    }


def main() -> None:
    """Parse arguments, run every seed, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="calculator_from_scratch")
    parser.add_argument("--before", default="", help="a recipe whose warm start the recipe's own begins from")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    usual = [arm for arm in ARMS if arm != "faults"]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=usual, help="grpo always runs")
    parser.add_argument("--rates", type=float, nargs="+", default=LEARNING_RATES, help="that the arm sft tries")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/learning"), help="keeps finished arms")
    parser.add_argument("--file", help="below benchmarks/results; default learning.json or learning_RECIPE.json")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every arm, e.g. trainer.steps=5")
    given = parser.parse_args()
    seeds: dict[int, dict[str, Any]] = {}
    rates = tuple[float, ...](given.rates)
    for number in given.seeds:
        folder = (given.folder / given.recipe / f"seed_{number}").resolve()
        seeds[number] = run_seed(Seed(given.recipe, number, folder, given.before, given.set), given.arms, rates)
        rates = (seeds[number]["sft_learning_rate"],)
    found = list(seeds.values())
    ratios: dict[str, float | None] = {
        f"learning.{arm}": sum(s["arms"][arm]["eval/success/after"] for s in found) / len(found)
        for arm in found[0]["arms"]
    }
    ratios["learning.before"] = sum(s["before"]["eval/success/after"] for s in found) / len(found)
    detail: dict[str, Any] = {"recipe": given.recipe, "before": given.before, "seeds": seeds, "overrides": given.set}
    if given.recipe == "calculator_from_scratch" and set(given.arms) >= set(usual):
        detail["must"] = {name: {"limit": MUST[name], "held": held} for name, held in judge(found).items()}
        for name, verdict in detail["must"].items():
            print(f"{'held  ' if verdict['held'] else 'BROKEN'}  {name} {verdict['limit']}")
    default = "learning.json" if given.recipe == "calculator_from_scratch" else f"learning_{given.recipe}.json"
    record.finish("learning", ratios, detail, given.file or default)


if __name__ == "__main__":
    main()
