"""Every grader against its table of answers, each of which somebody thought about."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from answer_tables import Section, sections, table
from mtgrpo.integrations.bfcl import _json_schema
from mtgrpo.integrations.ifeval import followed
from mtgrpo.rewards import math_verify
from mtgrpo.rewards.em import EM, Convention
from mtgrpo.rewards.f1 import F1
from mtgrpo.rewards.function_calls import FunctionCalls
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.types import Finish, Message, Task, ToolCall, Trajectory, Turn

TABLES = ["numeric.tsv", "em.tsv", "f1.tsv", "math_verify.tsv", "function_calls.tsv", "ifeval.tsv"]
LEAST = 300  # lines of a table


def said(text: str, *answers: str) -> Trajectory:
    task = Task("task/1", (Message("user", "?"),), answers[0], {"answers": answers[1:]})
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


@table("numeric.tsv")
def test_numeric(section: Section) -> None:
    reward = Numeric(**section.settings)
    wrong = [(number, *row) for number, row in section.rows if reward.reward(said(row[2], row[1])) != float(row[0])]
    assert wrong == [], section.reason


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_long_and_repeats_nothing(name: str) -> None:
    rows = [(str(section.settings), *row) for section in sections(name) for _, row in section.rows]
    assert len(rows) >= LEAST
    assert [row for row, count in Counter(rows).items() if count > 1] == []


def test_every_answer_of_the_real_data_is_right_about_itself(data_folder: Path) -> None:
    """And about the solution that it ends; no answer about the next one's."""
    files = [data_folder / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")]
    solutions = [str(json.loads(line)["answer"]) for file in files for line in file.read_text().splitlines()]
    rows = (data_folder / "word_problems" / "svamp.jsonl").read_text().splitlines()
    pairs = [(solution, solution.rpartition("####")[2].strip()) for solution in solutions]
    pairs += [(f"#### {answer}", str(answer)) for answer in (json.loads(row)["Answer"] for row in rows)]
    assert len(pairs) == 7473 + 1319 + 1000
    assert [pair for pair in pairs if Numeric().reward(said(*pair)) != 1] == []
    values = [float(answer.replace(",", "")) for _, answer in pairs]
    following = [(pairs[at][0], pairs[at - 1][1]) for at in range(len(pairs)) if values[at] != values[at - 1]]
    assert [pair for pair in following if Numeric().reward(said(*pair)) != 0] == []


@table("em.tsv")
def test_em(section: Section) -> None:
    reward = EM(**_with_convention(section.settings))
    rows = [(number, float(worth), answers.split("||"), text) for number, (worth, answers, text) in section.rows]
    assert [row for row in rows if reward.reward(said(row[3], *row[2])) != row[1]] == [], section.reason


@table("f1.tsv")
def test_f1(section: Section) -> None:
    """The first column counts words: those in common, the given ones, and those of the best accepted answer."""
    reward = F1(**_with_convention(section.settings))
    wrong: list[Any] = []
    for number, (counts, answers, text) in section.rows:
        common, given, accepted = map(int, counts.split())
        found = reward.reward(said(text, *answers.split("||")))
        if found != pytest.approx(2 * common / (given + accepted)):
            wrong.append((number, counts, answers, text, found))
    assert wrong == [], section.reason


def _with_convention(settings: dict[str, Any]) -> dict[str, Any]:
    convention = {"convention": Convention(settings["convention"])} if "convention" in settings else {}
    return settings | convention


@table("math_verify.tsv")
def test_math_verify(section: Section) -> None:
    """In this process, which takes a hundredth of the time; tests/test_math_verify.py has processes and limits."""
    library = math_verify._library()
    wrong: list[Any] = []
    for number, (worth, answer, text) in section.rows:
        verdict = math_verify._verdict(library, answer, math_verify._stated(text))
        if verdict != (math_verify._RIGHT if worth == "1" else math_verify._WRONG):
            wrong.append((number, worth, answer, text))
    assert wrong == [], section.reason


OFFERED = {
    "f": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "g": {"n": {"type": "integer"}, "yes": {"type": "boolean"}, "share": {"type": "float"}, "any": {"type": "any"}},
}


@table("function_calls.tsv")
def test_function_calls(section: Section) -> None:
    """Of whole calls, or of the accepted values of one argument and the one that is given."""
    offered = OFFERED if "calls" in section.settings else {"f": {"city": section.settings}}
    required = {"f": ["city"], "g": []}
    tools = [
        {"name": name, "parameters": _json_schema({"type": "dict", "properties": known, "required": required[name]})}
        for name, known in offered.items()
    ]
    wrong: list[Any] = []
    for number, (worth, *columns) in section.rows:
        accepted, given = map(json.loads, columns)
        if offered is not OFFERED:
            accepted, given = [{"f": {"city": accepted}}], [{"f": {"city": given}}]
        calls = tuple(ToolCall(*next(iter(call.items()))) for call in given)
        task = Task("task/1", (), metadata={"tools": tools, "calls": accepted})
        turn = Turn([], [], [], [], Finish.STOP, Message("assistant", tool_calls=calls))
        if FunctionCalls().reward(Trajectory(task, turns=[turn])) != float(worth):
            wrong.append((number, worth, *columns))
    assert wrong == [], section.reason


@table("ifeval.tsv")
def test_ifeval(section: Section) -> None:
    kind, kwargs = section.settings["kind"], {name: one for name, one in section.settings.items() if name != "kind"}
    task = Task("task/1", (), metadata={"instruction_id_list": [kind], "kwargs": [kwargs]})
    wrong = [(number, *row) for number, row in section.rows if followed(task, row[1]) != [row[0] == "1"]]
    assert wrong == [], section.reason
