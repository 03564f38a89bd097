"""The table of agent RL: every algorithm on small tasks with several seeds, in cells that a spare core makes in turn.

    python benchmarks/table.py [--cells N]

A cell is one run of `mtgrpo train` on one thread, with an algorithm at its own defaults; on the same kind of processor
it gives the same digits. Each is kept in `--folder` as a JSON file of its own. Several of these processes may run at
once: who makes a cell holds a lock on its file `.claim` meanwhile, which ends with the process, so that a cell whose
process has died is taken by another. Who finds all cells made writes the table.

    two_steps      two calculations with a calculator, from the weights that ship
    chains         the same, two to four
    guess_number   a game of up to five turns, from a warm start, which is a cell of its own

Success is on held-out tasks at temperature 1. Intervals are Student's, of 95 %, over seeds.

    table.seeds        how many each mean is of
    table.spread       the best algorithm's mean success over tasks minus the worst's
    table.spread_low   the lower end of its interval; too high, for the two are chosen by what was measured
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import age
from algorithms import GROUPS
from record import finish, machine
from runs import claimed, finish_run, last_checkpoint
from versus_trl_learning import STUDENT, interval

from mtgrpo.runtime.files import write_whole

ALGORITHMS = {name: arm.words for name, arm in GROUPS["algorithms"].items() if "," not in name}
TASKS: dict[str, Sequence[str]] = {
    "two_steps": ["recipe=calculator", "task.max_steps=2"],
    "chains": ["recipe=calculator"],
    "guess_number": ["recipe=guess_number_tiny"],
}
TAUGHT = ("guess_number",)  # what begins with a warm start
SEEDS = (0, 1, 2)
MEASURED = ("eval.every_steps=0", "eval.tasks=100", "eval.samples=2", "checkpoint.every_steps=0")
SMALL = ("trainer.steps=24", "rollout.prompts_per_step=8", "rollout.group_size=8", *MEASURED)
QUICK = ("sft.steps=2", "trainer.steps=2", "rollout.prompts_per_step=2", "eval.tasks=8", "eval.samples=1")
Found = dict[str, Any]
Place = tuple[str, str, int]  # algorithm, task and seed


@dataclass(frozen=True)
class Cell:
    """One run, from the words that describe it."""

    name: str  # of its file
    words: tuple[str, ...]
    warm: Cell | None = None  # with its last checkpoint the run begins

    def kept(self, folder: Path) -> Found | None:
        """What was found, if it is made. Ends the process where that was with other settings."""
        file = folder / f"{self.name}.json"
        if not file.exists():
            return None
        found = json.loads(file.read_text())
        if found["words"] != list(self.words):
            sys.exit(f"{file} is of other settings than now: remove it, or give another --folder")
        return found

    def take(self, folder: Path) -> bool:
        """Make the cell, unless it is made, another process is at it, or its warm start is missing; whether it did."""
        if self.kept(folder) or (self.warm and not self.warm.kept(folder)):
            return False
        with claimed(folder / f"{self.name}.claim") as ours:
            if not ours or self.kept(folder):
                return False
            write_whole(folder / f"{self.name}.json", json.dumps(self.make(folder)).encode())
        return True

    def make(self, folder: Path) -> Found:
        """The run, and what is kept of it: of a warm start its weights too."""
        run, words = folder / "runs" / self.name, list(self.words)
        if self.warm:
            words.append(f"model.name={last_checkpoint(folder / 'runs' / self.warm.name)}")
        summary = finish_run(words, run, threads=1)
        found: Found = {"words": list(self.words), "machine": machine(), "commit": age.head()}
        found |= {when: summary.get(f"eval/success/{when}") for when in ("before", "after")}
        if words[0] == "train":
            shutil.rmtree(run)
        print(f"{self.name}: {found['before']} -> {found['after']}", flush=True)
        return found


def cells_of(
    algorithms: Iterable[str], tasks: Iterable[str], seeds: Iterable[int], extra: Sequence[str]
) -> dict[Place, Cell]:
    """By algorithm, task and seed; the seeds come one after another. `extra`: more words of every run."""
    warm = {name: Cell(f"warm_start {name}", ("sft", *TASKS[name], *MEASURED, *extra)) for name in TAUGHT}
    cells: dict[Place, Cell] = {}
    for seed in seeds:
        for task in tasks:
            for algorithm in algorithms:
                words = (*TASKS[task], *ALGORITHMS[algorithm], f"seed={seed}", *SMALL, *extra, "sft.steps=0")
                cells[algorithm, task, seed] = Cell(f"{algorithm} {task} {seed}", ("train", *words), warm.get(task))
    return cells


def work(cells: Iterable[Cell], folder: Path, limit: int) -> int:
    """Make cells until none can be taken, or `limit` are made; how many."""
    waiting = list(dict.fromkeys(one for cell in cells for one in (cell.warm, cell) if one))
    made = 0
    while made < limit and any(cell.take(folder) for cell in waiting):
        made += 1
    return made


def aggregate(kept: Mapping[Place, Found]) -> Found:
    """Means and intervals by algorithm and task, and how algorithms differ in their mean over tasks, seed by seed."""
    algorithms, tasks, seeds = (list(dict.fromkeys(part)) for part in zip(*kept, strict=True))
    overall: dict[str, list[float]] = {}
    by_task: dict[str, dict[str, Found]] = {}
    for name in algorithms:
        success = {task: {seed: float(kept[name, task, seed]["after"]) for seed in seeds} for task in tasks}
        by_task[name] = {task: estimate(list(of.values())) | {"seeds": of} for task, of in success.items()}
        overall[name] = [statistics.mean(of[seed] for of in success.values()) for seed in seeds]
    ranked = sorted(algorithms, key=lambda name: -statistics.mean(overall[name]))
    pairs: list[Found] = []
    for better, worse in combinations(ranked, 2):
        differences = [a - b for a, b in zip(overall[better], overall[worse], strict=True)]
        pairs.append({"better": better, "worse": worse, **estimate(differences)})
    starts = {task: [kept[name, task, seed]["before"] for name in algorithms for seed in seeds] for task in tasks}
    return {
        "before": {task: statistics.mean(of) for task, of in starts.items()},
        "algorithms": {name: {"overall": estimate(overall[name]), "tasks": by_task[name]} for name in ranked},
        "spread": pairs[len(ranked) - 2],  # the first with the last
        "pairs": len(pairs),
        "differ": [pair for pair in pairs if pair["mean"] > pair["half_interval"]],
        **{f"{name}s": sorted({found[name] for found in kept.values()}) for name in ("machine", "commit")},
    }


def estimate(values: Sequence[float]) -> Found:
    """The mean, and half of its interval."""
    mean, half = interval(values)
    return {"mean": round(mean, 4), "half_interval": round(half, 4)}


def main() -> None:
    """Make what is missing; report once all is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=sys.maxsize, metavar="N", help="stop after so many")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help=f"2 to {max(STUDENT)} of them")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/table"), help="keeps the cells")
    parser.add_argument("--quick", action="store_true", help="two algorithms, one task, two steps; writes no results")
    given = parser.parse_args()
    if len(set(given.seeds)) not in STUDENT:
        parser.error(f"--seeds must be 2 to {max(STUDENT)} different ones, got {given.seeds}")
    cells = cells_of(ALGORITHMS, TASKS, given.seeds, ())
    if given.quick:
        cells = cells_of(("grpo", "ppo"), ("guess_number",), given.seeds[:2], QUICK)
    folder = given.folder.resolve() / ("quick" if given.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    made = work(cells.values(), folder, given.cells)
    kept = {place: cell.kept(folder) for place, cell in cells.items()}
    missing = sum(found is None for found in kept.values())
    print(f"made {made} cells; {missing} of {len(kept)} are missing", flush=True)
    if missing:
        return
    detail = aggregate({place: found for place, found in kept.items() if found})
    spread = detail["spread"]
    ratios: dict[str, float | None] = {
        "table.seeds": len({seed for *_, seed in kept}),
        "table.spread": spread["mean"],
        "table.spread_low": round(spread["mean"] - spread["half_interval"], 4),
    }
    file = None if given.quick or not set(SEEDS) <= set(given.seeds) else "table.json"
    finish("table", ratios, detail, file, threads=1)


if __name__ == "__main__":
    main()
