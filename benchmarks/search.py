"""Is search learned? A small model and Wikipedia's paragraphs, before and after GRPO, and the controls beside it.

    python benchmarks/search.py [--seeds S ...]

For every seed a warm start of its own, half of whose demonstrations search while the others guess, and from it:

    grpo       the recipe wiki_years_tiny
    shuffled   the same with advantages permuted over the batch: has no signal
    no_tools   the same without the tool, in training and evaluation

Success is on held-out titles at temperature 1. An evaluation without tools is made of grpo too: what was learned is
to search, not the years. Every run is kept in `--folder`; what was interrupted goes on where it stopped.

    search.gain_min      the least gain of GRPO over the seeds, in percentage points
    search.control_max   the largest gain of a control, or of GRPO's policy without its tool
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import age
from record import finish
from runs import finish_run, last_checkpoint, steps_of

from mtgrpo.record.reading import read_runs
from mtgrpo.report.content import measurements

RECIPE = ["recipe=wiki_years_tiny", "eval.every_steps=0"]
SEEDS = (54, 55, 56)  # on which nothing was calibrated
ARMS = {
    "grpo": ["eval.no_tools=true"],
    "shuffled": ["debug.advantages=shuffled"],
    "no_tools": ["environment=single_turn"],
}


def run_seed(seed: int, root: Path, extra: list[str]) -> dict[str, Any]:
    """The warm start and the arms of one seed."""
    folder = root / str(seed)
    warm = finish_run(["sft", *RECIPE, f"seed={seed}", *extra], folder / "warm_start")
    start = [f"model.name={last_checkpoint(folder / 'warm_start')}", "sft.steps=0", f"seed={seed}", *extra]
    found: dict[str, Any] = {"warm_start_s": warm["time/sft_s"]}
    for arm, words in ARMS.items():
        summary = finish_run(["train", *RECIPE, *start, *words], folder / arm)
        steps = steps_of(folder / arm)
        found[arm] = {
            **{when: summary[f"eval/success/{when}"] for when in ("before", "after")},
            **{f"greedy_{when}": summary[f"eval/greedy/{when}"] for when in ("before", "after")},
            "seconds": summary["time/rl_s"],
            "gain": gain(folder / arm, "success"),
            "training_success": [round(step["reward/success"], 4) for step in steps],
            "searched": [round(step.get("rollout/tool_rate", 0.0), 4) for step in steps],
        }
        if arm == "grpo":
            found[arm] |= {f"no_tools_{when}": summary[f"eval/no_tools/success/{when}"] for when in ("before", "after")}
            found[arm]["no_tools_gain"] = gain(folder / arm, "no_tools/success")
        points, low, high = found[arm]["gain"]
        print(f"seed {seed}, {arm}: {found[arm]['before']:.3f} -> {found[arm]['after']:.3f}", flush=True)
        print(f"  a gain of {points:+.1f} points ({low:+.1f} to {high:+.1f})", flush=True)
    return found


def gain(folder: Path, metric: str) -> list[float]:
    """How much success rose in a run, in percentage points, and its 95 % interval, compared task by task."""
    (compared,) = (found.comparison for found in measurements(*read_runs([folder])) if found.metric == metric)
    assert compared is not None
    return [
        round(100 * value, 2) for value in (compared.difference.mean, compared.difference.low, compared.difference.high)
    ]


def gains(found: dict[str, Any]) -> tuple[float, list[float]]:
    """Of GRPO, and of whatever must not gain, in percentage points."""
    controls = [found[arm]["gain"] for arm in ("shuffled", "no_tools")] + [found["grpo"]["no_tools_gain"]]
    return found["grpo"]["gain"][0], [points for points, _, _ in controls]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/search"))
    parser.add_argument("--quick", action="store_true", help="a few steps: whether it runs; writes no results")
    given = parser.parse_args()
    extra = ["sft.steps=2", "trainer.steps=2", "eval.tasks=4", "eval.samples=1"] if given.quick else []
    seeds = {seed: run_seed(seed, given.folder, extra) for seed in given.seeds}
    measured = [gains(found) for found in seeds.values()]
    ratios: dict[str, float | None] = {
        "search.gain_min": round(min(gain for gain, _ in measured), 2),
        "search.control_max": round(max(gain for _, controls in measured for gain in controls), 2),
    }
    finish("search", ratios, {"commit": age.head(), "seeds": seeds}, None if given.quick else "search.json")


if __name__ == "__main__":
    main()
