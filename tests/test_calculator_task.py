"""The calculator task: right answers, nothing held out is ever trained on, demonstrations of known quality."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.tasks import Split
from mtgrpo.tasks.calculator import LIMIT, MAX_PRODUCTS, SENTENCES, Calculator, Demonstrator, Problem, demonstrate
from mtgrpo.tools.calculator import Calculator as CalculatorTool
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

WRONG = ("wrong_number", "wrong_operator", "swapped", "early", "guess")


def tasks(count: int, split: Split = Split.train, seed: int = 0, source: Calculator | None = None) -> list[Task]:
    return list(itertools.islice((source or Calculator()).stream(split, seed), count))


def numbers_of(task: Task) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", task.messages[-1].content)}


def problem_of(task: Task) -> Problem:
    return Problem(**task.metadata)


def graded(task: Task, messages: tuple[Message, ...]) -> float:
    turns = [Turn([], [], [], [], Finish.STOP, message) for message in messages if message.role == "assistant"]
    return Numeric().reward(Trajectory(task, turns=turns))


def test_no_number_of_a_held_out_task_is_ever_trained_on() -> None:
    trained = [numbers_of(task) for seed in (0, 1) for task in tasks(250, Split.train, seed)]
    held_out = [numbers_of(task) for seed in (0, 1) for task in tasks(250, Split.eval, seed)]
    seen, kept = set[int]().union(*trained), set[int]().union(*held_out)
    assert seen.isdisjoint(kept)
    assert len(seen) > 500 and len(kept) > 150


def test_answers_follow_from_the_story() -> None:
    words = {word: operator for operator, sentences in SENTENCES.items() for text in sentences for word in text.split()}
    shared = {word for word in words if sum(word in " ".join(texts).split() for texts in SENTENCES.values()) > 1}
    for task in (*tasks(300), *tasks(200, Split.eval)):
        first, *sentences = re.findall(r"[^.]*\d+[^.]*\.", task.messages[-1].content)
        value = int(re.search(r"\d+", first)[0])  # type: ignore[index]
        assert value == task.metadata["start"]
        told: list[tuple[str, int]] = []
        for sentence in sentences:
            (operator,) = {words[word] for word in sentence.split() if word in words and word not in shared}
            told.append((operator, int(re.search(r"\d+", sentence)[0])))  # type: ignore[index]
        assert tuple(told) == task.metadata["steps"]
        for (operator, operand), result in zip(told, task.metadata["values"], strict=True):
            value = {"+": value + operand, "-": value - operand, "*": value * operand}[operator]
            assert value == result
            assert 0 <= value < LIMIT
        assert str(value) == task.answer
        assert sum(operator == "*" for operator, _ in told) <= MAX_PRODUCTS


def test_a_task_is_a_function_of_seeds_split_and_number() -> None:
    assert tasks(50) == tasks(50)
    variants = [
        tasks(20),
        tasks(20, seed=1),
        tasks(20, Split.eval),
        tasks(20, source=Calculator(seed=1)),
    ]
    assert len({task.id for variant in variants for task in variant}) == 80
    assert len({task.messages for variant in variants for task in variant}) == 80


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 4), (3, 3), (1, 8), (8, 8)])
def test_difficulty_is_the_number_of_steps(least: int, most: int) -> None:
    found = {len(task.metadata["steps"]) for task in tasks(120, source=Calculator(min_steps=least, max_steps=most))}
    assert found == set(range(least, most + 1))


@pytest.mark.parametrize(("least", "most"), [(0, 2), (3, 2), (1, 9)])
def test_an_impossible_difficulty_is_refused(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=r"`m.._steps` must be >= "):
        Calculator(min_steps=least, max_steps=most)


def test_a_stream_continues_where_it_was() -> None:
    source = Calculator()
    stream = source.stream(Split.train, 3)
    list(itertools.islice(stream, 17))
    state = json.loads(json.dumps(stream.state_dict()))
    rest = list(itertools.islice(stream, 10))
    resumed = source.stream(Split.train, 3)
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed, 10)) == rest
    assert rest == tasks(27, seed=3)[17:]


def test_the_system_prompt_comes_first() -> None:
    (task,) = tasks(1, source=Calculator(system_prompt="Be exact."))
    assert task.messages == (Message("system", "Be exact."), *tasks(1)[0].messages)


# --- demonstrations


def kind_of(task: Task, messages: tuple[Message, ...]) -> str:
    """Which kind a demonstration is, as far as its messages tell."""
    calls = [str(call.arguments["expression"]).split() for message in messages for call in message.tool_calls]
    steps = task.metadata["steps"]
    if not calls:
        return "guess"
    if len(calls) < len(steps) and not any(message.content.startswith("error") for message in messages):
        return "early"
    said = [(operator, int(right)) for _, operator, right in calls]
    if tuple(said) == steps:
        replies = [str(task.metadata["start"]), *(message.content for message in messages if message.role == "tool")]
        chained = all(left == value for (left, _, _), value in zip(calls, replies, strict=False))
        return "right" if chained else "wrong_number"
    if Counter(said) == Counter(steps):
        return "swapped"
    same_operands = [operand for _, operand in said] == [operand for _, operand in steps]
    return "wrong_operator" if same_operands else "wrong_number"


def test_demonstrations_have_the_shares_that_are_set() -> None:
    shares = Demonstrator(right=0.3, wrong_number=0.2, wrong_operator=0.15, swapped=0.1, early=0.15)
    source = Calculator(demonstrator=shares)
    count = 2000
    drawn = tasks(count, source=source)
    found = Counter(kind_of(task, source.demonstration(task, 5)) for task in drawn)
    expected = {**vars(shares), "guess": 0.1}
    assert set(found) == set(expected)
    for kind, share in expected.items():
        assert abs(found[kind] - count * share) < 4 * math.sqrt(count * share * (1 - share)), kind


def test_a_demonstration_is_a_function_of_task_and_seed() -> None:
    source = Calculator()
    drawn = tasks(30)
    first = [source.demonstration(task, 1) for task in drawn]
    assert first == [source.demonstration(task, 1) for task in reversed(drawn)][::-1]
    assert sum(a != b for a, b in zip(first, (source.demonstration(task, 2) for task in drawn), strict=True)) > 10


@pytest.mark.parametrize("split", Split)
def test_a_right_demonstration_is_right_and_its_tools_are_real(split: Split) -> None:
    source = Calculator(min_steps=1, max_steps=8, demonstrator=Demonstrator(1.0, 0.0, 0.0, 0.0, 0.0))
    for task in tasks(200, split, source=source):
        messages = source.demonstration(task, 0)
        assert graded(task, messages) == 1.0
        assert len(messages) == 2 * len(task.metadata["steps"]) + 1
        assert [m.content for m in messages if m.role == "tool"] == [str(value) for value in task.metadata["values"]]


def test_every_reply_is_what_the_tool_answers() -> None:
    tool = CalculatorTool()
    for task in tasks(300):
        for kind in ("right", *WRONG):
            messages = demonstrate(problem_of(task), kind, random.Random(f"{kind}/{task.id}"))
            assert messages[-1].role == "assistant" and messages[-1].content.startswith("#### ")
            for asked, answered in itertools.pairwise(messages):
                if asked.tool_calls:
                    assert (answered.role, answered.name) == ("tool", "calculator")
                    assert answered.content == tool(str(asked.tool_calls[0].arguments["expression"]))


@pytest.mark.parametrize(("kind", "most_right"), [(k, 0.6 if k == "swapped" else 0.1) for k in WRONG])
def test_a_wrong_demonstration_is_mostly_wrong(kind: str, most_right: float) -> None:
    """Two steps in the wrong order often come to the same: a sum has no order."""
    drawn = tasks(600)
    right = [graded(task, demonstrate(problem_of(task), kind, random.Random(f"{kind}/{task.id}"))) for task in drawn]
    assert sum(right) / len(right) < most_right


@pytest.mark.parametrize(
    "shares", [{"right": 0.9}, {"right": -0.1}, {"early": 1.01}, {"right": 0.5, "wrong_number": 0.5, "swapped": 0.1}]
)
def test_bad_shares_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\.demonstrator"):
        Demonstrator(**shares)


def test_shares_may_add_up_to_one() -> None:
    shares = Demonstrator(0.7, 0.1, 0.1, 0.1, 0.0)  # in binary a little more, or less, than 1
    assert {shares.kind(random.Random(seed)) for seed in range(300)} == {
        "right",
        "wrong_number",
        "wrong_operator",
        "swapped",
    }
