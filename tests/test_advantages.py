"""Advantages of turns, worked out by hand; and properties of every estimator."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.gae import GAE
from mtgrpo.advantages.gigpo import GiGPO
from mtgrpo.advantages.return_to_go import ReturnToGo
from mtgrpo.advantages.rewards import Level, Rewards, discounted_sums, rewards_of
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.advantages.turn import ByTurn
from mtgrpo.algorithms import Algorithm, Truncated
from mtgrpo.algorithms.dapo import DAPO
from mtgrpo.algorithms.gmpo import GMPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.ppo import PPO
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.algorithms.rloo import RLOO
from mtgrpo.batch.forest import build_batch
from mtgrpo.errors import ConfigError
from mtgrpo.types import Finish, Group, Message, Status, Task, Trajectory, Turn

TASK = Task("test/0", (Message("user", "?"),))
CENTRED = GRPO(divide_by_std=False)
EVERY = [WholeTrajectory(), ReturnToGo(gamma=0.9), ReturnToGo(level=Level.token), GiGPO(), GAE()]
EVERY += [ByTurn(), ByTurn(unbiased=False)]


def rollout(reward: float, turn_rewards: Sequence[float], replies: Sequence[str] = (), tokens: int = 1) -> Trajectory:
    """One turn for each of `turn_rewards`, of `tokens` tokens; after turn n the tool replied `replies[n]`."""
    trajectory = Trajectory(TASK, reward=reward, turn_rewards=list(turn_rewards))
    for number in range(len(turn_rewards)):
        seen = (Message("tool", replies[number]),) if number < len(replies) else ()
        output = [7] * tokens
        logprobs, versions = [-1.0] * tokens, [0] * tokens
        turn = Turn([1, 2], output, logprobs, versions, Finish.STOP, Message("assistant"), number - 1, seen)
        trajectory.turns.append(turn)
    return trajectory


def rewards(*groups: Sequence[Trajectory], algorithm: Algorithm = CENTRED) -> Rewards:
    batch = build_batch([trajectory for group in groups for trajectory in group])
    return rewards_of([Group(TASK, list(group)) for group in groups], algorithm, batch.trajectory, batch.turn)


def assigned(
    estimator: AdvantageEstimator,
    *groups: Sequence[Trajectory],
    algorithm: Algorithm = CENTRED,
    values: Tensor | None = None,
) -> list[float]:
    weighted = estimator.weigh(rewards(*groups, algorithm=algorithm))
    return estimator.assign(weighted, algorithm, values).advantage.tolist()


# --- by hand ---


def test_the_whole_trajectory_gets_the_sum_of_its_rewards() -> None:
    group = [rollout(1, [0.5, 0]), rollout(0, [0, 0, 0])]
    assert assigned(WholeTrajectory(), group) == [0.75, 0.75, -0.75, -0.75, -0.75]
    assert assigned(WholeTrajectory(turn_weight=0), group) == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert assigned(WholeTrajectory(outcome_weight=2, turn_weight=2), group) == [1.5, 1.5, -1.5, -1.5, -1.5]


def test_returns_to_go_fall_as_rewards_are_past() -> None:
    # returns of the first: 1 + 0.5 * (0 + 0.5 * (2 + 3)) = 2.25, 2.5, 5; of the second: 4; their mean: 3.125
    group = [rollout(3, [1, 0, 2]), rollout(4, [0])]
    assert assigned(ReturnToGo(gamma=0.5), group) == [2.25 - 3.125, 2.5 - 3.125, 5 - 3.125, 4 - 3.125]


def test_returns_over_tokens_are_those_over_turns_where_nothing_is_discounted() -> None:
    group = [rollout(3, [1, 0, 2], tokens=3), rollout(4, [0.5, 0.25], tokens=3)]
    assert assigned(ReturnToGo(level=Level.token), group) == assigned(ReturnToGo(), group)


def test_turns_are_compared_with_those_at_the_same_place() -> None:
    """MT-GRPO: the first turns' rewards are 1 and 0, the outcomes 0 and 1; the last turn gets the outcome alone."""
    group = [rollout(0, [1, 5]), rollout(1, [0, 7])]
    assert assigned(ByTurn(unbiased=False), group) == [-0.5 + 0.5, -0.5, 0.5 - 0.5, 0.5]
    assert assigned(ByTurn(turn_coef=3, unbiased=False), group) == [-0.5 + 1.5, -0.5, 0.5 - 1.5, 0.5]
    # A third sample that ends with its first turn: its last turn is compared, but only its outcome counts.
    longer = [*group, rollout(0.5, [0.5])]
    assert assigned(ByTurn(unbiased=False), longer)[-1] == 0
    assert assigned(ByTurn(unbiased=False), longer)[0] == pytest.approx(-0.5 + 0.5)


def test_a_sibling_that_has_ended_has_nothing_more_to_get() -> None:
    """Outcome and rewards to come: 6, 5 and 8, 8 and 1; after its only turn the last has its outcome of 0.5."""
    group = [rollout(0, [1, 5]), rollout(1, [0, 7]), rollout(0.5, [0.5])]
    first, second = (6 + 8 + 1) / 3, (5 + 8 + 0.5) / 3
    assert assigned(ByTurn(), group) == pytest.approx([6 - first, 5 - second, 8 - first, 8 - second, 1 - first])
    # by half: 3, 2.5 and 4.5, 4.5 and 0.75; another group, of other lengths, changes nothing
    first, second = (3 + 4.5 + 0.75) / 3, (2.5 + 4.5 + 0.5) / 3
    half = [3 - first, 2.5 - second, 4.5 - first, 4.5 - second, 0.75 - first]
    other = [rollout(1, [1, 1, 1]), rollout(1, [1, 1, 1])]
    assert assigned(ByTurn(turn_coef=0.5), other, group) == pytest.approx([0.0] * 6 + half)
    # the scale is the deviation of all of them
    scale = torch.tensor([6.0, 5, 8, 8, 1], dtype=torch.float64).std().item() + 1e-6
    wanted = [x / scale for x in assigned(ByTurn(), group)]
    assert assigned(ByTurn(), group, algorithm=GRPO()) == pytest.approx(wanted)


def test_the_form_of_the_paper_says_what_it_does() -> None:
    assert "when to stop" in ByTurn(unbiased=False).note(CENTRED)
    assert ByTurn().note(CENTRED) == ""


def test_turns_after_the_same_observation_are_compared() -> None:
    """Both siblings see "7" before their second turn; the first of them also sees "9", alone."""
    group = [rollout(1, [0, 0, 0], ["7", "9"]), rollout(0, [0, 0], ["7"])]
    # gamma 0.5: returns 0.25, 0.5, 1 and 0, 0; whole trajectories: +-0.5
    found = assigned(GiGPO(gamma=0.5), group)
    assert found == [0.5 + 0.125, 0.5 + 0.25, 0.5, -0.5 - 0.125, -0.5 - 0.25]


def test_the_same_observation_in_another_group_is_another_state() -> None:
    groups = [[rollout(1, [0, 0], ["7"]), rollout(1, [0])], [rollout(0, [0, 0], ["7"]), rollout(0, [0])]]
    assert assigned(GiGPO(gamma=1.0), *groups) == [0] * 6


def test_without_critic_and_turn_rewards_earlier_turns_deserve_less() -> None:
    """A_k = (gamma lam)^(K - k) (R - mean)."""
    estimator = GAE(gamma=0.9, lam=0.5)
    group = [rollout(1, [0, 0, 0]), rollout(0, [0, 0])]
    assert assigned(estimator, group) == pytest.approx([0.2025 * 0.5, 0.45 * 0.5, 0.5, -0.225, -0.5])
    assert "0.45^(K - k)" in estimator.note(CENTRED)
    assert GAE(level=Level.token).note(PPO()) == ""


def test_the_estimate_over_turns_with_a_critic() -> None:
    """Values of the first tokens: 1 and 2; gamma 0.5, lambda 0.5; rewards 3, then 4 with the outcome."""
    trajectory = rollout(1, [3, 3], tokens=2)
    values = torch.tensor([1.0, 100.0, 2.0, 100.0], dtype=torch.float64)
    estimator = GAE(gamma=0.5, lam=0.5)
    found = estimator.assign(rewards([trajectory], algorithm=PPO()), PPO(), values)
    second = 4 - 2
    first = (3 + 0.5 * 2 - 1) + 0.25 * second
    assert found.advantage.tolist() == [first, first, second, second]
    assert found.target is not None
    assert found.target.nan_to_num(-1).tolist() == [first + 1, -1, second + 2, -1]


def test_with_a_baseline_of_the_group_the_critic_learns_what_is_left() -> None:
    """Whole rewards 3 and 1, so +-1 about their mean; values of the first tokens: .25 and .5, then .75."""
    algorithm, estimator = PPO(group_baseline=True), GAE(gamma=1, lam=1)
    group = [rollout(1, [2, 0]), rollout(1, [0])]
    values = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    found = estimator.assign(rewards(group, algorithm=algorithm), algorithm, values)
    assert found.advantage.tolist() == [1 - 0.25, -1 - 0.5, -1 - 0.75]
    assert found.target is not None and found.target.tolist() == [1, -1, -1]
    assert algorithm.compares_siblings and not algorithm.needs_variance


@pytest.mark.parametrize("estimator", [estimator for estimator in EVERY if not isinstance(estimator, GiGPO)])
@pytest.mark.parametrize("turn_rewards", [[1.0, 1.0], [0.0, 0.0]])
def test_equal_conversations_do_not_explode_where_the_deviation_is_divided_by(
    estimator: AdvantageEstimator, turn_rewards: list[float]
) -> None:
    """Their whole returns are equal; what is left from their second turns on is not."""
    group = [rollout(1, turn_rewards, ["7"]) for _ in range(4)]
    found = assigned(estimator, group, algorithm=GRPO())
    assert max(map(abs, found)) < 3
    spread = assigned(estimator, [*group, rollout(0, [0.0, 1.0])], algorithm=GRPO())
    assert max(map(abs, spread)) < 5


def test_a_truncated_trajectory_is_not_rewarded_for_its_turns() -> None:
    cut = rollout(1, [1, -1])
    cut.status = Status.TRUNCATED
    assert rewards([cut, rollout(0, [1, 1])]).per_turn.tolist() == [0, -1, 1, 1]
    kept = rewards([cut, rollout(0, [1, 1])], algorithm=GRPO(truncated=Truncated.keep))
    assert kept.per_turn.tolist() == [1, -1, 1, 1]


# --- what is common ---


TURNS = st.lists(st.floats(-3, 3).map(lambda x: round(x, 3)), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.floats(-3, 3).map(lambda x: round(x, 3)), TURNS), min_size=2, max_size=5))
def test_invariance_to_the_order_of_siblings(siblings: list[tuple[float, list[float]]]) -> None:
    group = [rollout(reward, turns, [str(len(turns))] * 4) for reward, turns in siblings]
    for estimator in EVERY:
        one = assigned(estimator, group)
        other = assigned(estimator, group[::-1])
        starts = [sum(len(turns) for _, turns in siblings[:i]) for i in range(len(siblings) + 1)]
        turned = [value for i in reversed(range(len(siblings))) for value in one[starts[i] : starts[i + 1]]]
        assert other == pytest.approx(turned, abs=1e-9)


@given(st.floats(-3, 3), st.integers(2, 5), st.integers(1, 4))
def test_invariance_constant_rewards_give_no_advantage(reward: float, siblings: int, turns: int) -> None:
    for algorithm in (CENTRED, GRPO(), RLOO(), DAPO(overlong_tokens=100, overlong_buffer=50)):
        replies = [str(number) for number in range(turns)]
        group = [rollout(reward, [0.25] * turns, replies) for _ in range(siblings)]
        for estimator in (WholeTrajectory(), ByTurn(), ByTurn(unbiased=False), GiGPO()):
            assert assigned(estimator, group, algorithm=algorithm) == [0.0] * (siblings * turns)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.lists(st.booleans(), max_size=11), st.floats(0, 1))
def test_discounted_sums(amounts: list[float], breaks: list[bool], discount: float) -> None:
    breaks = (breaks + [False] * 12)[: len(amounts) - 1]
    sequence = torch.tensor([0, *breaks]).cumsum(0)
    expected = list(amounts)
    for i in reversed(range(len(amounts) - 1)):
        if sequence[i] == sequence[i + 1]:
            expected[i] += discount * expected[i + 1]
    found = discounted_sums(torch.tensor(amounts, dtype=torch.float64), sequence, discount)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


# --- pairs without a meaning ---


@pytest.mark.parametrize(
    ("estimator", "algorithm", "problem"),
    [
        (WholeTrajectory(), PPO(), "advantage=gae"),
        (ReturnToGo(), GMPO(), "advantage=trajectory"),
        (GAE(), GMPO(), "advantage=trajectory"),
        (ByTurn(), ReinforcePP(), "no baseline of the group"),
        (GiGPO(), ReinforcePP(), "no baseline of the group"),
        (GAE(level=Level.token), GRPO(), "needs a critic"),
    ],
)
def test_pairs_without_a_meaning_are_refused(estimator: AdvantageEstimator, algorithm: Algorithm, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        estimator.check(SimpleNamespace(algorithm=algorithm, rewards_turns=True))


@pytest.mark.parametrize(
    ("estimator", "algorithm"),
    [
        (ByTurn(), ReinforcePP(group_baseline=True)),
        (ReturnToGo(level=Level.token), ReinforcePP()),
        (GAE(), PPO()),
        (GAE(level=Level.token), PPO()),
        (GAE(), ReinforcePP()),
        (WholeTrajectory(), GMPO()),
    ],
)
def test_pairs_with_a_meaning_are_not(estimator: AdvantageEstimator, algorithm: Algorithm) -> None:
    estimator.check(SimpleNamespace(algorithm=algorithm, rewards_turns=True))


def test_truncated_trajectories_of_dapo_lose_for_length_too() -> None:
    algorithm = DAPO(overlong_tokens=10, overlong_buffer=4)
    found = [algorithm.shaped_reward(rollout(1, [0], tokens=tokens)) for tokens in (6, 8, 10, 14)]
    assert found == [1, 0.5, 0, 0]
