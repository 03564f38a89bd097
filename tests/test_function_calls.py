"""Function calling by BFCL: tasks, what the model is offered, which calls are right; and the evidence of searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.environments.function_calls import FunctionCalls as Offered
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.bfcl import BFCL
from mtgrpo.model.tiny import load_tokenizer
from mtgrpo.rewards import Score
from mtgrpo.rewards.evidence import Evidence
from mtgrpo.rewards.function_calls import FunctionCalls
from mtgrpo.tasks import Split
from mtgrpo.types import Finish, Message, Task, ToolCall, Trajectory, Turn

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "when": {"type": "object"},
    "full": {"type": "boolean"},
    "note": {"type": ["string", "null"]},
}
TOOLS = [
    {
        "name": "find",
        "description": "d",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    }
]


def turn(message: Message, *observations: Message) -> Turn:
    return Turn([], [], [], [], Finish.STOP, message, observations=observations)


def calling(*calls: ToolCall, error: str = "") -> Message:
    return Message("assistant", tool_calls=calls, error=error)


def graded(accepted: list[dict[str, Any]], *given: dict[str, Any], error: str = "") -> float:
    task = Task("t", (), metadata={"tools": TOOLS, "calls": [{"find": one} for one in accepted]})
    calls = (ToolCall("find", one) for one in given)
    score = FunctionCalls().reward(Trajectory(task, turns=[turn(calling(*calls, error=error))]))
    assert isinstance(score, float)
    return score


CASES: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({"city": ["New York, NY"]}, {"city": "new york ny"}, 1),
    ({"city": ["Rome"]}, {"city": "Paris"}, 0),
    ({"city": ["Rome"]}, {}, 0),
    ({"city": ["Rome"]}, {"city": "Rome", "days": 3}, 0),
    ({"city": ["Rome"]}, {"city": "Rome", "other": 3}, 0),
    ({"city": ["Rome"], "days": [3, ""]}, {"city": "Rome"}, 1),
    ({"city": ["Rome"], "days": [3]}, {"city": "Rome"}, 0),
    ({"city": ["Rome"], "days": [3]}, {"city": "Rome", "days": 3}, 1),
    ({"city": ["Rome"], "days": [3]}, {"city": "Rome", "days": 3.0}, 0),
    ({"city": ["Rome"], "days": [3]}, {"city": "Rome", "days": "3"}, 0),
    ({"city": ["Rome"], "days": [1]}, {"city": "Rome", "days": True}, 0),
    ({"city": ["Rome"], "days": ["n"]}, {"city": "Rome", "days": "n"}, 1),  # a variable in place of the number
    ({"city": ["Rome"], "share": [2.0]}, {"city": "Rome", "share": 2}, 1),
    ({"city": ["Rome"], "full": [True]}, {"city": "Rome", "full": True}, 1),
    ({"city": ["Rome"], "full": [True]}, {"city": "Rome", "full": 1}, 0),
    ({"city": ["Rome"], "tags": [["a b", "c"]]}, {"city": "Rome", "tags": ["A-B", "c"]}, 1),
    ({"city": ["Rome"], "tags": [["a", "c"]]}, {"city": "Rome", "tags": ["c", "a"]}, 0),
    ({"city": ["Rome"], "when": [{"day": [1, 2], "to": ["", 5]}]}, {"city": "Rome", "when": {"day": 2}}, 1),
    ({"city": ["Rome"], "when": [{"day": [1, 2]}]}, {"city": "Rome", "when": {"day": 3}}, 0),
    ({"city": ["Rome"], "when": [{"day": [1, 2]}]}, {"city": "Rome", "when": {}}, 0),
    ({"city": ["Rome"], "note": ["x", None]}, {"city": "Rome", "note": "X"}, 1),
    ({"city": ["Rome"], "note": ["x", None]}, {"city": "Rome", "note": None}, 1),
    ({"city": ["Rome"], "note": ["x"]}, {"city": "Rome", "note": None}, 0),
]


@pytest.mark.parametrize("accepted, given, score", CASES)
def test_arguments_are_compared_as_bfcl_does(accepted: dict[str, Any], given: dict[str, Any], score: float) -> None:
    assert graded([accepted], given) == score


def test_several_calls_may_come_in_any_order_and_none_too_many() -> None:
    rome, paris = {"city": ["Rome"]}, {"city": ["Paris"]}
    assert graded([rome, paris], {"city": "Paris"}, {"city": "Rome"}) == 1
    assert graded([rome, paris], {"city": "Rome"}) == 0
    assert graded([rome], {"city": "Rome"}, {"city": "Rome"}) == 0
    assert graded([rome, rome], {"city": "Rome"}, {"city": "Rome"}) == 1
    assert graded([rome], {"city": "Rome"}, error="one call cannot be read") == 0
    with pytest.raises(ConfigError, match="has no `calls`"):
        FunctionCalls().reward(Trajectory(Task("t", ()), turns=[turn(calling())]))


async def test_every_request_is_answered_rightly_by_its_demonstration(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    source, chat = BFCL(), open_chat(load_tokenizer(), ChatSettings())
    parts = [list(source.stream(split, 0, repeat=False)) for split in Split]
    assert [len(tasks) for tasks in parts] == [597, 203] and not {t.id for t in parts[0]} & {t.id for t in parts[1]}
    for number, task in enumerate([*parts[0], *parts[1]]):
        async with Offered().conversation(task) as (environment, opening):
            assert len(opening.tools) == len(task.metadata["tools"]) and opening.messages[0].role == "system"
            [message] = source.demonstration(task, 0)
            if number % 20 == 0:  # through tokens
                assert chat.open(opening.messages, opening.tools)
                message = chat.parse(chat.encode(message))
            assert (await environment.step(message)).done
        assert FunctionCalls().reward(Trajectory(task, turns=[turn(message)])) == 1, task.id
        fewer = calling(*message.tool_calls[1:])
        assert FunctionCalls().reward(Trajectory(task, turns=[turn(fewer)])) == 0, task.id


def test_conversations_of_several_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multi_turn_base needs the functions of the package bfcl-eval"):
        BFCL(categories=["multi_turn_base"]).stream(Split.eval, 0)
    with pytest.raises(ConfigError, match="java is none; choose from simple_python"):
        BFCL(categories=["java"]).stream(Split.eval, 0)
    with pytest.raises(ConfigError, match=r"there is no file.*set task\.path"):
        BFCL(path=str(tmp_path)).stream(Split.eval, 0)


async def test_tasks_without_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs `tools` in its metadata"):
        async with Offered().conversation(Task("t", ())):
            pass


# --- the evidence of searches ---


def searching() -> Trajectory:
    shown = ["[p1] Rome: It is [p3] old.\n[p2] Paris: x", "[p1] Rome: again", "[p4] Oslo: x"]
    turns = [turn(calling(), Message("tool", text, name="search")) for text in shown]
    turns += [turn(calling(), Message("tool", "[p3] quoted", name="read")), turn(Message("assistant", "[p3]"))]
    return Trajectory(Task("q", (), metadata={"gold": ["p1", "p4", "p3", "p5"]}), turns=turns)


def test_passages_that_are_needed_are_paid_for_once() -> None:
    assert Evidence().reward(searching()) == Score(0.5)
    paid = Evidence(per_turn=True).reward(searching())
    assert (paid.total, paid.components, list(paid.turns)) == (0, {"found": 0.5}, [0.25, 0, 0.25, 0, 0])
    assert Evidence(per_turn=True).judges_turns and not Evidence().judges_turns
    with pytest.raises(ConfigError, match="has no `gold`"):
        Evidence().reward(Trajectory(Task("q", ())))


def answered(*shown: str, tool: str = "search") -> list[float]:
    turns = [turn(calling(), Message("tool", text, name=tool)) for text in shown]
    task = Task("q", (), "Mount Everest", {"answers": ["Mount Everest", "Sagarmāthā", "1953"]})
    return list(Evidence(per_turn=True, answers=True).reward(Trajectory(task, turns=turns)).turns)


def test_a_search_that_shows_an_accepted_answer_is_paid_for_once() -> None:
    assert answered("[a] K2: high", "[b] Himalaya: the mount Everest,\nhighest", "[c] Sagarmāthā: again") == [0, 1, 0]
    assert answered("mount of Everest", "in 1953-54", "Everest") == [0, 1, 0]
    assert answered("[d] 19530: Sagarmāthāx", "Mount  EVEREST!") == [0, 1]
    assert answered("Mount Everest", tool="read") == [0]
    task = Task("q", (), "", {"answers": ["Rome"]})
    turns = [turn(calling(), Message("tool", "Rome", name="search"))]
    assert Evidence(answers=True).reward(Trajectory(task, turns=turns)) == Score(1.0)
    with pytest.raises(ConfigError, match="has no answer to compare with"):
        Evidence(answers=True).reward(Trajectory(Task("q", ()), turns=turns))
