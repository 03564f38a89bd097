"""What do rollouts ahead of the trainer gain when tools are slow, and what do they cost?

The embedded default with the calculator of slow_tool.py, at `rollout.max_staleness` 0, 1, 2 and 4, all from the weights
of one warm start. Seconds of steps until the mean reward of three steps in a row reaches 0.85, the staleness of the
tokens that were trained, and the reward of every step.

    async.speedup   seconds at staleness 0 / seconds at staleness 2, which was chosen before anything was measured
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from record import finish
from runs import finish_run, steps_of
from sides import HERE
from versus_trl import warm_start
from versus_trl_learning import seconds_to_goal

NAMED = 2  # the staleness of the ratio


def run(weights: Path, seed: int, staleness: int, steps: int) -> dict[str, Any]:
    """One run through the command line."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "recipe=calculator_from_scratch",
            f"seed={seed}",
            f"model.name={weights}",
            "sft.steps=0",
            f"environment.tools=[{HERE / 'slow_tool.py'}:calculator]",
            f"rollout.max_staleness={staleness}",
            "trainer.deterministic=false",
            f"trainer.steps={steps}",
            "eval.every_steps=0",
            "eval.tasks=100",
            "eval.samples=2",
        ]
        summary, rows = finish_run(["train", *words], Path(folder)), steps_of(Path(folder))
    timed = [row | {"seconds": row["time/rollout_s"] + row["time/train_s"]} for row in rows]
    found = {
        "seconds_to_goal": seconds_to_goal(timed),
        "seconds": sum(row["seconds"] for row in timed),
        "success_after": summary["eval/success/after"],
        "token_staleness": statistics.mean(row["rollout/token_staleness"] for row in rows),
        "reward": [round(row["reward/mean"], 4) for row in rows],
        "rollout_s": [round(row["time/rollout_s"], 3) for row in rows],
        "train_s": [round(row["time/train_s"], 3) for row in rows],
    }
    print(f"seed {seed}, staleness {staleness}:", {k: v for k, v in found.items() if isinstance(v, float)}, flush=True)
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of staleness 0 and 2; others: the first"
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/versus_trl"), help="keeps warm starts")
    given = parser.parse_args()
    weights = warm_start(["seed=0"], given.folder.resolve() / "calculator")
    found = {
        k: [run(weights, seed, k, given.steps) for seed in (given.seeds if k in (0, NAMED) else given.seeds[:1])]
        for k in given.staleness
    }
    seconds: dict[int, float] = {}
    for staleness, runs in found.items():
        reached = [run["seconds_to_goal"] for run in runs]
        if all(reached):
            seconds[staleness] = statistics.median(reached)
    complete = 0 in seconds and NAMED in seconds
    ratios: dict[str, float | None] = {"async.speedup": round(seconds[0] / seconds[NAMED], 3) if complete else None}
    print(json.dumps({"seconds to goal": seconds} | ratios))
    finish("async", ratios, {"runs": found}, "async.json" if given.staleness == [0, 1, 2, 4] else None)


if __name__ == "__main__":
    main()
