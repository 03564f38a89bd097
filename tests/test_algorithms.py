"""Advantages, per-token losses, KL estimates, weights and rewards against numbers worked out without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtgrpo.advantages.rewards import comparable, rewards_of
from mtgrpo.algorithms import Algorithm, Tokens, Truncated
from mtgrpo.algorithms.average import Average, token_weights
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator, estimate
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.batch.forest import build_batch
from mtgrpo.errors import ConfigError
from mtgrpo.types import Finish, Group, Message, Status, Task, Trajectory, Turn

REWARDS = st.floats(-10, 10, allow_subnormal=False)


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def advantages(algorithm: Algorithm, rewards: Tensor) -> Tensor:
    """Of one group."""
    return algorithm.baseline(rewards, torch.zeros(len(rewards), dtype=torch.long)).advantage(rewards)


def close(actual: Tensor, expected: Sequence[float], tolerance: float = 1e-12) -> bool:
    return bool(((actual - double(expected)).abs() <= tolerance).all())


# --- advantages ---


def test_advantages_are_standard_scores_with_the_unbiased_deviation() -> None:
    # rewards 1 0 0 0: mean 1/4, sum of squares 3/4, over n - 1 = 3: variance 1/4, deviation 1/2
    found = advantages(GRPO(), double([1, 0, 0, 0]))
    assert close(found, [0.75 / 0.500001] + [-0.25 / 0.500001] * 3)


def test_without_the_deviation_advantages_are_only_centred() -> None:
    assert close(advantages(GRPO(divide_by_std=False), double([1, 0, 0, 0])), [0.75, -0.25, -0.25, -0.25])


def test_epsilon_is_added_to_the_deviation() -> None:
    # rewards 3 1: mean 2, variance 2, deviation sqrt 2
    scale = math.sqrt(2) + 0.5
    assert close(advantages(GRPO(epsilon=0.5), double([3, 1])), [1 / scale, -1 / scale])


@given(st.lists(REWARDS, min_size=2, max_size=9), st.booleans())
def test_advantages_agree_with_numpy(rewards: list[float], divide_by_std: bool) -> None:
    values = np.array(rewards)
    expected = values - values.mean()
    if divide_by_std:
        expected = expected / (values.std(ddof=1) + 1e-6)
    found = advantages(GRPO(divide_by_std=divide_by_std), double(rewards))
    if max(rewards) - min(rewards) > 1e-6:  # below it, numpy's own rounding is what is left
        assert close(found, expected.tolist(), 1e-7)


@given(REWARDS, st.integers(1, 12), st.booleans())
def test_equal_rewards_have_an_advantage_of_exactly_zero(reward: float, count: int, divide_by_std: bool) -> None:
    found = advantages(GRPO(divide_by_std=divide_by_std), double([reward] * count))
    assert found.tolist() == [0.0] * count


# of each of the classes that GRPO is made of
@pytest.mark.parametrize(
    "bad", [{"clip_low": 0}, {"clip_low": 1.5}, {"clip_high": 0}, {"epsilon": 0}, {"top_entropy": 0}]
)
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        GRPO(**bad)


def test_a_group_of_one_is_refused() -> None:
    model, pair, alone = (
        SimpleNamespace(**one) for one in ({"value_head": False}, {"group_size": 2}, {"group_size": 1})
    )
    GRPO().check(SimpleNamespace(model=model, rollout=pair))
    with pytest.raises(ConfigError, match="group_size"):
        GRPO().check(SimpleNamespace(model=model, rollout=alone))


# --- the clipped loss ---

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


@pytest.mark.parametrize(
    ("advantage", "losses", "clipped", "gradients"),
    [
        (2.0, [-1.0, -1.8, -2.0, -2.2, -2.6], [0, 0, 0, 0, 1], [-1.0, -1.8, -2.0, -2.2, 0.0]),
        (-2.0, [1.6, 1.8, 2.0, 2.2, 3.0], [1, 0, 0, 0, 0], [0.0, 1.8, 2.0, 2.2, 3.0]),
    ],
)
def test_clipped_loss(
    advantage: float, losses: list[float], clipped: list[int], gradients: list[float]
) -> None:  # within [0.8, 1.3] the loss is -ratio * advantage; d loss / d logp = -ratio * advantage where not clipped
    old = double([-1.0, -2.0, -3.0, -0.5, -4.0])
    logp = (old + double(RATIOS).log()).requires_grad_()
    found = GRPO(clip_low=0.2, clip_high=0.3).loss(Tokens(logp, old, double([advantage] * 5)))
    assert close(found.loss.detach(), losses)
    assert found.clipped.tolist() == [bool(flag) for flag in clipped]
    (gradient,) = torch.autograd.grad(found.loss.sum(), logp)
    assert close(gradient, gradients)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(0.01, 10), st.booleans()), min_size=1, max_size=20))
def test_the_clip_flag_is_set_exactly_where_the_gradient_vanishes(tokens: list[tuple[float, float, bool]]) -> None:
    logp = double([difference for difference, _, _ in tokens]).requires_grad_()
    advantage = double([size if positive else -size for _, size, positive in tokens])
    found = GRPO().loss(Tokens(logp, torch.zeros_like(advantage), advantage))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logp)
    assert torch.equal(gradient == 0, found.clipped)


def test_at_ratio_one_the_gradient_is_minus_the_advantage() -> None:
    logp = double([-0.3, -7.0, 0.0]).requires_grad_()
    found = GRPO().loss(Tokens(logp, logp.detach(), double([1.5, -0.5, 3.0])))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logp)
    assert gradient.tolist() == [-1.5, 0.5, -3.0]
    assert not found.clipped.any()


# --- KL ---

P, Q = [0.5, 0.2, 0.2, 0.05, 0.05], [0.1, 0.3, 0.3, 0.2, 0.1]


def exact_kl() -> float:
    return float(sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True)))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Estimator.k1, [math.log(2), 0.0, -math.log(4)]),
        (Estimator.k2, [math.log(2) ** 2 / 2, 0.0, math.log(4) ** 2 / 2]),
        (Estimator.k3, [0.5 - 1 + math.log(2), 0.0, 4 - 1 - math.log(4)]),
    ],
)
def test_kl_of_tokens_twice_equally_and_a_quarter_as_likely(estimator: Estimator, expected: list[float]) -> None:
    ref = double([-2.0, -1.0, -0.5])
    logp = ref + double([2.0, 1.0, 0.25]).log()
    assert close(estimate(estimator, logp, ref), expected)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_k3_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    logp, ref = double([a for a, _ in pairs]), double([b for _, b in pairs])
    assert (estimate(Estimator.k3, logp, ref) >= -1e-15).all()


@pytest.mark.parametrize("estimator", [Estimator.k1, Estimator.k3])
def test_k1_and_k3_are_the_kl_on_average(estimator: Estimator) -> None:
    found = estimate(estimator, double(P).log(), double(Q).log())
    assert (double(P) * found).sum().item() == pytest.approx(exact_kl(), abs=1e-12)


def test_k2_is_not_the_kl_on_average_but_its_gradient_is() -> None:
    logits = double(P).log().requires_grad_()
    logp = logits.log_softmax(-1)
    found = (double(P) * estimate(Estimator.k2, logp, double(Q).log())).sum()
    exact = (logp.exp() * (logp - double(Q).log())).sum()
    assert exact.item() == pytest.approx(exact_kl(), abs=1e-12)
    assert abs(found.item() - exact_kl()) > 0.1
    (gradient,) = torch.autograd.grad(found, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.1


def test_a_negative_kl_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match="`coef`"):
        KL(coef=-0.1)


# --- weights ---


def members(trajectory: Sequence[int], group: Sequence[int] = (), segment: Sequence[int] = ()) -> list[Tensor]:
    return [torch.tensor(part or trajectory) for part in (trajectory, group, segment)]


def test_weights_by_hand() -> None:
    """Three trajectories of 3, 1 and 2 tokens; the first two are siblings; the first is stored in two segments."""
    parts = members([4, 4, 4, 7, 9, 9], [0, 0, 0, 0, 1, 1], [0, 0, 1, 2, 3, 3])
    assert close(token_weights(Average.token_mean, *parts), [1 / 6] * 6, 1e-16)
    assert close(token_weights(Average.trajectory_mean, *parts), [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2, 1e-16)
    assert close(token_weights(Average.prompt_mean, *parts), [1 / 8] * 4 + [1 / 4] * 2, 1e-16)
    assert close(token_weights(Average.constant, *parts, 10), [1 / 30] * 6, 1e-16)
    assert close(token_weights(Average.sequence_mean, *parts), [1 / 8] * 2 + [1 / 4] * 2 + [1 / 8] * 2, 1e-16)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.sampled_from(Average))
def test_weights_sum_to_one(trajectory: list[int], average: Average) -> None:
    weights = token_weights(average, *members(trajectory), len(trajectory))
    if average is Average.constant:
        assert weights.sum().item() == pytest.approx(1 / len(set(trajectory)), abs=1e-12)
    else:
        assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert (weights > 0).all()
    if average is Average.trajectory_mean:
        shares = [weights[torch.tensor(trajectory) == i].sum().item() for i in sorted(set(trajectory))]
        assert shares == pytest.approx([1 / len(shares)] * len(shares), abs=1e-12)


# --- rewards of groups ---

TASK = Task("test/0", (Message("user", "?"),))
FAILED, TRUNCATED, COMPLETED = Status.FAILED, Status.TRUNCATED, Status.COMPLETED


def group(*ended: tuple[float, Status]) -> Group:
    return Group(TASK, [Trajectory(TASK, status=status, reward=reward) for reward, status in ended])


def trajectory_advantages(groups: Sequence[Group], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Advantage and trained mask of every trajectory."""
    nothing = torch.zeros(0, dtype=torch.long)
    rewards = rewards_of(groups, algorithm, nothing, nothing)
    return algorithm.baseline(rewards.outcome, rewards.group).advantage(rewards.outcome), rewards.trained


def centred(truncated: Truncated = Truncated.penalise) -> GRPO:
    return GRPO(divide_by_std=False, truncated=truncated)


def test_each_group_has_its_own_baseline() -> None:
    groups = [group((1, COMPLETED), (0, COMPLETED)), group((5, COMPLETED), (1, COMPLETED), (0, COMPLETED))]
    advantage, trained = trajectory_advantages(groups, centred())
    assert advantage.tolist() == [0.5, -0.5, 3, -1, -2]
    assert trained.tolist() == [True] * 5


def test_failed_trajectories_are_in_neither_baseline_nor_batch() -> None:
    groups = [
        group((1, COMPLETED), (100, FAILED), (0, COMPLETED)),
        group((0, FAILED), (0, FAILED)),
        group((7, COMPLETED), (0, FAILED)),  # alone: nothing to compare with
        group((7, COMPLETED)),  # was never meant to be compared
    ]
    left = comparable(groups, centred())
    assert [len(g.trajectories) for g in comparable(groups, ReinforcePP())] == [2, 1, 1]
    advantage, trained = trajectory_advantages(left, centred())
    assert [len(g.trajectories) for g in left] == [2, 1]
    assert advantage.tolist() == [0.5, -0.5, 0]
    assert trained.tolist() == [True] * 3


def test_where_everything_failed_nothing_is_left() -> None:
    assert comparable([group((0, FAILED)), group((0, FAILED), (0, FAILED))], centred()) == []


@pytest.mark.parametrize(
    ("truncated", "expected", "mask"),
    [
        (Truncated.penalise, [1, 0, -1], [True, True, True]),  # of 1, min(0, 0.5), min(0, -1)
        (Truncated.mask, [5 / 6, 1 / 3, -7 / 6], [True, False, False]),  # of 1, 0.5, -1
        (Truncated.keep, [5 / 6, 1 / 3, -7 / 6], [True, True, True]),
    ],
)
def test_truncated_trajectories(truncated: Truncated, expected: list[float], mask: list[bool]) -> None:
    groups = [group((1, COMPLETED), (0.5, TRUNCATED), (-1, TRUNCATED))]
    advantage, trained = trajectory_advantages(groups, centred(truncated))
    assert advantage.tolist() == pytest.approx(expected, abs=1e-7)
    assert trained.tolist() == mask


@given(st.lists(st.lists(st.tuples(REWARDS, st.sampled_from(Status)), max_size=5), max_size=5))
def test_advantages_are_in_the_order_of_the_batch(drawn: list[list[tuple[float, Status]]]) -> None:
    groups = comparable([group(*siblings) for siblings in drawn], centred())
    remaining = [t for g in groups for t in g.trajectories]
    assert all(t.status is not FAILED for t in remaining)
    for number, trajectory in enumerate(remaining):
        trajectory.turns = [Turn([1], [number], [0.0], [0], Finish.STOP, Message("assistant"))]
    advantage, trained = trajectory_advantages(groups, centred(Truncated.mask))
    batch = build_batch(remaining)
    for entry in range(len(batch)):
        trajectory = remaining[int(batch.token[entry])]
        siblings = next(g for g in groups if any(t is trajectory for t in g.trajectories)).trajectories
        rewards = [t.reward for t in siblings]
        expected = trajectory.reward - sum(rewards) / len(rewards)
        assert advantage[batch.trajectory[entry]].item() == pytest.approx(expected, abs=1e-5)
        assert trained[batch.trajectory[entry]].item() == (trajectory.status is COMPLETED)
    assert len(advantage) == len(trained) == len(remaining) == len(batch)
