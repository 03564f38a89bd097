"""The main ratios in a few minutes, beside the committed ones: `make bench-quick`.

Each is a part of a full benchmark, with fewer repetitions and the small model alone. A ratio more than 15 % below the
committed one is marked: the change that did it explains itself. First comes which results are older than the code that
they measure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from age import age
from record import RESULTS, machine

FALL = 0.15
PARTS = (
    ("forest", "--sizes", "2m", "--scenarios", "A", "B", "--repeats", "1"),
    ("rollout", "--sizes", "2m", "--without", "vllm", "continuous_batching", "--repeats", "3"),
    ("versus_trl", "--cases", "2m_280", "--without-best", "--repeats", "9"),
)


def measure(name: str, *options: str) -> tuple[dict[str, float], str]:
    """The ratios that the benchmark found, and with how many threads and which variables of OpenMP."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *options]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = json.loads(lines[-1])
    said = " ".join([f"{found['threads']} threads", *(f"{name}={value}" for name, value in found["openmp"].items())])
    return {name: ratio for name, ratio in found["ratios"].items() if ratio is not None}, said


def main() -> None:
    """Measure and compare."""
    for result in sorted(RESULTS.glob("*.json")):
        if old := age(result):
            print(f"results/{result.name}: {old}")
    print(f"{'ratio':40}{'now':>8}{'committed':>11}")
    for name, *options in PARTS:
        results = json.loads((RESULTS / f"{name}.json").read_text())
        committed = results["ratios"]
        if results["machine"] != machine():
            print(f"{name}: the committed ratios are of another machine, {results['machine']}: measure both sides here")
        ratios, said = measure(name, *options)
        print(f"{name}: {said}")
        for ratio, now in ratios.items():
            fell = "  more than 15 % lower" if now < (1 - FALL) * committed[ratio] else ""
            print(f"{ratio:40}{now:8.2f}{committed[ratio]:11.2f}{fell}", flush=True)


if __name__ == "__main__":
    main()
