"""Do both trainers learn the same, and how long does each take? The embedded default, GRPO by us and by TRL.

From the weights of one warm start, for every seed: the same tasks in the same order, the same optimiser, learning rate
and loss; the tokens that are sampled differ, as they do between two seeds. The sides take their steps in turns. TRL
runs with the settings that were best for it (`--rows` per micro-batch, no activation checkpointing).

    time_to_085   seconds of steps until the mean reward of three steps in a row reaches 0.85: TRL's / ours
    parity        mean reward over all steps, ours minus TRL's, with a 95 % interval over the seeds
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import finish
from sides import Step
from versus_trl import THREADS, ours, trl, warm_start

from mtgrpo.config.compose import compose

COMPLETION = 160  # tokens of a whole conversation after its prompt, TRL's only limit; ours is 40 a turn
WINDOW = 3  # steps whose mean reward must reach the goal
GOAL = 0.85
PRINTED = 5  # a line after so many steps
# The 97.5 % point of t for so many values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def reward(step: Step) -> float:
    """Of one batch."""
    return step["reward/mean"] if "reward/mean" in step else step["reward"]


def seconds_to_goal(steps: Sequence[Step]) -> float | None:
    """Seconds of steps until the mean of WINDOW rewards reaches GOAL; None when it never does."""
    for last in range(WINDOW, len(steps) + 1):
        if statistics.mean(map(reward, steps[last - WINDOW : last])) >= GOAL:
            return sum(step["seconds"] for step in steps[:last])
    return None


def race(name: str, words: Sequence[str], steps: int, **settings: Any) -> dict[str, list[Step]]:
    """Both sides, step by step in turns; `settings` are those of trl_side.py."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {"ours": stack.enter_context(ours(words, folder))}
        sides["trl"] = stack.enter_context(trl(words, folder, **settings))
        found: dict[str, list[Step]] = {side: [] for side in sides}
        for step in range(steps):
            for side, process in sides.items():
                found[side].append(process.step())
            if (step + 1) % PRINTED == 0:
                latest = {side: round(statistics.mean(map(reward, of[-PRINTED:])), 3) for side, of in found.items()}
                print(f"{name}  step {step + 1}  mean reward of the last {PRINTED}: {latest}", flush=True)
        return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def describe(found: dict[str, list[Step]]) -> dict[str, Any]:
    """One seed."""
    detail: dict[str, Any] = {}
    for name, steps in found.items():
        detail[name] = {
            "seconds_to_goal": seconds_to_goal(steps),
            "seconds": sum(step["seconds"] for step in steps),
            "reward": [round(reward(step), 4) for step in steps],
        }
    return detail


def main() -> None:
    """Race, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--rows", type=int, default=8, help="conversations per micro-batch of TRL")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/versus_trl"), help="keeps warm starts")
    given = parser.parse_args()
    experiment = compose([]).experiment
    batch = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    weights = warm_start(["seed=0"], given.folder.resolve() / "calculator")
    seeds: dict[int, dict[str, Any]] = {}
    for seed in given.seeds:
        words = ["recipe=calculator_from_scratch", f"seed={seed}", f"model.name={weights}", "sft.steps=0"]
        words.append(f"trainer.steps={given.steps}")  # its schedule ends with them
        settings = {"completion": COMPLETION, "micro_batches": batch // given.rows, "checkpointing": False}
        seeds[seed] = describe(race(f"seed {seed}", words, given.steps, **settings))
        print(json.dumps({seed: {name: found["seconds_to_goal"] for name, found in seeds[seed].items()}}), flush=True)
    times = [(s["trl"]["seconds_to_goal"], s["ours"]["seconds_to_goal"]) for s in seeds.values()]
    reached = [(theirs, own) for theirs, own in times if theirs and own]
    ratios: dict[str, float | None] = {
        "versus_trl.time_to_085": statistics.median(a / b for a, b in reached) if len(reached) == len(times) else None
    }
    means = {name: [statistics.mean(s[name]["reward"]) for s in seeds.values()] for name in ("ours", "trl")}
    detail: dict[str, Any] = {"seeds": seeds, "mean_reward": means, "rows": given.rows, "trl_threads": THREADS}
    if len(seeds) in STUDENT:
        mean, half = interval([a - b for a, b in zip(means["ours"], means["trl"], strict=True)])
        detail["parity"] = {"difference": mean, "half_interval": half}
        print(f"mean reward, ours - TRL: {mean:+.3f} +- {half:.3f}")
    print(json.dumps(ratios))
    complete = len(given.seeds) == 5
    finish(
        "versus_trl_learning",
        ratios,
        detail | {"trl": version("trl")},
        "versus_trl_learning.json" if complete else None,
    )


if __name__ == "__main__":
    main()
