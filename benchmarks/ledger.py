"""Can an agent learn what its window does not hold? Pages of amounts, summed up, in a window of 192 tokens.

Recipe `ledger_tiny`: conversations of 330 to 440 tokens. Every arm has its own warm start (demonstrations in the
contexts that it would see), then GRPO; held-out success is measured before and after, and every reward is kept.

    none        the whole history, in demonstrations beyond the window too; conversations end where the window does
    keep_last   the last two steps, after every turn
    summarize   a summary that the policy writes when the window is full

`--jobs` runs at once, with one thread each where there are several. Nothing here measures time.

    ledger.success_min   the least held-out success after GRPO of any seed with keep_last or summarize
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import finish
from runs import finish_run, steps_of

FOLDER = Path("outputs/benchmarks/ledger")
ARMS: dict[str, Sequence[str]] = {
    "none": ["condenser=none", "sft.steps=300", "trainer.steps=5"],  # it cannot reach the end
    "keep_last": [],
    "summarize": ["condenser=summarize"],
}


def play(name: str, seed: int, threads: int) -> dict[str, Any]:
    """The results of one run, which is made unless its folder has it."""
    folder = FOLDER / name / str(seed)
    summary = finish_run(["train", "recipe=ledger_tiny", f"seed={seed}", *ARMS[name]], folder, threads)
    rows = steps_of(folder)
    found = {
        "before": summary["eval/success/before"],
        "after": summary["eval/success/after"],
        "greedy_after": summary["eval/greedy/after"],
        "turns": statistics.mean(row["rollout/turns"] for row in rows),
        "segments": statistics.mean(row["rollout/segments"] for row in rows),
        "truncated": statistics.mean(row["rollout/truncated"] for row in rows),
        "reward": [round(row["reward/mean"], 4) for row in rows],
    }
    print(f"{name}, seed {seed}:", {k: v for k, v in found.items() if k != "reward"}, flush=True)
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // given.jobs)
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = {name: [pool.submit(play, name, seed, threads) for seed in given.seeds] for name in given.arms}
        runs = {name: [job.result() for job in jobs] for name, jobs in asked.items()}
    condensing = [run["after"] for name, found in runs.items() for run in found if name != "none"]
    ratios: dict[str, float | None] = {"ledger.success_min": min(condensing, default=None)}
    complete = given.arms == list(ARMS) and given.seeds == [1, 2, 3]
    finish("ledger", ratios, {"runs": runs}, "ledger.json" if complete else None)


if __name__ == "__main__":
    main()
