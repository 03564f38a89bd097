"""Do the recipes with a small model hold on seeds that nothing was calibrated on?

Every run is GRPO and an evaluation on held-out tasks before and after it, all by one seed; `calculator` begins with the
weights that ship, the others with a warm start of their own. What is in benchmarks/results/unseen.json is not repeated,
unless `--anew`, which forgets the arms that are given; nor is a run that `--folder` keeps. One thread each; `--jobs` at
once. The file says at which commit each arm was measured.

    unseen.reached_min   the least share of seeds that reach the goal, of all recipes
    unseen.worst         the least held-out success of any seed
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import age
from record import RESULTS, finish
from runs import finish_run

ARMS = {
    "calculator": ["recipe=calculator"],
    "ledger_tiny, keep_last": ["recipe=ledger_tiny"],
    "ledger_tiny, summarize": ["recipe=ledger_tiny", "condenser=summarize"],
}
GOALS = {"calculator": 0.9, "ledger_tiny, keep_last": 0.8, "ledger_tiny, summarize": 0.8}
SEEDS = {"calculator": range(51, 61)}  # on which no choice of the recipes was made
OTHER_SEEDS = range(31, 41)
MEASURED = {
    "before": "success/before",
    "after": "success/after",
    "greedy_before": "greedy/before",
    "greedy_after": "greedy/after",
    "pass@8_before": "pass@8/before",
    "pass@8_after": "pass@8/after",
}


def run(arm: str, seed: int, root: Path) -> dict[str, float]:
    """Held-out success of one run before and after GRPO: sampled at temperature 1, greedy, and in 8 samples."""
    folder = root / arm.replace(", ", "_") / str(seed)
    summary = finish_run(["train", *ARMS[arm], f"seed={seed}", "eval.every_steps=0"], folder, 1)
    found = {name: float(summary[f"eval/{key}"]) for name, key in MEASURED.items() if f"eval/{key}" in summary}
    print(f"{arm}, seed {seed}:", ", ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", help="default: ten of each arm's own")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/unseen"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    given = parser.parse_args()
    before = measured()
    found, commits = before.get("runs", {}), before.get("commits", {})
    for arm in given.arms if given.anew else []:
        found.pop(arm, None)
    seeds = {arm: given.seeds or SEEDS.get(arm, OTHER_SEEDS) for arm in given.arms}
    missing = [(arm, seed) for arm in given.arms for seed in seeds[arm] if str(seed) not in found.get(arm, {})]
    commits |= dict.fromkeys((arm for arm, _ in missing), age.head())
    with ThreadPoolExecutor(given.jobs) as pool:
        done = pool.map(lambda one: run(*one, given.folder), missing)
        for (arm, seed), success in zip(missing, done, strict=True):
            found.setdefault(arm, {})[str(seed)] = success
    reached = {arm: sum(one["after"] >= GOALS[arm] for one in by.values()) / len(by) for arm, by in found.items()}
    worst = min(one["after"] for by in found.values() for one in by.values())
    ratios: dict[str, float | None] = {"unseen.reached_min": min(reached.values()), "unseen.worst": worst}
    finish("unseen", ratios, {"goals": GOALS, "commits": commits, "runs": found}, "unseen.json")


def measured() -> dict[str, Any]:
    """What was measured before: runs by arm and seed, and the commit of each arm."""
    file = RESULTS / "unseen.json"
    return json.loads(file.read_text())["detail"] if file.exists() else {}


if __name__ == "__main__":
    main()
