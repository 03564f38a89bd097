"""What it costs to train on conversations whose context is condensed at every turn: forward and backward of one batch.

Every turn's context is a fixed prompt of p tokens, a summary of 64 and an observation of 128; 64 tokens are sampled. So
a turn adds s = 256 tokens, and of the turns before it only the prompt is seen again. p / s is 0.5, 1, 2 and 4.

    g1_*   1 conversation of 10 turns
    g8_*   a group of 8 conversations of 5 turns each

    per_turn_packed   one row per turn without padding, each attending only to itself
    forest            every distinct token once

Both sides compute the same gradient (checked in every case). "tokens" is the ratio of tokens by the formula, "ideal"
that of floating-point operations by counting, "speed-up" the median over repetitions in which the sides take turns,
with its quartiles, and "fraction" is how much of the ideal it reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import record  # before torch
import torch
from forest import TOKEN_BUDGET, Scenario, Sides, agree, timed

SUMMARY, SAMPLED, OBSERVED = 64, 64, 128
ADDED = SUMMARY + SAMPLED + OBSERVED  # tokens per turn
TURNS = {1: 10, 8: 5}  # by group size
SIZE = "2m"
SIDES = ("per_turn_packed", "forest")
REPETITIONS = 5
CASES = {
    f"g{siblings}_{ratio}": Scenario(
        groups=1,
        siblings=siblings,
        prompt=int(ratio * ADDED),
        sampled=(SAMPLED, SAMPLED),
        turns=turns,
        observed=OBSERVED,
        summary=SUMMARY,
    )
    for siblings, turns in TURNS.items()
    for ratio in (0.5, 1, 2, 4)
}


def token_ratio(scenario: Scenario) -> float:
    """Tokens of per-turn rows / distinct tokens: (p + s) G N / (p + G N s), which tends to 1 + p / s."""
    turns = scenario.siblings * scenario.turns
    added = scenario.summary + scenario.observed + scenario.sampled[0]
    return (scenario.prompt + added) * turns / (scenario.prompt + turns * added)


def measure(name: str, scenario: Scenario, repetitions: int) -> dict[str, Any]:
    """One case."""
    sides = Sides(SIZE, scenario, TOKEN_BUDGET)
    agree(sides, SIDES)  # this also warms up
    times = timed(sides, SIDES, repetitions)
    needed = {side: sides.work(side) for side in SIDES}
    speedups = sorted(rows / ours for rows, ours in zip(*(times[side] for side in SIDES), strict=True))
    speedup, quarter = statistics.median(speedups), len(speedups) // 4
    ideal = needed["per_turn_packed"].flops / needed["forest"].flops
    found: dict[str, Any] = {
        "siblings": scenario.siblings,
        "turns": scenario.turns,
        "prompt": scenario.prompt,
        "tokens": round(token_ratio(scenario), 3),
        "ideal": round(ideal, 3),
        "speedup": round(speedup, 3),
        "quartiles": [round(speedups[quarter], 3), round(speedups[-1 - quarter], 3)],
        "fraction": round(speedup / ideal, 3),
        "gflops_per_s": {s: round(needed[s].flops / statistics.median(times[s]) / 1e6, 1) for s in SIDES},
        "ms": {side: [round(ms, 1) for ms in times[side]] for side in SIDES},
    }
    medians = "".join(f"{statistics.median(times[side]):>16,.1f}" for side in SIDES)
    low, high = found["quartiles"]
    print(
        f"{name:8}{medians}{found['tokens']:8.2f}{ideal:8.2f}{speedup:10.2f} ({low:.2f}-{high:.2f})"
        f"{found['fraction']:10.2f}",
        flush=True,
    )
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="some: writes no file")
    parser.add_argument(
        "--repetitions", type=int, default=REPETITIONS, help="3 x with one conversation; other: no file"
    )
    given = parser.parse_args()
    print(f"{'case':8}{'packed, ms':>16}{'forest, ms':>16}{'tokens':>8}{'ideal':>8}{'speed-up':>10}{'fraction':>22}")
    cases: dict[str, dict[str, Any]] = {}
    for name in given.cases:
        scenario = CASES[name]
        short = scenario.siblings == 1  # and so the more disturbed
        cases[name] = measure(name, scenario, given.repetitions * (3 if short else 1))
    ratios: dict[str, float | None] = {"condensation.eta_min": min(case["fraction"] for case in cases.values())}
    complete = given.cases == list(CASES) and given.repetitions == REPETITIONS
    settings = {
        "size": SIZE,
        "summary": SUMMARY,
        "sampled": SAMPLED,
        "observed": OBSERVED,
        "token_budget": TOKEN_BUDGET,
        "threads": torch.get_num_threads(),
        "repetitions": given.repetitions,
    }
    print(json.dumps(ratios, indent=1))
    record.finish("condensation", ratios, {"cases": cases, **settings}, "condensation.json" if complete else None)


if __name__ == "__main__":
    main()
