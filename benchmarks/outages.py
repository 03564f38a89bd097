"""Do tools that fail bias what is trained? A frozen policy with a calculator that fails, and training with one.

The demo's policy after its warm start runs 4 rollouts of each of 200 held-out tasks, with a calculator of which 0, 5
or 30 % of the attempts fail. Of the conversations that would be trained: the share that calls, turns, success; within
a group the covariance of calling and reward, which is what pushes a policy to call. 95 % intervals resample tasks.

    anew      the conversation is run again, then left out; no call is made again
    told      the model gets an error message; no call is made again
    fail      a call is made again, up to `environment.call_retries` times, then as `anew`: the default
    observe   a call is made again as often, then as `told`

`anew` and `told` are also what `fail` and `observe` come to in an outage that outlasts all retries. Then the same
policy is trained with a calculator of which 30 % of the attempts fail, 15 steps of 16 groups, and measured with one
that never fails, on 100 tasks x 4.

    outages.tool_rate.ARM.RATE   the share that calls / that of a calculator which never fails
    outages.success.ARM          success after this training / that after training with a calculator which never fails

`--checkpoint` takes the policy of an earlier run in place of a warm start. Nothing here measures time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from record import finish
from runs import finish_run, last_checkpoint

from mtgrpo.config.compose import preset
from mtgrpo.parts.extension import load_file
from mtgrpo.record.curve import Curve
from mtgrpo.stages.evaluate import evaluate
from mtgrpo.stages.run import Run, open_run
from mtgrpo.stages.saving import saving
from mtgrpo.stages.trainer import reinforce
from mtgrpo.types import Group, Status, Trajectory

FOLDER = Path("outputs/benchmarks/outages")
TOOL = Path(__file__).with_name("failing_tool.py")
ARMS: dict[str, Sequence[str]] = {
    "anew": ["environment.call_retries=0", "environment.on_outage=fail"],
    "told": ["environment.call_retries=0", "environment.on_outage=observe"],
    "fail": ["environment.on_outage=fail"],
    "observe": ["environment.on_outage=observe"],
}
RATES = (0.05, 0.3)
LEARNED = ("anew", "told", "fail")
RESAMPLES = 2000
MEASURES: dict[str, Callable[[Trajectory], float]] = {
    "tool_rate": lambda trajectory: float(trajectory.tool_calls > 0),
    "turns": lambda trajectory: float(len(trajectory.turns)),
    "success": lambda trajectory: float(trajectory.status is Status.COMPLETED and trajectory.reward == 1),
}


def policy() -> Path:
    """The demo's policy after its warm start, made unless it is there."""
    finish_run(["sft", "recipe=calculator_from_scratch"], FOLDER / "sft")
    return last_checkpoint(FOLDER / "sft")


@asynccontextmanager
async def opened(checkpoint: Path, rate: float, arm: str, *words: str) -> AsyncGenerator[tuple[Run, Any]]:
    """A run whose calculator fails, and the module of that calculator."""
    tool = load_file(TOOL)
    tool.rate = rate
    tool.random_numbers.seed(1)
    words = (f"model.name={checkpoint}", f"environment.tools=['{TOOL}:calculator']", *ARMS[arm], *words)
    settings = preset("calculator_from_scratch", *words, "environment.backoff_s=0", "sft.steps=0", "log=[]")
    async with open_run(settings, FOLDER / "play") as run:
        yield run, tool


def play(checkpoint: Path, tasks: int, samples: int, rate: float, arm: str) -> list[Group]:
    """The groups of one arm."""

    async def groups() -> list[Group]:
        async with opened(checkpoint, rate, arm, f"eval.tasks={tasks}") as (run, _):
            runner = run.runner.at("outages")
            return list(await asyncio.gather(*(runner.run_group(task, samples) for task in run.held_out)))

    return asyncio.run(groups())


def learn(checkpoint: Path, steps: int, rate: float, arm: str, seed: int) -> float:
    """Success after training with a calculator that fails, measured with one that does not."""
    words = (f"seed={seed}", f"trainer.steps={steps}", "rollout.prompts_per_step=16", "eval.tasks=100")
    words = (*words, "optimizer.schedule=constant", "eval.every_steps=0")

    async def success() -> float:
        async with opened(checkpoint, rate, arm, *words) as (run, tool):
            with saving(run, curve := Curve()) as saver:
                await reinforce(run, saver, curve)
            tool.rate = 0.0
            return (await evaluate(run.runner, run.held_out, 4))["eval/success"]

    return asyncio.run(success())


def interval(sums: np.ndarray, counts: np.ndarray) -> list[float]:
    """The sum of `sums` over that of `counts`, each of one task, and its 95 % interval over resampled tasks."""
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [0.025, 0.975])
    return [round(float(value), 4) for value in (sums.sum() / counts.sum(), low, high)]


def describe(groups: Sequence[Group]) -> dict[str, Any]:
    """Of the conversations that did not fail."""
    trained = [[t for t in group.trajectories if t.status is not Status.FAILED] for group in groups]
    counts = np.array([len(group) for group in trained], float)
    found: dict[str, Any] = {
        name: interval(np.array([sum(map(measure, group)) for group in trained]), counts)
        for name, measure in MEASURES.items()
    }
    comparable = [group for group in trained if len(group) > 1]
    pushes = [
        sum((t.reward - np.mean([s.reward for s in group])) * (t.tool_calls > 0) for t in group) for group in comparable
    ]
    found["push"] = interval(np.array(pushes), np.array([len(group) for group in comparable], float))
    played = [t for group in groups for t in group.trajectories]
    return found | {
        "failed": 1 - sum(map(len, trained)) / len(played),
        "retries": sum(t.tool_retries for t in played) / len(played),
        "outages": sum(len(t.outages) for t in played) / len(played),
    }


def main() -> None:
    """Play and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    given = parser.parse_args()
    checkpoint = given.checkpoint or policy()
    ratios: dict[str, float | None] = {}
    runs: dict[str, dict[str, Any]] = {}
    asked = [("never", "fail", 0.0), *((f"{arm}.{rate}", arm, rate) for rate in RATES for arm in ARMS)]
    for name, arm, rate in asked:
        runs[name] = describe(play(checkpoint, given.tasks, given.samples, rate, arm))
        ratios[f"outages.tool_rate.{name}"] = round(runs[name]["tool_rate"][0] / runs["never"]["tool_rate"][0], 3)
        print(f"{name:14}", runs[name], flush=True)
    learned: dict[str, list[float]] = {}
    for name, arm, rate in [asked[0], *((arm, arm, RATES[-1]) for arm in LEARNED)] if given.seeds else []:
        learned[name] = [learn(checkpoint, given.steps, rate, arm, seed) for seed in given.seeds]
        ratios[f"outages.success.{name}"] = round(sum(learned[name]) / sum(learned["never"]), 3)
        print(f"{name:14}", learned[name], flush=True)
    complete = (given.tasks, given.samples, given.steps, given.seeds) == (200, 4, 15, [0, 1, 2])
    finish("outages", ratios, {"runs": runs, "learned": learned}, "outages.json" if complete else None)


if __name__ == "__main__":
    main()
