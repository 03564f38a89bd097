"""Do the recipes with a model from scratch hold on seeds that nothing was calibrated on?

Every run has its own warm start, then GRPO, then an evaluation on held-out tasks, all by one seed. What is in
benchmarks/results/unseen.json is not repeated, unless `--anew`; nor is a run that `--folder` keeps. One thread each;
`--jobs` runs at once. Nothing here measures time.

    unseen.reached_min   the least share of seeds that reach the goal, of all recipes
    unseen.worst         the least held-out success of any seed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import RESULTS, finish

ARMS = {
    "calculator": ["recipe=calculator"],
    "ledger_tiny, keep_last": ["recipe=ledger_tiny"],
    "ledger_tiny, summarize": ["recipe=ledger_tiny", "condenser=summarize"],
}
GOALS = {"calculator": 0.85, "ledger_tiny, keep_last": 0.8, "ledger_tiny, summarize": 0.8}
SEEDS = range(31, 41)  # on which no choice of the recipes was made


def run(arm: str, seed: int, root: Path) -> dict[str, float]:
    """Held-out success of one run: before and after GRPO, sampled at temperature 1, and greedy after."""
    folder = root / arm.replace(", ", "_") / str(seed)
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        words = [*ARMS[arm], f"seed={seed}", "log=[jsonl]", "eval.every_steps=0", f"hydra.run.dir={folder}"]
        command = [sys.executable, "-m", "mtgrpo", "train", *words]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    names = {"before": "success/before", "after": "success/after", "greedy_after": "greedy/after"}
    found = {name: float(summary[f"eval/{key}"]) for name, key in names.items()}
    print(f"{arm}, seed {seed}: {found['before']:.3f} -> {found['after']:.3f}", flush=True)
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/unseen"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    given = parser.parse_args()
    found = {} if given.anew else measured()
    missing = [(arm, seed) for seed in given.seeds for arm in given.arms if str(seed) not in found.get(arm, {})]
    with ThreadPoolExecutor(given.jobs) as pool:
        done = pool.map(lambda one: run(*one, given.folder.resolve()), missing)
        for (arm, seed), success in zip(missing, done, strict=True):
            found.setdefault(arm, {})[str(seed)] = success
    reached = {arm: sum(one["after"] >= GOALS[arm] for one in by.values()) / len(by) for arm, by in found.items()}
    worst = min(one["after"] for by in found.values() for one in by.values())
    ratios: dict[str, float | None] = {"unseen.reached_min": min(reached.values()), "unseen.worst": worst}
    finish("unseen", ratios, {"goals": GOALS, "runs": found}, "unseen.json")


def measured() -> dict[str, dict[str, dict[str, float]]]:
    """The runs of before, by arm and seed."""
    file = RESULTS / "unseen.json"
    return json.loads(file.read_text())["detail"]["runs"] if file.exists() else {}


if __name__ == "__main__":
    main()
