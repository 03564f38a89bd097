"""Rewards for answers to questions, for the structure of messages and for their length."""

from __future__ import annotations

import re
import string
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Score
from mtgrpo.rewards.em import EM, Convention
from mtgrpo.rewards.f1 import F1
from mtgrpo.rewards.length import Length
from mtgrpo.rewards.tags import Tags
from mtgrpo.rewards.target_length import TargetLength
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn


def said(text: str, *answers: str) -> Trajectory:
    metadata: dict[str, Any] = {"answers": list(answers)} if len(answers) > 1 else {}
    task = Task("task/1", (Message("user", "?"),), answers[0] if answers else "", metadata)
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


def told(*messages: Message, auxiliary: int = -1) -> Trajectory:
    turns = [
        Turn([], [7], [0.0], [0], Finish.STOP, message, auxiliary=index == auxiliary)
        for index, message in enumerate(messages)
    ]
    return Trajectory(Task("task/1", (Message("user", "?"),)), turns=turns)


# --- exact match ---


@pytest.mark.parametrize(
    "text, answer, worth",
    [
        ("\u201cJane\u2019s\u201d house", "janes house", 1),
        ("\u00c9COLE!", "\u00e9cole", 1),
        ("5 \u20ac", "5", 1),
        ("\u20ac", "\u20ac", 1),
        ("", "\u20ac", 0),
        ("the", "A", 0),
        ("another", "other", 0),
    ],
)
def test_em_takes_the_punctuation_of_any_script_away(text: str, answer: str, worth: float) -> None:
    assert EM(convention=Convention.unicode).reward(said(text, answer)) == worth


@pytest.mark.parametrize(
    "text, answer, worth",
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("  Paris\n", "Paris.", 1),
        ("It is Paris", "Paris", 0),
        ("Jane's house", "janes house", 1),
        ("well-known", "wellknown", 1),
        ("U.S.", "us", 1),
        ("another theory", "other ory", 0),
        ("", "A", 0),
        ("the", "A", 0),
        ("A", "A", 1),
        ("", "+", 0),
        ("-", "+", 0),
        ("", "Paris", 0),
    ],
)
def test_em_compares_as_squad_does(text: str, answer: str, worth: float) -> None:
    assert EM().reward(said(text, answer)) == worth


@pytest.mark.parametrize(
    "text, answer, worth",
    [
        ("well-known", "well known", 1),
        ("well-known", "wellknown", 0),
        ("New_York", "new york", 1),
        ("Jane\u2019s house", "jane s house", 1),
        ("Jane`s house", "Jane\u00b4s house", 1),
        ("the end", "end", 1),
    ],
)
def test_em_parts_words_at_punctuation_as_triviaqa_does(text: str, answer: str, worth: float) -> None:
    assert EM(convention=Convention.triviaqa).reward(said(text, answer)) == worth


def test_any_accepted_answer_will_do() -> None:
    assert EM().reward(said("america", "USA", "America", "the United States")) == 1
    assert EM().reward(said("UK", "USA", "America")) == 0
    assert F1().reward(said("united kingdom", "USA", "the United States")) == 0.5
    only_aliases = Task("task/2", (Message("user", "?"),), metadata={"answers": ["Rome"]})
    assert EM().reward(Trajectory(only_aliases, turns=said("rome").turns)) == 1


@pytest.mark.parametrize("reward", [EM(), F1()])
def test_a_task_without_an_answer_is_refused(reward: EM | F1) -> None:
    with pytest.raises(ConfigError, match=r"task/1 has no answer.*task\.columns\.answer="):
        reward.reward(said("x"))


@pytest.mark.parametrize(
    ("answers", "text", "right"),
    [
        ({"text": ["Rome"]}, "text", 0.0),
        ("Roma", "Roma", 1.0),
        ("Roma", "R", 0.0),
        ([4, 4.5], "4.5", 1.0),
        (frozenset({"Roma"}), "roma", 1.0),
        (None, "Rome", 1.0),
    ],
)
def test_accepted_answers_are_entries_of_a_list(answers: Any, text: str, right: float) -> None:
    task = Task("task/1", (Message("user", "?"),), "Rome", {"answers": answers})
    assert EM().reward(replace(said(text), task=task)) == right


@given(text=st.text(min_size=1), convention=st.sampled_from(Convention))
def test_the_answer_itself_is_always_right(text: str, convention: Convention) -> None:
    hypothesis.assume(text.strip())
    assert EM(convention=convention).reward(said(text, text)) == 1
    assert F1(convention=convention).reward(said(text, text)) == 1
    assert EM(convention=convention).reward(said(" ", text)) == 0


ASCII = st.text(alphabet=string.ascii_letters + string.digits + string.punctuation + " ", min_size=1)


def squad_words(text: str) -> list[str]:
    """Step by step as the paper's script is described: lower, punctuation, articles, white space."""
    lower = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", lower).split()


@given(left=ASCII, right=ASCII)
def test_em_and_f1_follow_the_definition(left: str, right: str) -> None:
    given_words, answer_words = squad_words(left), squad_words(right)
    if not given_words or not answer_words:
        return
    shared = sum((Counter(given_words) & Counter(answer_words)).values())
    precision, recall = shared / len(given_words), shared / len(answer_words)
    expected = 2 * precision * recall / (precision + recall) if shared else 0.0
    assert F1().reward(said(left, right)) == pytest.approx(expected)
    assert EM().reward(said(left, right)) == float(given_words == answer_words)


@pytest.mark.parametrize(
    "text, worth",
    [
        ("I think <answer> Paris </answer>", 1),
        ("<answer>Rome</answer> no: <answer>Paris</answer> done", 1),
        ("<answer>Paris</answer> no: <answer>Rome</answer>", 0),
        ("<think><answer></think><answer>Paris</answer>", 1),
        ("Paris", 0),
        ("<answer>Paris", 0),
        ("Paris</answer>", 0),
        ("", 0),
    ],
)
def test_the_answer_may_stand_between_tags(text: str, worth: float) -> None:
    assert EM(tag="answer").reward(said(text, "Paris")) == worth
    assert F1(tag="answer").reward(said(text, "Paris")) == worth


@pytest.mark.parametrize("make", [EM, F1])
def test_what_is_no_tag_is_refused(make: type[EM | F1]) -> None:
    with pytest.raises(ConfigError, match="write answer for <answer></answer>"):
        make(tag="<answer>")


# --- F1 ---


@pytest.mark.parametrize(
    "text, answer, worth",
    [
        ("in the year 1969", "1969", 0.5),
        ("July 1969", "20 July 1969", 0.8),
        ("1969 July 20", "20 July 1969", 1),
        ("no no no", "no", 0.5),
        ("Paris", "Rome", 0),
        ("", "Rome", 0),
        ("the", "A", 0),
    ],
)
def test_f1_is_that_of_the_words(text: str, answer: str, worth: float) -> None:
    assert F1().reward(said(text, answer)) == pytest.approx(worth)


@pytest.mark.parametrize(
    "text, answers, squad, hotpotqa",
    [
        ("yes", ["yes"], 1, 1),
        ("yes it is", ["yes"], 0.5, 0),
        ("no", ["no way"], 2 / 3, 0),
        ("no", ["no way", "no"], 1, 1),
        ("yes", ["no"], 0, 0),
        ("noanswer here", ["noanswer"], 2 / 3, 0),
        ("Yes.", ["yes"], 1, 1),
        ("red car", ["red"], 2 / 3, 2 / 3),
    ],
)
def test_yes_and_no_are_right_as_a_whole_in_hotpotqa(
    text: str, answers: list[str], squad: float, hotpotqa: float
) -> None:
    assert F1().reward(said(text, *answers)) == pytest.approx(squad)
    assert F1(convention=Convention.hotpotqa).reward(said(text, *answers)) == pytest.approx(hotpotqa)


# --- structure ---

WELL_FORMED = [
    "<think>so</think><answer>Paris</answer>",
    "\n<think>\n1 < 2\n</think>\n\n<answer> <b>Paris</b> </answer>\n",
    "<think>a thinker thinks</think> <answer>x</answer>",
]
ILL_FORMED = [
    "",
    "Paris",
    "<answer>Paris</answer>",
    "<think>so</think>",
    "<answer>Paris</answer><think>so</think>",
    "<think>so</think><answer>Paris</answer> Bye",
    "Well: <think>so</think><answer>Paris</answer>",
    "<think>so</think>and<answer>Paris</answer>",
    "<think> \n</think><answer>Paris</answer>",
    "<think>so</think><answer></answer>",
    "<think>so<think>so</think><answer>Paris</answer>",
    "<think>so</think><answer>Paris</answer><answer>Rome</answer>",
    "<think>so <answer>Rome</answer></think><answer>Paris</answer>",
    "<think>so</think><answer>Paris",
]


@pytest.mark.parametrize("text", WELL_FORMED)
def test_a_message_of_the_parts_is_worth_1(text: str) -> None:
    assert Tags().reward(said(text)) == Score(1.0)


@pytest.mark.parametrize("text", ILL_FORMED)
def test_a_message_of_other_parts_is_worth_nothing(text: str) -> None:
    assert Tags().reward(said(text)) == Score(0.0)


def test_reasoning_that_the_template_took_out_is_the_part_think() -> None:
    assert Tags().reward(told(Message("assistant", "<answer>x</answer>", reasoning="so"))).total == 1
    assert Tags(tags=["answer"]).reward(told(Message("assistant", "<answer>x</answer>", reasoning="so"))).total == 0


def test_the_final_message_is_judged_and_each_turn_where_asked() -> None:
    thought, answered = Message("assistant", "<think>so</think>"), Message("assistant", WELL_FORMED[0])
    bare = Message("assistant", "hm")
    per_turn = Tags(turn_tags=["think"], per_turn=True)
    assert per_turn.reward(told(thought, bare, answered)) == Score(1.0, turns=[1.0, 0.0, 1.0])
    assert per_turn.reward(told(thought, thought)) == Score(0.0, turns=[1.0, 0.0])
    assert Tags(per_turn=True).reward(told(bare, answered)) == Score(1.0, turns=[1.0, 1.0])
    assert Tags().reward(told(bare, answered)) == Score(1.0)
    assert per_turn.judges_turns and not Tags().judges_turns


def test_what_is_said_to_a_condenser_is_not_judged() -> None:
    answered, summary = Message("assistant", WELL_FORMED[0]), Message("assistant", "so far: nothing")
    assert Tags(per_turn=True).reward(told(answered, summary, auxiliary=1)) == Score(1.0, turns=[1.0, 0.0])
    assert Tags(per_turn=True).reward(told()) == Score(0.0, turns=[])


@pytest.mark.parametrize("unit", ["<think>", "<think>a</think>", "a", " ", "<", "</answer>"])
def test_structure_is_quick_on_huge_texts(unit: str) -> None:
    start = time.perf_counter()
    for text in (unit * 20_000, "<think>" + unit * 20_000, "<think>a</think><answer>" + unit * 20_000):
        assert Tags().reward(said(text)).total == 0
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tags": []}, "tags is empty"),
        ({"tags": ["a b"]}, "'a b' is not the name of a tag"),
        ({"tags": [""]}, "not the name of a tag"),
        ({"turn_tags": ["think"]}, r"turn_tags=\['think'\] counts for nothing without per_turn=true"),
    ],
)
def test_structures_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tags(**settings)


# --- length ---


@pytest.mark.parametrize(
    "turns, worth", [([], 0), ([10], 0), ([100], 0), ([60, 40], 0), ([101], -0.01), ([60, 60], -0.2), ([900], -0.5)]
)
def test_every_token_above_the_budget_costs(turns: list[int], worth: float) -> None:
    trajectory = said("x")
    trajectory.turns = [Turn([1] * 500, [7] * count, [], [], Finish.STOP, Message("assistant")) for count in turns]
    found = Length(budget_tokens=100, cost=0.01, most=0.5).reward(trajectory)
    assert found == pytest.approx(worth)
    assert (found >= Length().success_at) is (worth == 0)


@pytest.mark.parametrize(("text", "worth"), [("x" * 50, 0), ("x" * 45, -5), ("x" * 56, -6), ("", -50)])
def test_characters_too_many_or_too_few_cost_alike(text: str, worth: float) -> None:
    assert TargetLength().reward(said(text)) == worth
    assert (worth >= TargetLength().success_at) is (worth >= -5)


@pytest.mark.parametrize("settings", [{"budget_tokens": -1}, {"cost": 0.0}, {"most": -1.0}])
def test_costs_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(settings))}` must be >"):
        Length(**settings)
