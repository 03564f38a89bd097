"""DeepSpeed's ZeRO-3 makes the updates of one process; it computes in fp32, so that what differs is rounding."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo import preset
from mtgrpo.batch.forest import build_batch
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.layouts.zero3 import DeepSpeedSharded
from mtgrpo.policy.step import Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerRank
from mtgrpo.stages.policy_trainer import trainer_config
from mtgrpo.weights.checkpoint import flatten
from ranks import on_ranks
from test_parallel_training import CASES, WORDS, Case, furthest, play, train

DEEPSPEED = Path(__file__).resolve().parent.parent / ".venv-deepspeed"
ZERO3 = ["grpo", "common_prompt", "walks", "walks_of_one_task", "empty_rank", "lora", "ppo", "minibatches", "kl_apart"]

Stopped = tuple[dict[str, Tensor], dict[str, Any]]  # weights, and the state of the optimiser


needs_deepspeed = pytest.mark.skipif(
    not list(DEEPSPEED.glob(".ready-*")), reason="there is no .venv-deepspeed: make deepspeed-env makes it"
)


def in_fp32(name: str) -> Case:
    """A case as DeepSpeed computes it."""
    return replace(CASES[name], words=(*CASES[name].words, "model.dtype=float32"))


def imitate(trainer: TrainerRank, seed: int) -> Metrics:
    """An update on the tokens of random conversations."""
    batch = build_batch([trajectory for group in play(seed, Case()) for trajectory in group.trajectories])
    return at_once(trainer.imitating(batch, torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)))


def train_in_stages(layout: ParallelLayout, folder: Path, stopped: Stopped | None = None) -> tuple[Any, Stopped]:
    """A stage after another of which two updates are made; or the second of these alone, where that is `stopped`.

    Gives what `furthest` compares, and where it could have been stopped.
    """
    words = [*WORDS, "model.dtype=float32", "sft.optimizer.kind=adamw", "sft.steps=4", "batch.token_budget=400"]
    trainer = TrainerRank(trainer_config(preset("calculator_from_scratch", *words), [1], None, folder), layout)
    if stopped is not None:
        trainer.model.load_state_dict(stopped[0])
    trainer.begin(Stage.imitation)
    if stopped is None:
        imitate(trainer, 1)
        trainer.begin(Stage.imitation)
        imitate(trainer, 2)
    assert trainer.policy is not None
    optimizer = trainer.policy.optimizer
    if stopped is not None:
        optimizer.load_state_dict(stopped[1])
    else:
        stopped = {name: weight.clone() for name, weight in trainer.weights().tensors(None)}, optimizer.state_dict()
        stopped = pickle.loads(pickle.dumps(stopped))  # a copy
    rows = [imitate(trainer, 3)]
    return (rows, dict(trainer.weights().tensors(torch.float64))), stopped


def use_deepspeed(rank: int, ranks: int) -> None:
    """In a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}  # as launchers set
    sys.path.append(str(DEEPSPEED))
    warnings.simplefilter("ignore")


def train_by_deepspeed(rank: int, ranks: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """What cases come to."""
    use_deepspeed(rank, ranks)
    return {name: train(rank, ranks, "parallel_zero3", in_fp32(name), folder) for name in names}


def train_in_stages_by_deepspeed(rank: int, ranks: int, folder: Path, stopped: Stopped) -> tuple[Any, Any]:
    """Stages that begin here, and the last of one process."""
    use_deepspeed(rank, ranks)
    begun = train_in_stages(DeepSpeedSharded(rank, ranks, {}), folder)
    return begun, train_in_stages(DeepSpeedSharded(rank, ranks, {}), folder, stopped)


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks come to."""
    folder, half = tmp_path_factory.mktemp("deepspeed"), len(ZERO3) // 2
    halves = [
        on_ranks(2, train_by_deepspeed, folder / str(number), names, folder)
        for number, names in enumerate([ZERO3[:half], ZERO3[half:]])
    ]
    return [first | second for first, second in zip(*halves, strict=True)]


def check_near(one: Any, other: Any) -> None:
    """Of 1e-5, relative for metrics; the norms of one process are summed in fp32, and are 3e-5 too low."""
    for row, row_of_other in zip(one[0], other[0], strict=True):
        name = "grad_norm" if "grad_norm" in row else "policy/grad_norm"
        assert row.pop(name) == pytest.approx(row_of_other.pop(name), rel=1e-4)
    assert furthest(one, other)[0] < 1e-5, furthest(one, other)


@needs_deepspeed
@pytest.mark.real
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ZERO3)
def test_parallel_zero3_makes_the_updates_of_one_process(
    name: str, by_deepspeed: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, second = by_deepspeed
    assert furthest(first[name], second[name])[0] == 0
    check_near(train(0, 1, "parallel_none", in_fp32(name), tmp_path), first[name])


@needs_deepspeed
@pytest.mark.real
@pytest.mark.timeout(1500)
def test_parallel_zero3_and_one_process_go_on_from_one_another(tmp_path: Path) -> None:
    one, stopped = train_in_stages(ParallelLayout(), tmp_path)
    begun, gone_on = on_ranks(2, train_in_stages_by_deepspeed, tmp_path / "ranks", tmp_path, stopped)[0]
    ours, theirs = flatten(stopped[1]), flatten(begun[1][1])
    assert ours[0].keys() == theirs[0].keys() and ours[1] == theirs[1]
    for name, moment in ours[0].items():
        torch.testing.assert_close(theirs[0][name], moment, rtol=1e-3, atol=1e-7, msg=name)
    for other in (begun, gone_on, train_in_stages(ParallelLayout(), tmp_path, begun[1])):
        check_near(copy.deepcopy(one), other[0])
