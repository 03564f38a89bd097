"""Word problems of one calculation: right answers, disjoint splits, and the worked examples of the recipes."""

from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction

import pytest

from mtgrpo.config.compose import preset
from mtgrpo.errors import ConfigError
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.tasks import Split
from mtgrpo.tasks.one_step import OneStep
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

# The words that call for each calculation, independent of the stories.
CUES = {
    "+": ("gets .* in all", "has .* and .* has .* together", "in one box and .* in another"),
    "-": ("gives .* left", "takes .* left", "How many more"),
    "*": ("boxes with .* in each", "every day for", "each child has"),
    "/": ("equally among", "How many boxes", "the same number in each box"),
}


def tasks(count: int, split: Split = Split.train, seed: int = 0, **settings: str | int) -> list[Task]:
    return list(itertools.islice(OneStep(**settings).stream(split, seed), count))  # type: ignore[arg-type]


def operator_of(story: str) -> str:
    (operator,) = [op for op, cues in CUES.items() if any(re.search(cue, story) for cue in cues)]
    return operator


def calculated_with(story: str) -> tuple[int, int]:
    """The pair of numbers that decides about the split, the smaller one first."""
    a, b = map(int, re.findall(r"\d+", story))
    first, second = (a // b, b) if operator_of(story) == "/" else (a, b)
    return min(first, second), max(first, second)


def graded(task: Task, said: str) -> float:
    return Numeric().reward(Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", said))]))


@pytest.mark.parametrize("split", Split)
def test_answers_follow_from_the_story(split: Split) -> None:
    seen: set[str] = set()
    for task in tasks(600, split):
        (message,) = task.messages
        a, b = map(int, re.findall(r"\d+", message.content))
        operator = operator_of(message.content)
        answer = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[operator]
        assert task.answer == str(answer) and answer > 0
        assert min(calculated_with(message.content)) >= 2
        assert max(calculated_with(message.content)) <= (59 if operator in "+-" else 12)
        assert not re.search(r"[{}]", message.content)
        seen.add(operator)
    assert seen == set("+-*/")


def test_no_pair_of_numbers_is_in_both_splits() -> None:
    trained = {calculated_with(task.messages[0].content) for seed in (0, 1) for task in tasks(1500, seed=seed)}
    held_out = {calculated_with(task.messages[0].content) for seed in (0, 1) for task in tasks(500, Split.eval, seed)}
    assert trained.isdisjoint(held_out)
    assert len(trained) > 800 and len(held_out) > 150


def test_a_task_is_a_function_of_seed_split_and_number() -> None:
    assert tasks(50) == tasks(50)
    variants = [tasks(20), tasks(20, seed=1), tasks(20, Split.eval)]
    assert len({task.id for variant in variants for task in variant}) == 60
    source = OneStep()
    stream = source.stream(Split.train, 3)
    list(itertools.islice(stream, 17))
    resumed = source.stream(Split.train, 3)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert list(itertools.islice(resumed, 5)) == tasks(22, seed=3)[17:]


def test_difficulty_is_set_by_operators_and_numbers() -> None:
    found = tasks(300, operators="-", largest=9999)
    assert {operator_of(task.messages[0].content) for task in found} == {"-"}
    assert 9000 < max(calculated_with(task.messages[0].content)[1] for task in found) <= 9999


def test_demonstrations_are_right() -> None:
    for task in tasks(100):
        (message,) = OneStep().demonstration(task, 0)
        assert graded(task, message.content) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"operators": "+x"}, r"got '\+x'"), ({"operators": ""}, "got ''"), ({"largest": 8}, "`largest` must be >= 9")],
)
def test_impossible_settings_are_refused(settings: dict[str, str | int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OneStep(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["smollm2", "smollm2_calculator"])
def test_the_worked_examples_are_right_and_not_held_out(recipe: str) -> None:
    """Every example is a task of the source with other numbers than held-out ones, and ends with its right answer."""
    source = preset(recipe, "model.name=tiny").task
    (task,) = itertools.islice(source.stream(Split.train, 0), 1)
    shown = task.messages[:-1]
    assert task.messages[-1].role == "user" and len(shown) >= 4
    asked = [number for number, message in enumerate(shown) if message.role == "user"]
    held_out = itertools.islice(source.stream(Split.eval, 0), 3000)
    kept = {calculated_with(task.messages[-1].content) for task in held_out}
    for start, end in itertools.pairwise([*asked, len(shown)]):
        story, last = shown[start].content, shown[end - 1]
        a, b = map(int, re.findall(r"\d+", story))
        operator = operator_of(story)
        answer = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[operator]
        assert calculated_with(story) not in kept
        assert last.content.rpartition("#### ")[2] == str(answer)
        for message in shown[start + 1 : end]:
            for call in message.tool_calls:
                assert set(call.arguments["expression"].split()) == {str(a), operator, str(b)}
            if message.role == "tool":
                assert message.content == str(answer)
