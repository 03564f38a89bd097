"""Rewards: exact about right answers, robust about everything else."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.errors import ConfigError
from mtgrpo.parts.extension import find, options
from mtgrpo.rewards import Reward, Score, scores
from mtgrpo.rewards.calculation import Calculation
from mtgrpo.rewards.composed import Composed
from mtgrpo.rewards.environment import Environment
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.rollout.group import set_score
from mtgrpo.types import Finish, Group, Message, Task, Trajectory, Turn

TASK = Task("task/1", (Message("user", "?"),))


def said(text: str, answer: str, metadata: dict[str, Any] | None = None) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answer, metadata or {})
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


class Given(Reward):
    """Gives what it was told to."""

    what: Any = None

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Any]:
        return [self.what() for _ in siblings]


async def test_a_score_of_other_numbers_becomes_floats() -> None:
    reward = Given()
    made = [np.array([1, 2]), torch.tensor([1, 2]), lambda: (one for one in (1, 2))]
    for turns in made:
        reward.what = lambda turns=turns: Score(
            np.float32(1.5), {"part": np.int64(1)}, turns() if callable(turns) else turns, paid=True
        )
        one = replace(said("5", "5"), turns=said("5", "5").turns * 2)
        assert await scores(reward, [one]) == [Score(1.5, {"part": 1.0}, (1.0, 2.0), 1.0)]


@pytest.mark.parametrize("score", [Score(1, paid=math.nan), Score(1, turns=3), Score(1, ["part"]), Score(1, turns="1")])  # type: ignore[arg-type]
async def test_a_score_of_what_is_no_number_fails(score: Score) -> None:
    reward = Given()
    reward.what = lambda: score
    (found,) = await scores(reward, [said("5", "5")])
    assert isinstance(found, TypeError) and "give a finite number" in str(found)


def test_every_file_in_the_folder_is_one_option() -> None:
    assert {"numeric", "em"} <= set(options("mtgrpo.rewards", Reward))
    for name in options("mtgrpo.rewards", Reward):
        assert issubclass(find("mtgrpo.rewards", name, Reward), Reward)


RIGHT = [
    ("#### 72", "72"),
    ("24 + 48 = 72\n#### 72\n", "72"),
    ("####72.", "72"),
    ("#### $1,200.00", "1200"),
    ("#### 1200", "1,200"),
    ("#### 20%", "20"),
    ("#### -3", "-3"),
    ("#### \u22123", "-3"),
    ("#### -$5", "-5"),
    ("#### +7", "7"),
    ("#### **72** apples", "72"),
    ("#### 72 kg", "72"),
    ("#### 72\u5143", "72"),
    ("#### 72\\text{kg}", "72"),
    ("#### .5", "0.50"),
    ("#### 1/2", "0.5"),
    ("#### 007", "7"),
    ("#### 1 #### 2 #### 72", "72"),
    (r"so \boxed{72}", "72"),
    (r"\boxed{1} then \boxed{\$1,234\%}", "1234"),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{-\dfrac{1}{2}}", "-0.5"),
    (r"\boxed{10{,}000}", "10000"),
    (r"\boxed{5} #### 72", "72"),
    ("#### \u0667\u0662", "72"),
    ("#### 72", "They sold 72 clips.\n#### 72"),
    ("#### 0.1", "0.10"),
    ("#### 12345678901234567890.5", "12345678901234567890.50"),
]


@pytest.mark.parametrize("text, answer", RIGHT)
def test_numeric_accepts(text: str, answer: str) -> None:
    assert Numeric().reward(said(text, answer)) == 1.0


WRONG = [
    ("", "72"),
    ("#### 24 - 72", "-72"),
    ("72", "72"),
    ("The answer is 72.", "72"),
    ("####", "72"),
    ("#### the answer is 72", "72"),
    ("#### 72 #### none", "72"),
    ("#### 72 #### 71", "72"),
    (r"#### ? \boxed{72}", "72"),
    (r"\boxed{72} \boxed{71}", "72"),
    (r"\boxed{}", "72"),
    ("#### 72.0001", "72"),
    ("#### 7", "72"),
    ("#### 720", "72"),
    ("#### 72,5", "72"),
    ("#### 72:30", "72"),
    ("#### 72e3", "72"),
    ("#### 72^2", "72"),
    ("#### 1.2.3", "1.2"),
    ("#### 72/0", "72"),
    ("#### 1,23", "123"),
    ("#### -72", "72"),
    ("#### 7\u00b2", "7"),
    ("#### 12345678901234567891", "12345678901234567890"),
    ("#### nan", "72"),
    ("#### inf", "72"),
    ("#### 20of20", "20"),
    ("#### 20k", "20"),
    ("#### 3x4", "3"),
    ("#### 72_000", "72"),
    ("#### 5\n\\boxed{6}", "6"),
    (r"\boxed{20of20}", "20"),
]


@pytest.mark.parametrize("text, answer", WRONG)
def test_numeric_refuses(text: str, answer: str) -> None:
    assert Numeric().reward(said(text, answer)) == 0.0


@pytest.mark.parametrize(
    "text, worth",
    [
        ("First 24, then 72.", 1.0),
        ("It is 72, not 71", 0.0),
        ("#### 71, or 72", 0.0),
        ("costs $72 in all", 1.0),
        ("at 10:72", 0.0),
        ("144 - 72", 0.0),
        ("so -72", 0.0),
        ("none", 0.0),
    ],
)
def test_numeric_without_a_marker_takes_the_last_number(text: str, worth: float) -> None:
    assert Numeric(require_marker=False).reward(said(text, "72")) == worth
    assert Numeric().reward(said(text, "72")) == 0.0


def test_numeric_grades_the_last_message_only() -> None:
    trajectory = said("#### 72", "72")
    trajectory.turns.append(Turn([], [], [], [], Finish.STOP, Message("assistant", "#### 71")))
    assert Numeric().reward(trajectory) == 0.0
    assert Numeric().reward(Trajectory(trajectory.task)) == 0.0


@given(number=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_numeric_does_not_mind_the_notation(number: Any) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"{number:f}00", f"{number:f}%"):
        assert Numeric().reward(said(f"#### {text}", f"{number:f}")) == 1.0
    assert Numeric().reward(said(f"#### {number + 1:f}", f"{number:f}")) == 0.0


@given(text=st.text() | st.text(alphabet="0123456789.,:/^-+$#%e \\boxed{frac}\u00b2\u0667\u2460"), marker=st.booleans())
def test_numeric_survives_garbage(text: str, marker: bool) -> None:
    for worded in (text, "#### " + text, r"\boxed{" + text):
        assert Numeric(require_marker=marker).reward(said(worded, "72")) in (0.0, 1.0)


@pytest.mark.parametrize("unit", ["9", "1.", "1,111", "9/", "\\boxed{", "####", "- ", "$", "1:", "{", "\u0667"])
def test_numeric_is_quick_on_huge_texts(unit: str) -> None:
    text = unit * 50_000
    start = time.perf_counter()
    for worded in (text, "#### " + text, r"\boxed{" + text, "#### 72" + text):
        assert Numeric(require_marker=False).reward(said(worded, "73")) == 0.0
    assert time.perf_counter() - start < 2.0


def test_numeric_refuses_a_task_whose_answer_is_no_number() -> None:
    with pytest.raises(ConfigError, match=r"task/1.*'Paris'.*task\.columns\.answer=.*reward=em"):
        Numeric().reward(said("#### 72", "Paris"))


# --- several rewards, and what the environment pays ---


def paid(*amounts: float, text: str = "#### 72") -> Trajectory:
    """A turn for each payment; the last says `text`."""
    trajectory = said(text, "72")
    (last,) = trajectory.turns
    trajectory.turns = [replace(last, paid=amount) for amount in amounts]
    return trajectory


def score(reward: Reward, trajectory: Trajectory) -> Score:
    (found,) = asyncio.run(scores(reward, [trajectory]))
    assert isinstance(found, Score), found
    return found


def test_rewards_are_added_up_by_their_weights() -> None:
    reward = Composed(of={"numeric": {}, "format": {"weight": 0.2, "min_chars": 9}})
    found = score(reward, said("#### 72", "72"))
    assert (found.total, dict(found.components)) == (1.0, {"numeric": 1.0, "format": 0.0})
    assert score(reward, said("so: #### 72", "72")).total == pytest.approx(1.2)
    assert score(Composed(of=["numeric"]), said("#### 71", "72")) == Score(0.0, {"numeric": 0.0})


def test_rewards_of_turns_are_weighed_too() -> None:
    reward = Composed(of={"calculation": {"weight": 2}, "numeric": {"weight": 0.5}})
    assert reward.judges_turns and not Composed(of=["numeric"]).judges_turns
    found = score(reward, calculated([3, 9], "3", "4"))
    assert (found.total, list(found.turns)) == (2.5, [2.0, 0.0, 0.0])


@pytest.mark.parametrize(
    "of, message",
    [
        (None, "reward.of is empty"),
        ("numeric", "must be a list of names"),
        (["poetry"], "there is no reward named 'poetry'"),
        ({"numeric": {"weight": "much"}}, "weight must be a number, got 'much'"),
        ({"numeric": {"wait": 1}}, "the reward numeric has no setting 'wait'; its settings: success_at"),
        ({"environment": {"weight": 2}}, "what the environment pays counts as it is"),
    ],
)
def test_what_cannot_be_composed_is_refused(of: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Composed(of=of)


def test_what_a_long_answer_costs_leaves_it_no_success_which_is_told() -> None:
    said = Composed(of=["numeric", "length"]).note(False)
    assert "that reward length takes something from may be no success, which takes reward.success_at=1:" in said
    assert not Composed(of=["numeric", "length"], success_at=0.5).note(False)
    assert not Composed(of=["numeric", "format"]).note(False)


def test_what_the_environment_pays_is_counted_once() -> None:
    """In the turns that it was paid for; the reward of the whole shows the sum."""
    group = Group(TASK, [paid(1.0, 0.0, 2.0), paid(0.0, 0.0, 0.5)])
    for trajectory in group.trajectories:
        set_score(trajectory, score(Environment(), trajectory))
    assert [t.reward for t in group.trajectories] == [3.0, 0.5]
    assert [t.turn_rewards for t in group.trajectories] == [[1.0, 0.0, 2.0], [0.0, 0.0, 0.5]]
    algorithm = GRPO()
    tokens = torch.arange(2).repeat_interleave(3), torch.arange(3).repeat(2)
    found = rewards_of([group], algorithm, *tokens)
    assert found.outcome.tolist() == [0.0, 0.0]
    assert found.totals().tolist() == [3.0, 0.5]
    helped = replace(paid(1.0), untrained=paid(0.5).turns)
    set_score(helped, score(Environment(), helped))
    found = rewards_of([Group(TASK, [helped, paid(0.0)])], algorithm, torch.arange(2), torch.zeros(2, dtype=torch.long))
    assert helped.reward == 1.5 and helped.turn_rewards == [1.0] and found.totals().tolist()[0] == 1.5
    both = score(Composed(of=["environment", "numeric"]), paid(1.0, 2.0))
    assert (both.total, both.paid) == (4.0, 3.0)


def test_what_the_environment_pays_adds_to_the_rewards_of_turns_whatever_the_reward() -> None:
    trajectory = calculated([3, 9], "3", "9")
    trajectory.turns[1].paid = -0.5
    set_score(trajectory, score(Calculation(), trajectory))
    assert (trajectory.reward, trajectory.turn_rewards) == (1.0, [1.0, 0.5, 0.0])
    unpaid = said("#### 72", "72")
    set_score(unpaid, score(Numeric(), unpaid))
    assert unpaid.turn_rewards == []


# --- rewards of turns ---


def calculated(values: list[int], *observed: str, final: str = "#### 9") -> Trajectory:
    """A turn for each thing the calculator said, and a last one that answers."""
    task = Task("task/1", (Message("user", "?"),), "9", {"values": values})
    turns = [
        Turn([], [], [], [], Finish.STOP, Message("assistant"), observations=(Message("tool", text),))
        for text in observed
    ]
    return Trajectory(task, turns=[*turns, Turn([], [], [], [], Finish.STOP, Message("assistant", final))])


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (["3", "9"], [1, 1, 0]),
        (["9", "3"], [0, 1, 0]),  # in their order
        (["4", "3", "3", "9"], [0, 1, 0, 1, 0]),  # each counts once
        (["error: 3"], [0, 0]),
        ([], [0]),
    ],
)
def test_turns_that_bring_the_next_result_are_paid(observed: list[str], expected: list[float]) -> None:
    trajectory = calculated([3, 9], *observed)
    assert Calculation().reward(trajectory) == Score(1.0, turns=expected)


def test_the_same_result_twice_is_looked_for_twice() -> None:
    assert Calculation().reward(calculated([3, 3], "3", "3")).turns == [1, 1, 0]


def test_a_task_without_intermediate_results_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward=numeric"):
        Calculation().reward(said("#### 1", "1"))
