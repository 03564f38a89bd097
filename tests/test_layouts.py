"""Ranks that share the model make the updates of one process; real processes over gloo, in fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo import preset
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.layouts.ddp import DataParallel
from mtgrpo.policy.layouts.fsdp2 import FullySharded
from mtgrpo.policy.step import Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerRank
from mtgrpo.policy.witness import evidence_of
from mtgrpo.stages.policy_trainer import trainer_config
from mtgrpo.types import Finish, Group, Message, Task, Trajectory, Turn
from ranks import on_ranks

WORDS = ["model.name=tiny", "model.dtype=float64", "optimizer.lr=1e-3", "optimizer.max_grad_norm=0.5"]
UPDATES = 3


@dataclass(frozen=True)
class Case:
    """What is trained, and laid out how."""

    words: tuple[str, ...] = ()
    budget: int = 400
    trunk: int = 0  # tokens that all prompts begin with
    tasks: int = 3
    turns: int = 3


CASES = {
    "grpo": Case(),
    "common_prompt": Case(trunk=150),
    "walks": Case(budget=60),
    "walks_of_one_task": Case(budget=60, tasks=1, turns=6),
    "empty_rank": Case(tasks=1, turns=1, budget=4000),
    "lora": Case(("model.name=tiny-calculator", "model.lora.rank=4")),
    "kl": Case(("kl.coef=0.1", "reference.update_every=2")),
    "kl_in_reward": Case(("kl.coef=0.1", "kl.place=reward", "kl.estimator=k1", "reference.ema=0.5"), budget=100),
    "ppo": Case(("algorithm=ppo", "advantage=gae", "model.value_head=true")),
    "gspo": Case(("algorithm=gspo", "trainer.updates_per_batch=2")),
    "minibatches": Case(("trainer.minibatch_trajectories=4", "trainer.updates_per_batch=2", "correction.weight=token")),
    "entropy": Case(("algorithm.top_entropy=0.5",)),
    "muon": Case(("optimizer.kind=muon",)),
    "checkpointing": Case(("model.checkpointing=true",), budget=60),
}
LAYOUTS = {
    "ddp": DataParallel,
    "fsdp2_whole": lambda rank, ranks: FullySharded(rank, ranks, reshard=False),
    "fsdp2_resharded": lambda rank, ranks: FullySharded(rank, ranks, reshard=True),
}


def play(seed: int, case: Case) -> list[Group]:
    """Groups of four random conversations."""
    numbers = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(20, 1900) for _ in range(count)]

    system, groups = tokens(case.trunk), list[Group]()
    for task in range(case.tasks):
        prompt, trajectories = system + tokens(40 + 7 * task), list[Trajectory]()
        for sibling in range(4):
            turns: list[Turn] = []
            for number in range(numbers.randint(1, case.turns)):
                output, context = tokens(numbers.randint(3, 25)), tokens(numbers.randint(4, 12)) if number else prompt
                logprobs = [-8 * numbers.random() for _ in output]
                turns.append(
                    Turn(context, output, logprobs, [0] * len(output), Finish.STOP, Message("assistant"), number - 1)
                )
            reward = numbers.random()
            trajectories.append(
                Trajectory(
                    Task(f"t/{task}", (Message("user", "?"),)), sibling, turns=turns, reward=reward,
                    turn_rewards=[0.0] * len(turns),
                )
            )  # fmt: skip
        groups.append(Group(trajectories[0].task, trajectories))
    return groups


def train(
    rank: int, ranks: int, layout: str, case: Case, folder: Path, steps: Sequence[int] = range(UPDATES)
) -> tuple[list[Metrics], dict[str, Tensor], list[str]]:
    """Some updates; their metrics, the weights after them, and the notes."""
    experiment = preset("calculator_from_scratch", *WORDS, f"batch.token_budget={case.budget}", *case.words)
    config = trainer_config(experiment, [1], None, folder)
    config = replace(config, learning=replace(config.learning, exact=False))
    parallel: ParallelLayout = LAYOUTS[layout](rank, ranks) if layout != "one" else ParallelLayout()
    trainer = TrainerRank(config, parallel)
    trainer.begin(Stage.reinforcement)
    rows: list[Metrics] = []
    for step in steps:
        groups = play(10 + step, case)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch = build_batch(trajectories)
        rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
        evidence = evidence_of(groups, config.learning)
        rows.append(at_once(trainer.updating(batch, rewards, step, step, evidence)))
    weights = {name: weight.clone() for name, weight in trainer.weights().tensors(torch.float64)}
    return rows, weights, trainer.notes


def furthest(one: Any, other: Any) -> tuple[float, str]:
    """How far the metrics, relative, and the weights are apart, and where."""
    distances: list[tuple[float, str]] = []
    for step, (row, row_of_other) in enumerate(zip(one[0], other[0], strict=True)):
        assert row.keys() == row_of_other.keys(), row.keys() ^ row_of_other.keys()
        for name, value in row.items():
            if not name.endswith(("_tokens", "worst_trajectory")):  # what is computed several times
                distances.append((abs(row_of_other[name] - value) / max(1.0, abs(value)), f"{name} of update {step}"))
    assert one[1].keys() == other[1].keys()
    distances += [((one[1][name] - other[1][name]).abs().max().item(), name) for name in one[1]]
    return max(distances)


def train_all(rank: int, ranks: int, layouts: Sequence[str], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """What `train` gives, or the error, of every layout and case."""
    given: dict[str, Any] = {}
    for layout in layouts:
        for name in names:
            given[f"{layout} {name}"] = train(rank, ranks, layout, CASES[name], folder)
    return given


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks come to, by layout and case."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_ranks(2, train_all, folder, list(LAYOUTS), list(CASES), folder)


@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_one_process(name: str, layout: str, two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    one = train(0, 1, "one", CASES[name], tmp_path)
    first, second = (rank[f"{layout} {name}"] for rank in two_ranks)
    assert furthest(one, first)[0] < 1e-12, furthest(one, first)
    assert furthest(first, second)[0] == 0
