"""What it takes to share the training of a model among several ranks, and whether they make the updates of one process.

    parallel.balance_max    the most that a rank computes, over the mean of all
    parallel.extra_passes   the passes that all ranks make in one order, over those of the rank that has most
    parallel.apart          how far whole runs of 2 and 3 ranks are from that of one process, in fp64: the largest
                            difference of last weights, of logged losses and, relative, of norms of gradients

The first two are the worst over the batches of tests/test_sharing.py on 2, 4, 8 and 16 ranks. Losses of more than 1 are
compared relative to their size; those of less may be 0. In the runs that are compared every conversation is trained, by
the rewards of spread.py, in several micro-batches.

The updates that are timed are of 64 made-up conversations, by the model of 2.2 million weights: of one process with one
thread and with two, and of two ranks with one thread each, in turns. Processor time is that of all threads of a
process, by its own clock. For the rest of the time a rank waits: for the other, and for a core where others use them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from runs import finish_run, last_checkpoint
from safetensors.torch import load_file
from torch import distributed as dist

from mtgrpo import preset
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.batch.word import Pass, common_word
from mtgrpo.model.prefix import word_of
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.step import at_once
from mtgrpo.policy.trainer import Stage, TrainerRank
from mtgrpo.runtime.resources import keep_freed_memory
from mtgrpo.stages.policy_trainer import trainer_config

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from ranks import on_ranks
from test_parallel_training import LAYOUTS, Case, play
from test_sharing import COSTS, RANKS, SHAPES, batch_of, least_bound, packed

HERE = Path(__file__).resolve().parent
WHOLE_RUN = (
    "recipe=calculator_from_scratch", f"reward={HERE / 'spread.py'}:Spread", "model.name=tiny", "model.dtype=float64",
    "sft.optimizer.kind=adamw", "optimizer.kind=adamw", "rollout.prompts_per_step=3", "rollout.group_size=4",
    "algorithm.truncated=keep", "batch.token_budget=256", "eval.tasks=2", "eval.samples=1",
)  # fmt: skip
PARALLEL = {
    "ddp": ("parallel=ddp",),
    "fsdp2_whole": ("parallel=fsdp2", "parallel.reshard=false"),
    "fsdp2_resharded": ("parallel=fsdp2", "parallel.reshard=true"),
}
SIDES = {  # ranks, threads of each
    "one": (1, 1),
    "one_2_threads": (1, 2),
    **dict.fromkeys(PARALLEL, (2, 1)),
}
MEASURED = (
    "medians of all updates but the first of each process; wall: of the slower rank; processor time: time.process_time "
    "of each rank, added up; waiting: 1 - processor time / (wall x ranks x threads): for the other rank, for a second "
    "thread, and for one of the two cores, which other people's work used too; uneven: 1 - mean / most of the ranks' "
    "processor time, the least that they would wait with a core for each; sent_bytes: by formula, of collectives in a "
    "ring, as many are received; over gloo, as here, fsdp2 sends its gradients twice"
)
TIMED = Case(budget=2048, trunk=200, tasks=16, turns=4)


def shares(shapes: Sequence[str], counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Of each number of ranks the worst shape: costs over their mean and over the bound, and passes."""
    found: dict[str, dict[str, float]] = {}
    for ranks in counts:
        worst = {"max_over_mean": 0.0, "max_over_bound": 0.0, "passes": 0.0}
        for shape in shapes:
            for kind, cost in COSTS.items():
                packings = packed(shape, kind, ranks)
                costs = [sum(micro.cost for micro in rank.micro_batches) for rank in packings]
                words = [word_of([micro for micro in rank.micro_batches if micro.computed]) for rank in packings]
                here = {
                    "max_over_mean": max(costs) * ranks / sum(costs),
                    "max_over_bound": max(costs) / least_bound(batch_of(shape), cost, ranks),
                    "passes": len(common_word(words)) / max(map(len, words)),
                }
                worst = {name: max(worst[name], ratio) for name, ratio in here.items()}
        found[str(ranks)] = worst
    return found


def train(folder: Path, steps: Sequence[str], *words: str) -> Path:
    """A whole run, of which each process has one thread."""
    finish_run(("train", *WHOLE_RUN, *steps, *words), folder, threads=1)
    return folder


def apart(one: Path, other: Path) -> dict[str, float]:
    """How far two runs are from one another; see above."""
    rows = [list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines())) for run in (one, other)]
    found = {"weights": 0.0, "loss": 0.0, "grad_norm": 0.0}
    counted = Counter[str]()
    for row, row_of_other in zip(*rows, strict=True):
        for name in row.keys() | row_of_other.keys():
            kind = name.rpartition("/")[2]
            if kind in ("loss", "grad_norm"):
                size = max(abs(row[name]), 1.0 if kind == "loss" else 0.0)
                found[kind] = max(found[kind], abs(row[name] - row_of_other[name]) / size)
                counted[kind] += 1
    assert counted["loss"] and counted["grad_norm"], "steps have trained"
    weights, others = (load_file(last_checkpoint(run) / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    found["weights"] = max((weights[name] - others[name]).abs().max().item() for name in weights)
    assert all(map(math.isfinite, found.values()))
    return found


def compare_runs(layouts: Sequence[str], counts: Sequence[int], steps: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Whole runs against that of one process, by layout and number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = train(folder / "one", steps)
        return {
            layout: {
                str(ranks): apart(
                    one, train(folder / f"{layout}_{ranks}", steps, *PARALLEL[layout], f"devices.train.num={ranks}")
                )
                for ranks in counts
            }
            for layout in layouts
        }


def update(rank: int, ranks: int, side: str, threads: int, count: int, folder: Path) -> dict[str, Any]:
    """What a rank measures of `count` updates after the first."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    words = ("model.name=tiny-2m", f"batch.token_budget={TIMED.budget}")
    experiment = preset("calculator_from_scratch", *words)
    config = trainer_config(experiment, [1], None, folder)
    config = replace(config, learning=replace(config.learning, exact=False))  # what was "sampled" is made up
    trainer = TrainerRank(config, LAYOUTS[f"parallel_{side}"](rank, ranks) if ranks > 1 else ParallelLayout())
    trainer.begin(Stage.reinforcement)
    groups = play(0, TIMED)
    batch = build_batch([trajectory for group in groups for trajectory in group.trajectories])
    rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
    made, all_passes = Counter[str](), trainer.parallel.passes

    def passes(packings: Any) -> Iterator[Any]:
        for micro, prefix, step in all_passes(packings):
            made["backward" if step is Pass.backward else "forward"] += 1
            yield micro, prefix, step

    trainer.parallel.passes = passes  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    wall, processor = list[float](), list[float]()
    for step in range(count + 1):
        made.clear()
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        at_once(trainer.updating(batch, rewards, step, step, None))
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - computed)
    weights = trainer.model.num_parameters() * trainer.model.dtype.itemsize
    return {
        "wall_s": wall[1:],
        "processor_s": processor[1:],
        **made,
        "model_bytes": weights,
        "nodes": len(batch.forest),
    }


def sent(side: str, ranks: int, model_bytes: int, forward: int, backward: int) -> int:
    """Bytes that a rank sends in an update, and as many that it gets, where they go round in a ring.

    Weights that are gathered pass a rank (n-1)/n times, and so do gradients of which each keeps a part of the sum; a
    sum that all have is both. (gloo sums the whole for those who keep a part: fsdp2 sends its gradients twice over it.)
    """
    times = {
        "ddp": 2,  # gradients are summed for all
        "fsdp2_whole": 2,  # weights once, gradients once
        "fsdp2_resharded": forward + 2 * backward,  # weights for each pass, gradients after each backward pass
    }
    return round(times.get(side, 0) * model_bytes * (ranks - 1) / ranks)


def timed(rounds: int, count: int) -> dict[str, dict[str, Any]]:
    """Seconds of updates of all sides, of every update and their medians; the sides take turns."""
    found: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for side, (ranks, threads) in SIDES.items():
                here = Path(folder) / f"{side}_{number}"
                os.environ["OMP_NUM_THREADS"] = str(threads)  # which MKL reads as it is loaded
                found[side].append(on_ranks(ranks, update, here, side, threads, count, here))
    return {side: summed(side, by_round) for side, by_round in found.items()}


def summed(side: str, by_round: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Of all rounds of a side: time of the slowest rank, processor time of all, the mean share that ranks wait."""
    ranks, threads = SIDES[side]
    wall, processor, uneven = list[float](), list[float](), list[float]()
    for members in by_round:
        wall += [max(times) for times in zip(*(rank["wall_s"] for rank in members), strict=True)]
        spent = list(zip(*(rank["processor_s"] for rank in members), strict=True))
        processor += map(sum, spent)
        uneven += [1 - sum(times) / ranks / max(times) for times in spent]
    waited = [1 - worked / (ranks * threads * took) for took, worked in zip(wall, processor, strict=True)]
    first = by_round[0][0]
    return {
        "ranks": ranks,
        "threads": threads,
        "wall_s": round(statistics.median(wall), 3),
        "processor_s": round(statistics.median(processor), 3),
        "waiting": round(statistics.median(waited), 3),
        "uneven": round(statistics.median(uneven), 3),
        "passes": {name: first[name] for name in ("forward", "backward")},
        "sent_bytes": sent(side, ranks, first["model_bytes"], first["forward"], first["backward"]),
        "every_wall_s": [round(seconds, 3) for seconds in wall],
        "every_processor_s": [round(seconds, 3) for seconds in processor],
    } | {name: first[name] for name in ("model_bytes", "nodes")}


def main() -> None:
    """Count, compare, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of each, and nothing is written")
    quick = parser.parse_args().quick
    if quick:
        balance = shares(list(SHAPES)[-1:], RANKS[:1])
        runs = compare_runs(["fsdp2_resharded"], [2], ("sft.steps=1", "trainer.steps=1"))
        seconds = timed(rounds=1, count=1)
    else:
        balance = shares(list(SHAPES), RANKS)
        runs = compare_runs(list(PARALLEL), [2, 3], ("sft.steps=3", "trainer.steps=5"))
        seconds = timed(rounds=2, count=5)
    worst = max(distance for by in runs.values() for found in by.values() for distance in found.values())
    ratios: dict[str, float | None] = {
        "parallel.balance_max": round(max(found["max_over_mean"] for found in balance.values()), 4),
        "parallel.extra_passes": round(max(found["passes"] for found in balance.values()), 4),
        "parallel.apart": worst,
    }
    detail = {
        "shares": balance,
        "apart": runs,
        "updates": seconds,
        "measured": MEASURED,
    }
    record.finish("parallel", ratios, detail, None if quick else "parallel.json", threads=1)


if __name__ == "__main__":
    main()
