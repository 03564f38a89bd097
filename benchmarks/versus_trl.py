"""Whole training steps against TRL's GRPOTrainer, the one peer that trains agents on a CPU: seconds and memory.

Both train the same model on the same tasks in the same order with the same calculator, sampling, optimiser and loss,
in float32: ours as `mtgrpo train`, TRL as its documentation has it (trl_side.py), synchronously and without vLLM. They
are processes that take steps in turns. A step is everything from one batch of weights to the next.

    2m_280      4 tasks x 8, prompts of about 280 tokens, up to 3 turns
    2m_1000     the same with prompts of about 1,000
    30m_280     the first with the larger model
    2m_turns    chains of 8 calculations: up to 9 turns

The models come from a short warm start (`mtgrpo sft`), so that they call the calculator. trl has the whole batch in one
micro-batch and activation checkpointing on. trl_best has the best number of rows per micro-batch and of threads, found
by a sweep on a quarter of the batch, and no checkpointing. TRL has as many threads as there are cores unless stated,
ours as many as `mtgrpo train` takes. Memory is the peak above what the process had before its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import RESULTS, finish
from runs import finish_run, last_checkpoint
from sides import HERE, Side, Step

from mtgrpo.model.tiny import load_tokenizer
from mtgrpo.tasks.calculator import draw_problem, tell

THREADS = len(os.sched_getaffinity(0))
GROUPS, SIBLINGS = 4, 8
FILE = "versus_trl.json"


@dataclass(frozen=True)
class Case:
    """One workload."""

    model: str
    system_prompt: int  # tokens
    steps: tuple[int, int]  # calculations per task
    completion: int  # longest conversation after its prompt, in tokens
    token_budget: int  # of our micro-batches: room for at least one group
    best: bool  # measured against trl_best too

    def words(self) -> list[str]:
        """Of `mtgrpo`, beside the model."""
        low, high = self.steps
        return [
            "recipe=calculator_from_scratch",
            f"task.system_prompt='{system_prompt(self.system_prompt)}'",
            f"task.min_steps={low}",
            f"task.max_steps={high}",
            f"environment.max_turns={high + 1}",
            "task.demonstrator.right=0.9",
            *(f"task.demonstrator.{kind}=0" for kind in ("wrong_number", "wrong_operator", "swapped", "early")),
            f"batch.token_budget={self.token_budget}",
            "eval.every_steps=0",
            "checkpoint.every_steps=0",
        ]


CASES = {
    "2m_280": Case("tiny-2m", 230, (1, 2), 128, 2048, best=True),
    "2m_1000": Case("tiny-2m", 950, (1, 2), 128, 2048, best=True),
    "30m_280": Case("tiny-30m", 230, (1, 2), 128, 1024, best=False),
    "2m_turns": Case("tiny-2m", 150, (8, 8), 400, 2048, best=False),
}


def system_prompt(tokens: int) -> str:
    """Solved examples, about `tokens` long."""
    rng, tokenizer, text = random.Random(1), load_tokenizer(), "Solve the problem."
    while len(tokenizer.encode(text)) < tokens:
        problem = draw_problem(rng, 1, 2, held_out=False)
        text += f" {tell(problem, rng)} The answer is {problem.values[-1]}."
    return text


def ours(words: Sequence[str], folder: Path, threads: int | None = None) -> Side:
    """`mtgrpo train`, evaluating next to nothing."""
    own = [
        "eval.tasks=1",
        "eval.samples=1",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
        f"log=[{HERE / 'gate.py'}:Gate]",
    ]
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return Side("ours", ["-m", "mtgrpo", "train", *words, *own, f"hydra.run.dir={folder / 'ours'}"], folder, **count)


def trl(words: Sequence[str], folder: Path, threads: int = THREADS, **settings: Any) -> Side:
    """TRL's trainer; `settings` are those of trl_side.py."""
    settings["words"] = list(words)
    name, command = f"trl-{len(list(folder.iterdir()))}", [str(HERE / "trl_side.py"), json.dumps(settings)]
    return Side(name, command, folder, OMP_NUM_THREADS=str(threads))


def warm_start(words: Sequence[str], folder: Path) -> Path:
    """`mtgrpo sft`, once; the folder of the weights."""
    calling = finish_run(["sft", *words], folder)["eval/tool_rate/after"]
    assert calling > 0.2, f"after its warm start the model calls the tool in {calling:.0%} of the conversations"
    return last_checkpoint(folder)


def taught(name: str, kept: Path) -> Path:
    """The weights of a case after its short warm start."""
    case = CASES[name]
    lesson = ["sft.steps=100", "sft.batch_size=8", "eval.tasks=16", "eval.samples=1"]
    return warm_start([*case.words(), f"model.name={case.model}", *lesson], kept / name)


def sampled_tokens(step: Step) -> float:
    """By the policy, in this step."""
    own = step.get("perf/tokens_per_s", 0.0) * step["time/rollout_s"]
    return step.get("sampled_tokens", own)


def sweep(words: Sequence[str], case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """TRL's best settings for the whole batch, and the seconds of all that were tried on a quarter of it."""
    found: dict[str, float] = {}
    quarter = [*words, f"rollout.prompts_per_step={GROUPS // 4}"]
    tried: dict[str, dict[str, Any]] = {}
    for threads in sorted({1, THREADS}):
        for rows in (8, 4, 2, 1):
            name = f"{rows} rows, {threads} threads"
            tried[name] = {"threads": threads, "micro_batches": GROUPS * SIBLINGS // rows, "checkpointing": False}
            few = tried[name] | {"micro_batches": SIBLINGS * GROUPS // 4 // rows}
            found[name] = short(quarter, case, folder, few)
    best = min(found, key=lambda name: found[name])
    few = tried[best] | {"micro_batches": 1, "continuous_batching": True}
    found[f"8 rows, {few['threads']} threads, continuous batching"] = short(quarter, case, folder, few)
    return tried[best], found


def short(words: Sequence[str], case: Case, folder: Path, settings: dict[str, Any]) -> float:
    """Seconds of TRL's second step."""
    side = trl([*words, "trainer.steps=3"], folder, completion=case.completion, **settings)
    side.step()
    seconds = side.step()["seconds"]
    side.close()
    return round(seconds, 3)


def measure(name: str, repeats: int, with_best: bool, kept: Path) -> dict[str, Any]:
    """The sides of one case in turns; the first step of each is not counted."""
    case, weights = CASES[name], taught(name, kept)
    words = [
        *case.words(),
        f"model.name={weights}",
        "sft.steps=0",
        f"rollout.prompts_per_step={GROUPS}",
        f"rollout.group_size={SIBLINGS}",
        f"sampling.max_new_tokens={case.completion}",
        f"rollout.max_trajectory_tokens={case.completion}",
        f"trainer.steps={repeats + 2}",
        f"reward={HERE / 'spread.py'}:Spread",  # of conversations that are all alike ours would train none
        "optimizer.lr=1e-5",  # so that all go on sampling the same
        "optimizer.schedule=constant",
    ]
    detail: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings: dict[str, dict[str, Any]] = {"trl": {}}
        if with_best and case.best:
            settings["trl_best"], detail["sweep"] = sweep(words, case, folder)
            detail["best"] = settings["trl_best"]
        sides = {"ours": ours(words, folder)}
        sides |= {side: trl(words, folder, completion=case.completion, **own) for side, own in settings.items()}
        for side in sides.values():
            stack.callback(side.close)
            side.step()
        steps: dict[str, list[Step]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, process in sides.items():
                steps[side].append(process.step())
        for side, found in steps.items():
            detail[side] = summary(found, sides[side].loaded)
            report(name, side, detail[side], detail["ours"])
    return detail


def summary(steps: Sequence[Step], loaded: Step) -> dict[str, Any]:
    """Of one side: medians over its steps, and every step's seconds."""
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "rollout_s": statistics.median(step["time/rollout_s"] for step in steps),
        "train_s": statistics.median(step["time/train_s"] for step in steps),
        "sampled_tokens": statistics.mean(sampled_tokens(step) for step in steps),
        "reward": statistics.mean(step.get("reward/mean", step.get("reward", 0.0)) for step in steps),
        "trained_tokens": statistics.mean(step.get("policy/trained_tokens", sampled_tokens(step)) for step in steps),
        "threads": loaded["threads"],
        "memory_bytes": steps[-1]["peak_bytes"] - loaded["resident_bytes"],
        "every_step_s": [round(step["seconds"], 3) for step in steps],
    }


def report(case: str, side: str, found: dict[str, Any], own: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{case:9}{side:9}{found['seconds']:8.2f} s a step ({found['rollout_s']:6.2f} rollout, "
        f"{found['train_s']:6.2f} training){found['sampled_tokens']:7.0f} tokens sampled, "
        f"{found['memory_bytes'] / 2**20:6.0f} MiB, {found['seconds'] / own['seconds']:6.2f} of ours",
        flush=True,
    )


def ratios_of(detail: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """By the names of the targets."""
    ratios: dict[str, float | None] = {}
    for name, found in detail.items():
        for side, suffix in (("trl", ""), ("trl_best", "_best")):
            if side in found:
                ratios[f"versus_trl.{name}{suffix}"] = round(found[side]["seconds"] / found["ours"]["seconds"], 3)
    if "30m_280" in detail:
        found = detail["30m_280"]
        ratios["versus_trl.memory"] = round(found["ours"]["memory_bytes"] / found["trl"]["memory_bytes"], 3)
    return ratios


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-best", action="store_true", help="leave out the sweep and trl_best")
    parser.add_argument("--keep", action="store_true", help="of the cases that are not measured, what the file has")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/versus_trl"), help="keeps warm starts")
    given = parser.parse_args()
    detail = {
        name: measure(name, given.repeats, not given.without_best, given.folder.resolve()) for name in given.cases
    }
    ratios = ratios_of(detail)
    print(json.dumps(ratios, indent=1))
    settings = {"trl_threads": THREADS, "repeats": given.repeats, "trl": version("trl")}
    if given.keep:
        detail = json.loads((RESULTS / FILE).read_text())["detail"] | detail
        ratios = ratios_of({name: detail[name] for name in CASES})
    complete = set(CASES) <= set(detail) and not given.without_best
    finish(
        "versus_trl", ratios, detail | settings, FILE if complete else None, detail[given.cases[0]]["ours"]["threads"]
    )


if __name__ == "__main__":
    main()
