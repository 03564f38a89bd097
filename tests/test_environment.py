"""Environments: what a conversation opens with and how it answers the model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mtgrpo import extension
from mtgrpo.environments import Environment, Reply
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.extension import ConfigError
from mtgrpo.types import Message, Task, ToolCall

TASK = Task("task/1", (Message("system", "Use tools."), Message("user", "What is 2 + 2?")), answer="4")
OWN_TOOLS = '''
import asyncio
from dataclasses import dataclass
from mtgrpo.tools import Tool, ToolError

together = asyncio.Event()
waiting = 0
ended = []

async def meet(name: str) -> str:
    """Answer as soon as two calls are waiting."""
    global waiting
    waiting += 1
    if waiting == 2:
        together.set()
    await together.wait()
    return name

async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()

async def end_late(name: str) -> str:
    """Answer after others had their turn."""
    for _ in range(5):
        await asyncio.sleep(0)
    ended.append(name)
    return name

def breaks() -> str:
    """Break."""
    raise OSError("the disk is full")

def leaves() -> str:
    """End the program."""
    raise SystemExit(3)

def refuses() -> str:
    """Refuse."""
    raise ToolError("not today")

@dataclass
class Counter(Tool):
    """Counts its calls."""
    first: int = 1
    def __call__(self) -> int:
        self.first += 1
        return self.first - 1
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN_TOOLS)
    return str(path)


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in named))


def observed(reply: Reply) -> list[tuple[str, str]]:
    assert not reply.done
    assert all(message.role == "tool" for message in reply.messages)
    return [(message.name, message.content) for message in reply.messages]


async def opened(environment: Environment) -> Environment:
    playing = copy.copy(environment)
    await playing.start(TASK)
    return playing


async def test_a_conversation_opens_with_the_task_and_the_tools(own: str) -> None:
    opening = await ToolUse(tools=["calculator", f"{own}:meet"]).start(TASK)
    assert opening.messages == TASK.messages
    assert [tool.name for tool in opening.tools] == ["calculator", "meet"]
    assert opening.tools[0].parameters["required"] == ["expression"]


async def test_a_message_without_calls_ends_the_conversation() -> None:
    environment = await opened(ToolUse(tools=["calculator"]))
    assert await environment.step(Message("assistant", "4")) == Reply(done=True)


async def test_calls_are_answered_in_their_order_and_mistakes_are_observations(own: str) -> None:
    environment = await opened(ToolUse(tools=["calculator", f"{own}:refuses"]))
    reply = await environment.step(
        calls(
            ("calculator", {"expression": "2 + 2"}),
            ("abacus", {}),
            ("calculator", {"expresion": "2 + 2"}),
            ("refuses", {}),
            ("calculator", {"expression": "3 + 3"}),
        )
    )
    assert observed(reply) == [
        ("calculator", "4"),
        ("abacus", "error: there is no tool 'abacus'; the tools are: calculator, refuses"),
        ("calculator", "error: calculator has no argument 'expresion'; its arguments: expression"),
        ("refuses", "error: not today"),
        ("calculator", "6"),
    ]
    assert (reply.tool_calls, reply.tool_errors) == (5, 3)


async def test_calls_that_cannot_be_read_are_an_observation() -> None:
    environment = await opened(ToolUse(tools=["calculator"]))
    reply = await environment.step(Message("assistant", error="the arguments are not JSON"))
    assert observed(reply) == [("", "error: the arguments are not JSON")]
    assert (reply.tool_calls, reply.tool_errors) == (1, 1)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (Message("assistant", error="unclosed <think>"), "error: unclosed <think>"),
        (calls(("calculator", {}), ("abacus", {})), "error: there are no tools"),
    ],
)
async def test_without_tools_the_user_answers_and_no_call_is_counted(message: Message, answer: str) -> None:
    environment = await opened(ToolUse())
    assert await environment.step(message) == Reply((Message("user", answer),), tool_calls=0, tool_errors=0)
    assert await environment.step(Message("assistant", "4")) == Reply(done=True)


async def test_the_calls_of_one_message_run_at_once(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:meet"], timeout_s=60))
    reply = await environment.step(calls(("meet", {"name": "a"}), ("meet", {"name": "b"})))
    assert observed(reply) == [("meet", "a"), ("meet", "b")]


async def test_a_tool_that_breaks_raises_with_its_name_and_cause(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:breaks"]))
    with pytest.raises(RuntimeError, match=r"^the tool breaks failed: OSError: the disk is full$") as failure:
        await environment.step(calls(("breaks", {})))
    assert isinstance(failure.value.__cause__, OSError)


async def test_a_tool_that_ends_the_program_fails_the_rollout_alone(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:leaves"]))
    with pytest.raises(RuntimeError, match=r"^the tool leaves failed: RuntimeError: SystemExit: 3$"):
        await environment.step(calls(("leaves", {})))


async def test_a_tool_that_hangs_raises_with_its_name(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:hang"], timeout_s=0.01))
    with pytest.raises(RuntimeError, match=r"^the tool hang failed: TimeoutError: no answer within 0\.01 s$"):
        await environment.step(calls(("hang", {})))


async def test_nothing_runs_on_after_a_failure(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:breaks", f"{own}:end_late"]))
    with pytest.raises(RuntimeError, match="the tool breaks failed"):
        await environment.step(calls(("breaks", {}), ("end_late", {"name": "a"})))
    assert extension.load_file(Path(own)).ended == ["a"]


async def test_copies_share_no_state(own: str) -> None:
    shared = ToolUse(tools={f"{own}:Counter": {"first": 10}})
    one, two = await opened(shared), await opened(shared)
    count = calls(("Counter", {}))
    assert [observed(await one.step(count))[0][1] for _ in range(3)] == ["10", "11", "12"]
    assert observed(await two.step(count)) == [("Counter", "10")]
    assert observed(await (await opened(shared)).step(count)) == [("Counter", "10")]


async def test_a_restarted_copy_begins_anew(own: str) -> None:
    playing = await opened(ToolUse(tools=[f"{own}:Counter"]))
    await playing.step(calls(("Counter", {})))
    await playing.start(TASK)
    assert observed(await playing.step(calls(("Counter", {})))) == [("Counter", "1")]


@pytest.mark.parametrize("tools", [["calculator"], {"calculator": {"max_digits": 4}}])
async def test_settings_come_from_a_configuration(tools: Any) -> None:
    config = OmegaConf.merge(OmegaConf.structured(ToolUse), {"tools": tools, "timeout_s": 5, "max_turns": 3})
    environment = OmegaConf.to_object(config)
    assert isinstance(environment, ToolUse)
    assert (environment.timeout_s, environment.max_turns) == (5.0, 3)
    playing = await opened(environment)
    (answer,) = observed(await playing.step(calls(("calculator", {"expression": "9999 + 1"}))))
    assert answer[1] == ("10000" if isinstance(tools, list) else "error: a number has more than 4 digits")


def test_an_environment_travels_to_another_process() -> None:
    environment = ToolUse(tools={"calculator": {"max_digits": 4}})
    assert pickle.loads(pickle.dumps(environment)) == environment


def test_wrong_settings_are_refused_when_the_environment_is_made(own: str) -> None:
    with pytest.raises(ConfigError, match="there is no tools named 'abacus'"):
        ToolUse(tools=["abacus"])
    with pytest.raises(ConfigError, match=r"environment\.timeout_s must be above 0 seconds, got 0"):
        ToolUse(timeout_s=0)


async def test_a_single_turn_ends_with_the_first_message() -> None:
    environment = await opened(SingleTurn())
    opening = await environment.start(TASK)
    assert (opening.messages, opening.tools) == (TASK.messages, ())
    for message in (Message("assistant", "4"), Message("assistant", error="unreadable"), calls(("x", {}))):
        assert await environment.step(message) == Reply(done=True)
