"""Rewards for what the final message looks like: its form, its code; and answers that come from a file."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward, Score, scores
from mtgrpo.rewards.format import Format
from mtgrpo.rewards.ground_truth import GroundTruth
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn


def told(text: str, answer: str = "72", metadata: Mapping[str, Any] | None = None) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answer, metadata or {})
    return Trajectory(task, turns=[Turn([1], [2], [0.0], [0], Finish.STOP, Message("assistant", text))])


def worth(reward: Reward, trajectory: Trajectory) -> float:
    (score,) = asyncio.run(scores(reward, [trajectory]))
    assert isinstance(score, Score), score
    return score.total


@pytest.mark.parametrize(
    "text, block",
    [
        ("```python\ndef f(x):\n    return x + 1\n```", "def f(x):\n    return x + 1"),
        ("```\nx = 2\n```\nno, rather\n```py\nx = 1\n```\nDone.", "x = 1"),
        ("~~~~\nx = 1\n~~~~", "x = 1"),
        ("1. so:\n   ```python\n   x = 1\n   ```", "x = 1"),
        ("````\n```\nx = 1\n```\n````", "```\nx = 1\n```"),
        ("```c\nint x;  \nint y;\n\n```", "int x;  \nint y;\n"),
        ("```\n```", ""),
        ("x = 1", None),
        ("```\nx = 1", None),
        ("```x = 1```", None),
        ("", None),
        ("```\nx = 1\n~~~", None),
        ("````\nx = 1\n```", None),
    ],
)
def test_the_last_code_block_is_between_fences(text: str, block: str | None) -> None:
    assert last_code_block(text) == block


@pytest.mark.parametrize(
    "rules, text, kept",
    [
        ({}, "", True),
        ({"min_chars": 8}, "#### 72", False),
        ({"min_chars": 7}, "#### 72", True),
        ({"required_patterns": ["####", r"\d$"]}, "#### 72", True),
        ({"required_patterns": ["####", r"\d$"]}, "#### 72.", False),
        ({"forbidden_patterns": ["(?i)sorry"]}, "Sorry", False),
        ({"forbidden_patterns": ["(?i)sorry"]}, "Gladly", True),
        ({"code_block": True}, "```\nx\n```", True),
        ({"code_block": True}, "```\nx", False),
    ],
)
def test_format_rules(rules: dict[str, Any], text: str, kept: bool) -> None:
    assert Format(**rules).reward(told(text)) == kept


def test_every_turn_may_have_to_keep_the_rules() -> None:
    talk = told("<a>1</a>")
    talk.turns = [told("no tag").turns[0], *talk.turns]
    rules = {"required_patterns": ["<a>"]}
    assert (Format(**rules).reward(talk), Format(**rules, every_turn=True).reward(talk)) == (1, 0)
    talk.turns = talk.turns[1:] * 2
    assert Format(**rules, every_turn=True).reward(talk) == 1


def test_format_rules_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="`min_chars` must be >= 0, got -1"):
        Format(min_chars=-1)
    for name in ("required_patterns", "forbidden_patterns"):
        with pytest.raises(ConfigError, match=rf"reward format: {name}: '\[' is not a regular expression"):
            dataclasses.replace(Format(), **{name: ["ok", "["]})


def answers(folder: Path, *lines: str) -> str:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_answers_of_a_file_take_precedence(tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "task/1", "answer": "Rome"}', "", '{"id": 2, "answer": 0.5}', "")
    reward = GroundTruth(file=name)
    assert worth(reward, told("Rome", answer="Paris", metadata={"answers": ["Paris", "Lutetia"]})) == 1.0
    assert worth(reward, told("Lutetia", answer="Paris", metadata={"answers": ["Paris", "Lutetia"]})) == 0.0
    evidence = GroundTruth(of=["evidence"], file=name)  # which other metadata of the task say
    assert worth(evidence, told("Rome", answer="Paris", metadata={"gold": ["p1"]})) == 0.0
    second = told("#### 1/2", answer="")
    second.task = dataclasses.replace(second.task, id="2")
    assert worth(GroundTruth(of=["numeric"], file=name), second) == 1.0
    other = told("Paris", answer="Paris")
    other.task = dataclasses.replace(other.task, id="task/3")
    assert worth(reward, other) == 1.0


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", r"line 2: not valid JSON"),
        ("[1]", r"line 2: a line must be"),
        ('{"id": "b"}', r"line 2: a line must be"),
        ('{"id": "b", "answer": null}', r"line 2: a line must be"),
        ('{"id": "b", "answer": " "}', r"line 2: a line must be"),
        ('{"id": true, "answer": "1"}', r"line 2: a line must be"),
        ('{"id": "a", "answer": "2"}', r"line 2: there is a line for id 'a' already"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_played(line: str, said: str, tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "a", "answer": "1"}', line)
    with pytest.raises(ConfigError, match=rf"answers\.jsonl, {said}"):
        GroundTruth(file=name)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward ground_truth: file=.*missing\.jsonl cannot be read"):
        GroundTruth(file=str(tmp_path / "missing.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.jsonl cannot be read"):
        GroundTruth(file=str(tmp_path / "binary.jsonl"))


def test_a_task_without_an_answer_is_refused(tmp_path: Path) -> None:
    name = answers(tmp_path, '{"id": "a", "answer": "1"}')
    for reward in (GroundTruth(file=name), GroundTruth(file=name, of=["em"])):
        with pytest.raises(ConfigError, match=r"task task/1 has no answer to compare with; choose"):
            worth(reward, told("x", answer=""))


@pytest.mark.parametrize(
    "text, expected",
    [("#### anything", 1.0), (r"\boxed{x}", 1.0), ("```\nx = 1\n```", 1.0), ("anything", 0.0)],
)
def test_the_heuristic_grades_only_what_has_no_answer(text: str, expected: float) -> None:
    reward = GroundTruth(heuristic=True)
    assert worth(reward, told(text, answer="")) == expected
    assert worth(reward, told(text, answer="72")) == 0.0
    assert worth(reward, told("72", answer="72")) == 1.0
