"""The reward for short contexts: lengths count among right answers only, and never as much as being right."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward, Score, scores
from mtgrpo.rewards.context_efficiency import ContextEfficiency, Form
from mtgrpo.rewards.em import EM
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.types import Finish, Message, Status, Task, Trajectory, Turn

MATH = ContextEfficiency(of=["numeric"])
PLAIN = ContextEfficiency(of=["numeric"], form=Form.plain)
RIGHT, WRONG = "#### 72", "#### 71"


def turn(context: int, output: int, text: str = "", parent: int = -1, auxiliary: bool = False) -> Turn:
    said = Message("assistant", text)
    return Turn(
        [1] * context, [2] * output, [0.0] * output, [0] * output, Finish.STOP, said, parent, auxiliary=auxiliary
    )


def told(text: str, tokens: int = 2, answer: str = "72", metadata: Mapping[str, Any] | None = None) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answer, metadata or {})
    return Trajectory(task, turns=[turn(tokens - 1, 1, text)])


def ended(right: bool, tokens: int) -> Trajectory:
    return told(RIGHT if right else WRONG, tokens)


def worths(reward: Reward, siblings: Sequence[Trajectory]) -> list[float]:
    """What the siblings are worth; what cannot be scored is an error here."""
    found = asyncio.run(scores(reward, siblings))
    assert all(isinstance(one, Score) for one in found), found
    return [one.total for one in found if isinstance(one, Score)]


def worth_of(reward: Reward, alone: Trajectory) -> float:
    return worths(reward, [alone])[0]


def advantages(reward: Reward, siblings: Sequence[Trajectory], divide_by_std: bool = False) -> list[float]:
    returns = torch.tensor(worths(reward, siblings), dtype=torch.float64)
    baseline = GRPO(divide_by_std=divide_by_std).baseline(returns, torch.zeros(len(returns), dtype=torch.int64))
    return ((returns - baseline.centre) / baseline.scale).tolist()


ENDS = st.tuples(st.booleans(), st.integers(2, 300))
BONUSES = st.floats(0.001, 0.499)


def test_bounded_by_hand() -> None:
    siblings = [ended(True, 100), ended(True, 200), ended(False, 10), ended(True, 400)]
    assert worths(MATH, siblings) == pytest.approx([0.95, 0.875, 0.0, 0.8375])
    all_right = [ended(True, 100), ended(True, 200)]
    assert worths(ContextEfficiency(of=["numeric"], bonus=0.4), all_right) == pytest.approx([1.0, 0.8])


def test_plain_by_hand() -> None:
    siblings = [ended(True, 100), ended(True, 200), ended(False, 10), ended(True, 400)]
    assert worths(PLAIN, siblings) == pytest.approx([0.01, 0.005, 0.0, 0.0025])


def test_a_single_right_answer_has_its_share_of_the_bonus_whatever_its_length() -> None:
    for tokens in (10, 1000):
        rewards = worths(MATH, [ended(False, 5), ended(True, tokens), ended(False, 500), ended(False, 50)])
        assert rewards == pytest.approx([0.0, 0.85, 0.0, 0.0])
    assert worth_of(MATH, ended(True, 50)) == worths(MATH, [ended(True, 50)])[0] == 1.0


def test_the_longest_turn_counts_and_condensing_pays() -> None:
    task = Task("task/1", (), "72")
    whole = Trajectory(task, turns=[turn(40, 10), turn(40, 10, RIGHT, parent=0)])
    condensed = Trajectory(task, turns=[turn(40, 10), turn(30, 10, RIGHT)])
    assert worths(PLAIN, [whole, condensed]) == [1 / 100, 1 / 50]
    assert worths(MATH, [whole, condensed]) == pytest.approx([0.9, 1.0])
    condensed.turns.insert(1, turn(40, 10, "what matters", parent=0, auxiliary=True))
    assert worth_of(PLAIN, condensed) == 1 / 100


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), max_size=8))
def test_longest_context_tokens_is_that_of_the_contexts_themselves(drawn: list[tuple[int, int, bool]]) -> None:
    turns = [
        turn(context, output, parent=i - 1 if extends else -1) for i, (context, output, extends) in enumerate(drawn)
    ]
    trajectory = Trajectory(Task("task/1", ()), turns=turns)
    slow = max((len(trajectory.context(i)) + len(one.output) for i, one in enumerate(turns)), default=0)
    assert trajectory.longest_context_tokens == slow


@given(st.lists(ENDS, min_size=1, max_size=8), st.sampled_from(Form))
def test_wrong_answers_are_worth_nothing_and_right_ones_are_successes(ends: list[tuple[bool, int]], form: Form) -> None:
    reward = ContextEfficiency(of=["numeric"], form=form)
    for (right, _), worth in zip(ends, worths(reward, [ended(*end) for end in ends]), strict=True):
        assert (worth >= reward.success_at) == right
        assert right or worth == 0


@given(st.lists(ENDS, min_size=1, max_size=8), BONUSES)
def test_right_answers_lie_in_a_range_narrower_than_what_being_right_is_worth(
    ends: list[tuple[bool, int]], bonus: float
) -> None:
    reward = ContextEfficiency(of=["numeric"], bonus=bonus)
    rewards = worths(reward, [ended(*end) for end in ends])
    of_right = [worth for (right, _), worth in zip(ends, rewards, strict=True) if right]
    pass_rate = len(of_right) / len(ends)
    assert all(1 - bonus < worth <= 1 - bonus + bonus * pass_rate + 1e-12 for worth in of_right)
    assert not of_right or max(of_right) == pytest.approx(1 - bonus + bonus * pass_rate)
    assert not of_right or max(of_right) - min(of_right) < bonus < 1 - bonus


@given(st.lists(ENDS, min_size=2, max_size=8), st.sampled_from(Form), st.randoms(use_true_random=False))
def test_shorter_right_answers_are_never_worth_less_and_order_does_not_matter(
    ends: list[tuple[bool, int]], form: Form, rng: random.Random
) -> None:
    reward = ContextEfficiency(of=["numeric"], form=form)
    rewards = worths(reward, [ended(*end) for end in ends])
    right = sorted((tokens, worth) for (right, tokens), worth in zip(ends, rewards, strict=True) if right)
    for (shorter, better), (longer, worse) in itertools.pairwise(right):
        assert better > worse if shorter < longer else better == worse
    order = rng.sample(range(len(ends)), len(ends))
    assert worths(reward, [ended(*ends[i]) for i in order]) == [rewards[i] for i in order]


@given(st.lists(ENDS, min_size=1, max_size=7), BONUSES, st.integers(2, 300), st.integers(2, 300), st.integers(2, 300))
def test_what_length_and_being_right_move_an_advantage_by(
    others: list[tuple[bool, int]], bonus: float, long: int, short: int, early: int
) -> None:
    """The bounds of docs/tasks_and_rewards.md, with all that a trajectory changes of its siblings' rewards."""
    reward = ContextEfficiency(of=["numeric"], bonus=bonus)
    n = len(others) + 1

    def advantage(right: bool, tokens: int) -> float:
        return advantages(reward, [ended(right, tokens), *(ended(*end) for end in others)])[0]

    being_right = advantage(True, long) - advantage(False, early)
    assert being_right > (1 - bonus - bonus / n) * (1 - 1 / n) - 1e-12 > 0
    assert abs(advantage(True, long) - advantage(True, short)) <= 2 * bonus * (1 - 1 / n) + 1e-12


@given(st.lists(ENDS, min_size=2, max_size=8).filter(lambda ends: len({right for right, _ in ends}) == 2))
def test_in_a_mixed_group_the_early_wrong_answer_has_the_least_advantage(ends: list[tuple[bool, int]]) -> None:
    for reward in (MATH, PLAIN):
        for divide_by_std in (False, True):
            found = list(zip(ends, advantages(reward, [ended(*end) for end in ends], divide_by_std), strict=True))
            wrong = [advantage for (right, _), advantage in found if not right]
            assert max(wrong) < 0
            assert max(wrong) < min(advantage for (right, _), advantage in found if right)


def gain_of_a_short_way(right_rate: float, divide_by_std: bool) -> float:
    """The expected advantage of one that answers early, right at that rate, among siblings that are right and long."""
    others = [ended(True, 1000)] * 7
    right, wrong = (advantages(MATH, [ended(r, 10), *others], divide_by_std)[0] for r in (True, False))
    return right_rate * right + (1 - right_rate) * wrong


def test_a_short_way_that_is_often_wrong_pays_only_where_differences_are_stretched() -> None:
    assert gain_of_a_short_way(0.8, divide_by_std=False) < 0
    assert gain_of_a_short_way(1.0, divide_by_std=False) > 0
    assert gain_of_a_short_way(0.55, divide_by_std=True) > 0


@pytest.mark.parametrize("right_rate, share", [(0.75, 0.05), (0.75, 0.5), (0.75, 0.95), (0.5, 0.5)])
def test_risk_for_shortness_never_pays_whatever_others_do(right_rate: float, share: float) -> None:
    """A way that is right less than 1 - bonus of the time, taken by a share of siblings, against a sure long one."""
    kinds = [(True, 1000), (True, 20), (False, 20)]
    weights = [1 - share, share * right_rate, share * (1 - right_rate)]
    sure = risky = 0.0
    for others in itertools.product(range(3), repeat=3):
        chance = math.prod(weights[kind] for kind in others)
        siblings = [ended(*kinds[kind]) for kind in others]
        each = [advantages(MATH, [ended(*kind), *siblings])[0] for kind in kinds]
        sure += chance * each[0]
        risky += chance * (right_rate * each[1] + (1 - right_rate) * each[2])
    assert risky < sure


ACTIONS = {
    "right long": (True, 800),
    "right short": (True, 200),
    "wrong short": (False, 50),
    "wrong long": (False, 800),
}


def trained(reward: Reward, start: Mapping[str, float], steps: int = 1500) -> list[dict[str, float]]:
    """The probabilities of the actions under the exact expected policy gradient, step by step; groups of 4."""
    groups = list(itertools.product(range(len(ACTIONS)), repeat=4))
    ends = [ended(*end) for end in ACTIONS.values()]
    moved = torch.zeros(len(groups), len(ACTIONS), dtype=torch.float64)  # the sum of advantages of each action
    for row, group in zip(moved, groups, strict=True):
        row.index_add_(0, torch.tensor(group), torch.tensor(advantages(reward, [ends[a] for a in group])).double())
    logits = torch.tensor([start[name] for name in ACTIONS], dtype=torch.float64).log()
    history: list[dict[str, float]] = []
    for _ in range(steps):
        policy = logits.softmax(0)
        history.append(dict(zip(ACTIONS, policy.tolist(), strict=True)))
        logits = logits + policy[torch.tensor(groups)].prod(1) @ moved
    return history


def test_the_context_reward_shortens_contexts_at_equal_success() -> None:
    start = {"right long": 0.45, "right short": 0.05, "wrong short": 0.45, "wrong long": 0.05}
    history = trained(MATH, start)
    assert history[-1]["right short"] > 0.95
    assert max(step["wrong short"] for step in history) <= start["wrong short"]
    assert history[-1]["wrong short"] < 0.02


def test_only_the_context_reward_minds_the_length() -> None:
    even = dict.fromkeys(ACTIONS, 0.25)
    indifferent, shortened = trained(Numeric(), even)[-1], trained(MATH, even)[-1]
    assert indifferent["right long"] == pytest.approx(indifferent["right short"]) == pytest.approx(0.5, abs=0.02)
    assert shortened["right short"] > 0.95


@pytest.mark.parametrize("bonus", [-0.1, 0.0, 0.5, 1.0, math.nan])
def test_the_bonus_has_bounds(bonus: float) -> None:
    with pytest.raises(ConfigError, match=r"`bonus` must be > 0 and < 0\.5, got"):
        ContextEfficiency(bonus=bonus)


@pytest.mark.parametrize("text", ["#### 72", "72", "The Paris.", "paris", r"\boxed{72.0}", "", "#### 1"])
@pytest.mark.parametrize("answer", ["72", "Paris"])
def test_domains_grade_as_the_rewards_that_they_name(text: str, answer: str) -> None:
    trajectory = told(text, answer=answer)
    assert worth_of(ContextEfficiency(), trajectory) == EM().reward(trajectory)
    if answer == "72":
        assert worth_of(MATH, trajectory) == Numeric().reward(trajectory)
    else:
        with pytest.raises(ConfigError, match="'Paris' is not a number"):
            worth_of(MATH, trajectory)


def test_by_default_punctuation_of_any_script_does_not_count() -> None:
    assert worth_of(ContextEfficiency(), told("\u300cRoma\u300d\u3002", answer="Roma")) == 1.0


def test_general_accepts_any_of_the_answers() -> None:
    trajectory = told("Roma", answer="", metadata={"answers": ["Rome", "Roma"]})
    assert worth_of(ContextEfficiency(), trajectory) == 1.0


def test_a_truncated_trajectory_is_graded_by_its_final_message() -> None:
    truncated = dataclasses.replace(ended(True, 10), status=Status.TRUNCATED, reason="max_turns")
    assert worth_of(MATH, truncated) == Numeric().reward(truncated) == 1.0


def test_a_right_answer_in_a_wrong_form_is_worth_nothing_and_sets_no_measure() -> None:
    reward = ContextEfficiency(of={"numeric": {}, "format": {"forbidden_patterns": ["#### 72,"]}})
    siblings = [told("#### 72, sir", 5), ended(True, 100), ended(True, 200), ended(False, 100)]
    assert worths(reward, siblings) == pytest.approx([0.0, 0.9, 0.85, 0.0])


def test_a_sibling_that_cannot_be_graded_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from mtgrpo.rewards import Reward\n"
        "class Picky(Reward):\n"
        "    def reward(self, trajectory):\n"
        "        if not trajectory.final: raise OSError('nothing said')\n"
        "        return float(trajectory.final == '#### 72')\n"
    )
    reward = ContextEfficiency(of=[f"{path}:Picky"])
    right, wrong, failed, longer = asyncio.run(
        scores(reward, [ended(True, 100), ended(False, 10), told("", 5), ended(True, 200)])
    )
    assert isinstance(failed, OSError)
    expected = worths(MATH, [ended(True, 100), ended(False, 10), ended(True, 200)])
    assert [right, wrong, longer] == [Score(worth) for worth in expected]


def test_notices() -> None:
    assert MATH.note(divide_by_std=False) == ""
    assert "set algorithm.divide_by_std=false" in MATH.note(divide_by_std=True)
    assert "drown" in PLAIN.note(divide_by_std=False)
    assert "unit variance" in PLAIN.note(divide_by_std=True)
    guessing = ContextEfficiency(of={"ground_truth": {"heuristic": True}})
    assert "heuristic=true" in guessing.note(divide_by_std=False)
    assert Numeric().note(divide_by_std=True) == ""


def test_it_is_an_option_of_the_command_line() -> None:
    words = ["reward=context_efficiency", "reward.form=plain", r"reward.of={numeric: {}, format: {min_chars: 9}}"]
    reward = compose(parse(words)).experiment.reward
    assert reward == dataclasses.replace(PLAIN, of={"numeric": {}, "format": {"min_chars": 9}})
    assert worths(reward, [ended(True, 100), told("so: #### 72", 100)]) == [0.0, 0.01]
    for word, said in {
        "reward.bonus=0.7": r"reward\.bonus must be > 0 and < 0\.5, got 0\.7",
        "reward.of={format: {min_chars: -1}}": "the reward format: min_chars must be >= 0, got -1",
        "reward.of={format: {forbidden_patterns: ['(']}}": r"forbidden_patterns: '\(' is not",
        "reward.of=[poetry]": r"there is no reward named 'poetry'",
        "reward.of=[]": r"reward\.of is empty",
    }.items():
        with pytest.raises(ConfigError, match=said):
            compose(parse([*words, word]))
