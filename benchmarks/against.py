"""Our side of benchmarks as it is here against that of an older commit of this repository, in turns.

    python benchmarks/against.py ba36c60 versus_trl.2m_280 forest

A name is a benchmark or one of its cases: a whole training step (versus_trl), a rollout, forward and backward of one
batch (forest, condensation), with 2.2 M weights, or 30 M where it says 30m. Each commit runs its own src and
benchmarks, in processes with as many threads as it chooses (OMP_NUM_THREADS=1: both one); training steps begin from the
same weights. What is here need not be committed. "tokens" is what the steps trained, old / here: where it is 1 their
seconds compare.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import record  # before torch
import torch
from gate import wait
from sides import HERE, Side, Step

CASES = {
    "versus_trl": ["2m_280", "2m_1000", "30m_280"],
    "rollout": ["multi_turn", "single_turn"],
    "forest": ["A", "B", "C", "D"],
    "condensation": ["g1_0.5", "g1_4", "g8_0.5", "g8_4"],
}
KEPT = Path("outputs/benchmarks/versus_trl")  # warm starts
Measured = Callable[[], Step]  # takes a step


def training(case: str, repeats: int, weights: Path, folder: Path) -> Measured:
    """Steps of `mtgrpo train` as this commit's versus_trl.py starts it; its `measure` is asked for the words."""
    import versus_trl  # noqa: PLC0415  (a side imports its own commit's, and only what it measures)

    words: list[str] = []

    def take(given: Sequence[str], _: Path) -> Side:
        words.extend(given)
        raise StopIteration

    start, versus_trl.ours = versus_trl.ours, take
    versus_trl.warm_start = lambda words, folder: weights
    with suppress(StopIteration):
        versus_trl.measure(case, repeats, False, folder)
    chosen = int(os.environ.get("OMP_NUM_THREADS", 0))
    side = start(words, folder, chosen) if chosen else start(words, folder)

    def measured() -> Step:
        found = side.step()
        threads = side.loaded.get("threads", chosen or versus_trl.THREADS)
        return {"seconds": found["seconds"], "tokens": found["policy/trained_tokens"], "threads": threads}

    return measured


def sampling(case: str) -> Measured:
    """The conversations of rollout.py, with a model as `mtgrpo train` has it; older commits have no `record.load`."""
    import rollout  # noqa: PLC0415

    from mtgrpo.model.load import ModelSettings, load_model  # noqa: PLC0415

    model = record.load("tiny-2m") if hasattr(record, "load") else load_model(ModelSettings("tiny-2m"), 0)
    ours, conversations = rollout.Ours(model), rollout.workloads(model.config.vocab_size, quick=False)[case]
    return lambda: {"seconds": ours.play(conversations)[0]}


def learning(benchmark: str, case: str) -> Measured:
    """Forward and backward on the forest."""
    import condensation  # noqa: PLC0415
    import forest  # noqa: PLC0415

    scenario = forest.scenarios("2m", quick=False)[case] if benchmark == "forest" else condensation.CASES[case]
    sides = forest.Sides("2m", scenario, forest.TOKEN_BUDGET)
    return lambda: {"seconds": forest.timed(sides, ["forest"], 1)["forest"][0] / 1000}


def serve(benchmark: str, case: str, repeats: str, weights: str, folder: str) -> None:
    """The process of a side: a step before the first line, which is not counted, and one for each line."""
    if benchmark == "versus_trl":
        measured = training(case, int(repeats), Path(weights), Path(folder))
    else:
        measured = sampling(case) if benchmark == "rollout" else learning(benchmark, case)
    while True:
        wait({"tokens": 1, "threads": torch.get_num_threads()} | measured())


def compare(benchmark: str, case: str, trees: dict[str, Path], repeats: int) -> dict[str, list[Step]]:
    """The steps of each side; who begins changes."""
    weights = ""
    if benchmark == "versus_trl":
        from versus_trl import taught  # noqa: PLC0415

        weights = str(taught(case, KEPT.resolve()))
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, tree in trees.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            search = os.pathsep.join(map(str, (tree / "src", tree / "benchmarks", HERE)))  # its own before ours
            command = ["-P", __file__, "--serve", benchmark, case, str(repeats), weights, str(folder)]
            sides[name] = stack.enter_context(Side(name, command, folder, PYTHONPATH=search))
        steps: dict[str, list[Step]] = {name: [] for name in sides}
        for repeat in range(repeats):
            for name in sorted(sides, reverse=repeat % 2 == 0):
                steps[name].append(sides[name].step())
    return steps


def row(name: str, old: Sequence[Step], here: Sequence[Step]) -> str:
    """Seconds and ratios."""
    columns = f"{name:24}"
    for least in (True, False):
        by = [(min if least else statistics.median)(step["seconds"] for step in side) for side in (old, here)]
        columns += f"{by[0]:9.3f}{by[1]:9.3f}{by[0] / by[1]:7.2f}"
    tokens = sum(step["tokens"] for step in old) / sum(step["tokens"] for step in here)
    return f"{columns}{tokens:9.2f}{old[-1]['threads']:6.0f}/{here[-1]['threads']:.0f}"


def main() -> None:
    """Compare."""
    names = {f"{benchmark}.{case}": (benchmark, case) for benchmark, cases in CASES.items() for case in cases}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*CASES, *names])}; none: all")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    if unknown := (wanted := set(given.names or CASES)) - {*CASES, *names}:
        parser.error(f"there is no {' '.join(unknown)}; names are {', '.join([*CASES, *names])}")
    git = ["git", "-C", str(HERE), "worktree"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        old = Path(folder) / "old"
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), given.commit], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(old)], check=True)
        head = "".join(f"{name:>9}{'here':>9}{'ratio':>7}" for name in ("least", "median"))
        print(f"{record.machine()}\n{'seconds':24}{head}{'tokens':>9} threads")
        for name, (benchmark, case) in names.items():
            if {name, benchmark} & wanted:
                steps = compare(benchmark, case, {"old": old, "here": HERE.parent}, given.repeats)
                print(row(name, steps["old"], steps["here"]), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main()
