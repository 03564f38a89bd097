"""Does every algorithm learn; what do rewards of turns, corrections and a KL target do? Curves on the demo's task.

    algorithms   every algorithm with its own defaults, from the weights of one warm start
    advantages   rewards for right intermediate results, compared turn by turn (advantage=turn), against the outcome
                 alone, from warm starts that seldom succeed
    kl           a KL penalty whose coefficient is adapted to a target
    stale        rollout.max_staleness=4: the engine's log-probabilities, decoupled, and interpolated

An arm is one run of `mtgrpo train`; `--jobs` of them run at once, with one thread each where there are several. Nothing
here measures time.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import finish
from runs import finish_run, last_checkpoint, steps_of

GOAL = 0.8
FOLDER = Path("outputs/benchmarks/algorithms")
LAST = 5  # steps over which the reward at the end is averaged
SELDOM = "{right: 0.02, wrong_number: 0.04, wrong_operator: 0.18, swapped: 0.12, early: 0.12}"  # the rest, .52, guesses
CRITIC = ["advantage=gae", "model.value_head=true"]
KL_TARGET = 0.02
STEPS = {"advantages": 70}  # of a run; else 50


@dataclass(frozen=True)
class Arm:
    """One run, from the warm start that its words describe."""

    words: Sequence[str]
    warm: Sequence[str] = ()


GROUPS: dict[str, dict[str, Arm]] = {
    "algorithms": {
        **{
            name: Arm([f"algorithm={name}"])
            for name in ("dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "sapo", "gmpo", "dppo")
        },
        # Its own defaults, where the recipe has others.
        "grpo": Arm(["algorithm=grpo", "algorithm.divide_by_std=true", "algorithm.clip_high=0.2"]),
        "reinforce_pp, group_baseline": Arm(["algorithm=reinforce_pp", "algorithm.group_baseline=true"]),
        "ppo": Arm(["algorithm=ppo", *CRITIC]),
    },
    "advantages": {
        "outcome alone": Arm([], [f"task.demonstrator={SELDOM}"]),
        "advantage=turn": Arm(
            ["reward=calculation", "advantage=turn", "advantage.unbiased=false"], [f"task.demonstrator={SELDOM}"]
        ),
    },
    "kl": {"kl.target": Arm(["kl.coef=0.1", "kl.estimator=k2", f"kl.target={KL_TARGET}", "kl.adaptation=1"])},
    "stale": {
        "correction.old_policy=engine": Arm(["rollout.max_staleness=4"]),
        "decoupled": Arm(["rollout.max_staleness=4", "correction.old_policy=trainer", "correction.weight=token"]),
        "interpolated": Arm(
            ["rollout.max_staleness=4", "correction.old_policy=interpolated", "correction.weight=token"]
        ),
    },
}


def warm_start(words: Sequence[str], seed: int, threads: int) -> Path:
    """The weights after `mtgrpo sft` with these words, made once."""
    name = f"seed_{seed}" + ("_seldom" if words else "")
    finish_run(["sft", *words, f"seed={seed}"], FOLDER / name, threads)
    return last_checkpoint(FOLDER / name)


def play(group: str, name: str, seed: int, steps: int, threads: int) -> dict[str, Any]:
    """One arm with one seed: success before and after, and the curves."""
    arm = GROUPS[group][name]
    place = re.sub(r"\W+", "_", f"{group} {name} {seed}")
    folder = FOLDER / place
    weights = warm_start(arm.warm, seed, threads)
    words = ["recipe=calculator_from_scratch", f"seed={seed}", f"model.name={weights}", "sft.steps=0"]
    words += [f"trainer.steps={steps}", "eval.every_steps=0", *arm.words]
    summary, rows = finish_run(["train", *words], folder, threads), steps_of(folder)

    def curve(metric: str) -> list[float]:
        return [round(row[metric], 4) for row in rows if metric in row]

    found = {
        "before": summary["eval/success/before"],
        "after": summary["eval/success/after"],
        "tool_rate_before": summary["eval/tool_rate/before"],
        "tool_rate_after": summary["eval/tool_rate/after"],
        "success": curve("reward/success"),
        "tool_rate": curve("rollout/tool_rate"),
        "clip_fraction": curve("policy/clip_fraction"),
    }
    more = {
        "kl": ("policy/kl", "policy/kl_coef"),
        "stale": ("policy/mismatch/kl", "policy/mismatch/ess", "rollout/token_staleness"),
        "advantages": ("reward/turn",),
    }
    found |= {metric: curve(metric) for metric in more.get(group, ())}
    print(f"{group}, {name}, seed {seed}: {found['before']:.3f} -> {found['after']:.3f}", flush=True)
    return found


def ratios_of(group: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float | None]:
    """The numbers with a target: success at the end; for the KL the worst ratio to its target after step 10."""
    found: dict[str, float | None] = {
        f"{group}.{name}": round(statistics.mean(run["after"] for run in many), 3) for name, many in runs.items()
    }
    if group == "kl":
        distances = [value / KL_TARGET for many in runs.values() for run in many for value in run["policy/kl"][10:]]
        found["kl.worst_over_target"] = round(max(distances), 3)
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", choices=list(GROUPS), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run, by default 70 for advantages and 50 for the others")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--arms", nargs="+", help="some of them; writes no file")
    given = parser.parse_args()
    names = given.arms or list(GROUPS[given.group])
    steps = given.steps or STEPS.get(given.group, 50)
    threads = 1 if given.jobs > 1 else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(given.jobs) as pool:
        starts = {(tuple(GROUPS[given.group][name].warm), seed) for name in names for seed in given.seeds}
        list(pool.map(lambda start: warm_start(*start, threads), sorted(starts)))
        wanted = [(name, seed) for seed in given.seeds for name in names]
        played = list(pool.map(lambda one: play(given.group, *one, steps, threads), wanted))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (name, _), found in zip(wanted, played, strict=True):
        runs[name].append(found)
    for name, many in runs.items():
        print(f"{name:42}" + "  ".join(f"{run['before']:.3f} -> {run['after']:.3f}" for run in many))
    finish(given.group, ratios_of(given.group, runs), {"runs": runs}, None if given.arms else f"{given.group}.json")


if __name__ == "__main__":
    main()
