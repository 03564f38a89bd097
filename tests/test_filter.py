"""Which groups are trained, and what is played in the place of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from mtgrpo.advantages import AdvantageEstimator, Assigned, varies
from mtgrpo.advantages.gigpo import GiGPO
from mtgrpo.advantages.return_to_go import ReturnToGo
from mtgrpo.advantages.rewards import Rewards, comparable
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.advantages.turn import ByTurn
from mtgrpo.algorithms import Algorithm, Tensor, Truncated
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.errors import ConfigError
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import Filter, RolloutSettings
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.tasks import IndexedStream
from mtgrpo.types import Finish, Group, Message, Status, Task, Trajectory, Turn

FAILED, TRUNCATED = Status.FAILED, Status.TRUNCATED


def group(*rewards: float, statuses: dict[int, Status] | None = None, name: str = "0") -> Group:
    task = Task(name, (Message("user", "?"),))
    statuses = statuses or {}
    return Group(
        task,
        [
            Trajectory(task, i, turns(1), status=statuses.get(i, Status.COMPLETED), reward=r)
            for i, r in enumerate(rewards)
        ],
    )


def turns(count: int) -> list[Turn]:
    return [Turn([1], [2], [-1.0], [0], Finish.STOP, Message("assistant", "")) for _ in range(count)]


def paid(outcome: float, *of_turns: tuple[float, ...]) -> Group:
    """Siblings of one outcome, whose turns are paid."""
    one = group(*[outcome] * len(of_turns))
    for trajectory, amounts in zip(one.trajectories, of_turns, strict=True):
        trajectory.turns, trajectory.turn_rewards = turns(len(amounts)), list(amounts)
    return one


def kept(
    settings: Filter, one: Group, algorithm: GRPO | None = None, estimator: AdvantageEstimator | None = None
) -> bool:
    chosen, by = algorithm or GRPO(), estimator or WholeTrajectory()
    (compared,) = comparable([one], chosen)
    return not settings.refuses(compared, 1.0, lambda siblings: varies(siblings, by, chosen))


def test_without_a_filter_everything_is_trained() -> None:
    assert kept(Filter(), group(0, 0))
    assert kept(Filter(), group(1, 1))


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (group(0, 0, 0), False),
        (group(1, 1, 1), False),
        (group(1, 0, 0), True),
        (group(0, 0, 1, statuses={2: FAILED}), False),  # a failed one is no sibling
        (group(0, 0.5, statuses={1: TRUNCATED}), False),  # is worth min(0, 0.5) in training
    ],
)
def test_groups_of_equal_rewards_are_left_out(one: Group, expected: bool) -> None:
    assert kept(Filter(zero_variance=True), one) is expected


def test_what_counts_is_what_training_sees() -> None:
    one = group(0, 0.5, statuses={1: TRUNCATED})
    assert kept(Filter(zero_variance=True), one, GRPO(truncated=Truncated.keep))


def test_rewards_of_turns_are_a_difference_too() -> None:
    one = group(1, 1)
    one.trajectories[0].turn_rewards = [0.5]
    assert kept(Filter(zero_variance=True), one)


@pytest.mark.parametrize(
    ("one", "teaches"),
    [  # by the estimators below
        (paid(0, (0, 0), (0, 0, 0), (0, 0, 0, 0)), (False, False, False, False, False)),  # wrong, of any length
        (paid(1, (0, 0), (0, 0, 0), (0, 0, 0, 0)), (False, False, True, False, True)),  # sooner is better, discounted
        (paid(0, (1, 0), (0, 1), (1, 0)), (False, True, True, True, True)),  # the same sum, in another order
        (paid(0, (1, 0), (0, 0), (1, 0)), (True, True, True, True, True)),
    ],
)
def test_a_group_is_left_out_where_all_its_advantages_are_zero(one: Group, teaches: tuple[bool, ...]) -> None:
    estimators = (WholeTrajectory(), ReturnToGo(), ReturnToGo(gamma=0.9), ByTurn(), GiGPO())
    assert tuple(kept(Filter(zero_variance=True), one, estimator=by) for by in estimators) == teaches


def test_what_an_estimator_keeps_is_of_training_alone() -> None:
    @dataclass
    class Watched(WholeTrajectory):
        seen: list[int] = field(default_factory=list[int])

        def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
            self.seen.append(len(rewards.outcome))
            return super().assign(rewards, algorithm, values)

    watched = Watched()
    assert varies(group(1, 0), watched, GRPO()) and watched.seen == []


def test_a_penalised_group_is_worth_what_training_makes_of_it() -> None:
    one = paid(0, (1, 0), (0, 0), (2, 0))
    for trajectory in one.trajectories:
        trajectory.status = TRUNCATED
    assert not kept(Filter(zero_variance=True), one, GRPO(truncated=Truncated.penalise))
    assert not kept(Filter(zero_variance=True), one, GRPO(truncated=Truncated.mask))
    assert kept(Filter(zero_variance=True), one, GRPO(truncated=Truncated.keep))


@pytest.mark.parametrize(
    ("rewards", "expected"), [((0, 0, 0, 0), False), ((1, 0, 0, 0), True), ((1, 1, 1, 0), True), ((1, 1, 1, 1), False)]
)
def test_the_band_of_difficulty(rewards: tuple[float, ...], expected: bool) -> None:
    assert kept(Filter(min_success=0.25, max_success=0.75), group(*rewards)) is expected


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Filter(refill=True), "nothing is left out"),
        (lambda: Filter(min_success=0.8, max_success=0.2), "min_success"),
        (lambda: Filter(zero_variance=True, max_batches=0), "max_batches"),
    ],
)
def test_contradictions_are_refused(build: Callable[[], Filter], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


class Dealer:
    """Plays at once: every third task has rewards that differ."""

    def at(self, scope: str) -> Dealer:
        return self

    async def run_group(self, task: Task, size: int, extra: int) -> Group:
        await asyncio.sleep(0)
        return group(1, 0 if int(task.id) % 3 == 0 else 1, name=task.id)


def batches(count: int, most: int, staleness: int = 0) -> list[RolloutBatch]:
    async def play() -> list[RolloutBatch]:
        tasks = IndexedStream(None, lambda index: Task(str(index), ()), seed=0)
        settings = RolloutSettings(prompts_per_step=4, max_staleness=staleness)

        def chosen(one: Group) -> bool:
            return kept(Filter(zero_variance=True), one)

        stream = Stream(cast(RolloutRunner, Dealer()), tasks, settings, chosen, most)
        found = [await stream.batch(version) for version in range(count)]
        await stream.close()
        return found

    return asyncio.run(play())


def test_without_refill_a_batch_is_smaller() -> None:
    for played in batches(3, most=1):
        assert len(played.groups) == 4
        assert [int(g.task.id) % 3 for g in played.trained] == [0] * len(played.trained)
        assert 1 <= len(played.trained) <= 2
        assert played.left_out == 4 - len(played.trained)


@pytest.mark.parametrize("staleness", [0, 2])
def test_with_refill_a_batch_is_exact(staleness: int) -> None:
    found = batches(4, most=10, staleness=staleness)
    for version, played in enumerate(found):
        assert len(played.trained) == 4
        assert len(played.groups) in (12, 16)  # whole batches, until there are enough
        assert len(played.admitted) == len(played.queue_s) == len(played.groups)
        assert version - min(played.admitted) <= staleness
    names = [g.task.id for played in found for g in played.groups]
    assert len(set(names)) == len(names)  # each task is played once


def test_a_refill_ends() -> None:
    (played,) = batches(1, most=2)
    assert len(played.groups) == 8
    assert 2 <= len(played.trained) < 4


@pytest.mark.parametrize(
    ("one", "said"),
    [(group(1, 1), "rewards are all equal"), (group(0, 0, 0, 1), "too hard"), (group(1, 1, 1, 0), "too easy")],
)
def test_why_a_group_is_left_out_is_said(one: Group, said: str) -> None:
    chosen = Filter(zero_variance=True, min_success=0.3, max_success=0.6)
    assert said in chosen.refuses(one, 1.0, lambda siblings: varies(siblings, WholeTrajectory(), GRPO()))
