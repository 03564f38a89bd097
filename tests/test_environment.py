"""Environments: what a conversation opens with and how it answers the model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mtgrpo.environments import Environment, Reply
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import OnOutage, OutageError, ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext, extension
from mtgrpo.types import Message, Task, ToolCall

TASK = Task("task/1", (Message("system", "Use tools."), Message("user", "What is 2 + 2?")), answer="4")
OWN_TOOLS = '''
import asyncio
import threading
from dataclasses import dataclass, field
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

wake = threading.Event()
woken = threading.Event()

@dataclass
class Sleeper(Tool):
    """Counts its calls, once it has slept."""
    count: int = 0
    def __call__(self, hangs: bool) -> int:
        if hangs:
            wake.wait(60)
        self.count += 1
        if hangs:
            woken.set()
        return self.count

@dataclass
class Counter(Tool):
    """Counts its calls."""
    first: int = 1
    def __call__(self) -> int:
        self.first += 1
        return self.first - 1

class Shelf(Tool):
    """Takes from a shelf."""
    async def start(self, task):
        self.shelf = task.metadata["shelf"]
    def __call__(self, thing: str) -> int:
        return self.shelf[thing].pop()

@dataclass
class Basket(Tool):
    """Keeps things."""
    things: list = field(default_factory=list)
    prices: dict = field(default_factory=lambda: {"nut": 1})
    def __call__(self, thing: str) -> int:
        if thing in self.prices:
            self.prices[thing] += 1
        else:
            self.things.append(thing)
        return len(self.things)

class Own(Basket):
    """Keeps things of its own."""
    async def start(self, task):
        self.things, self.prices = [], {}
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
            ("calcluator", {}),
            ("calculator", {"expresion": "2 + 2"}),
            ("refuses", {}),
            ("calculator", {"expression": "3 + 3"}),
        )
    )
    assert observed(reply) == [
        ("calculator", "4"),
        ("abacus", "error: there is no tool 'abacus'; the tools are: calculator, refuses"),
        (
            "calcluator",
            "error: there is no tool 'calcluator'; did you mean calculator? the tools are: calculator, refuses",
        ),
        ("calculator", "error: calculator has no argument 'expresion'; its arguments: expression"),
        ("refuses", "error: not today"),
        ("calculator", "6"),
    ]
    assert (reply.tool_calls, reply.tool_errors) == (6, 4)


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
    assert await environment.step(message) == Reply((Message("user", answer),))
    assert await environment.step(Message("assistant", "4")) == Reply(done=True)


async def test_the_calls_of_one_message_run_at_once(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:meet"], call_timeout_s=60))
    reply = await environment.step(calls(("meet", {"name": "a"}), ("meet", {"name": "b"})))
    assert observed(reply) == [("meet", "a"), ("meet", "b")]


@pytest.mark.parametrize(
    ("tool", "why"),
    [("breaks", "OSError: the disk is full ({}, line 33)"), ("leaves", "RuntimeError: SystemExit: 3 ({}, line 37)")],
)
async def test_a_tool_that_stays_out_of_order_is_told_or_fails_the_conversation(own: str, tool: str, why: str) -> None:
    settings: dict[str, Any] = {"tools": [f"{own}:{tool}", "calculator"], "call_retries": 2, "backoff_s": 0}
    both = calls((tool, {}), ("calculator", {"expression": "2 + 2"}))
    reply = await (await opened(ToolUse(**settings, on_outage=OnOutage.observe))).step(both)
    assert observed(reply) == [(tool, f"error: the tool {tool} is out of order"), ("calculator", "4")]
    assert (reply.tool_calls, reply.tool_errors, reply.tool_retries) == (2, 0, 2)
    assert reply.outages == [f"the tool {tool} failed: {why.format(own)}"]
    with pytest.raises(OutageError, match=f"^{re.escape(reply.outages[0])}$") as failure:
        await (await opened(ToolUse(**settings))).step(both)
    assert isinstance(failure.value.__cause__, OSError if tool == "breaks" else RuntimeError)


async def test_a_call_that_takes_too_long_twice_is_a_mistake_of_the_model(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:hang"], call_timeout_s=0.01))
    reply = await environment.step(calls(("hang", {})))
    assert observed(reply) == [("hang", "error: no answer within 0.01 s")]
    assert (reply.tool_errors, reply.tool_timeouts, reply.tool_retries, reply.outages) == (1, 1, 1, [])


async def test_what_runs_on_after_its_time_does_not_touch_later_calls(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:Sleeper"], call_timeout_s=0.05))
    module = extension.load_file(Path(own))
    slow, quick = calls(("Sleeper", {"hangs": True})), calls(("Sleeper", {"hangs": False}))
    assert observed(await environment.step(quick)) == [("Sleeper", "1")]
    assert observed(await environment.step(slow)) == [("Sleeper", "error: no answer within 0.05 s")]
    module.wake.set()
    module.woken.wait(60)
    assert observed(await environment.step(quick)) == [("Sleeper", "2")]


async def test_nothing_runs_on_after_a_failure(own: str) -> None:
    environment = await opened(ToolUse(tools=[f"{own}:breaks", f"{own}:end_late"], call_retries=0))
    with pytest.raises(OutageError, match="the tool breaks failed"):
        await environment.step(calls(("breaks", {}), ("end_late", {"name": "a"})))
    assert extension.load_file(Path(own)).ended == ["a"]


async def test_copies_share_no_state(own: str) -> None:
    shared = ToolUse(tools={f"{own}:Counter": {"first": 10}})
    one, two = await opened(shared), await opened(shared)
    count = calls(("Counter", {}))
    assert [observed(await one.step(count))[0][1] for _ in range(3)] == ["10", "11", "12"]
    assert observed(await two.step(count)) == [("Counter", "10")]
    assert observed(await (await opened(shared)).step(count)) == [("Counter", "10")]


async def test_a_tool_may_take_things_out_of_the_metadata(own: str) -> None:
    shared, take = ToolUse(tools=[f"{own}:Shelf"]), calls(("Shelf", {"thing": "bolts"}))
    task = dataclasses.replace(TASK, metadata={"shelf": {"bolts": [3, 4]}})
    for _ in range(2):
        async with shared.conversation(task) as (playing, _):
            assert [observed(await playing.step(take)) for _ in range(2)] == [[("Shelf", "4")], [("Shelf", "3")]]
    assert task.metadata == {"shelf": {"bolts": [3, 4]}}


@pytest.mark.parametrize(
    ("tool", "thing", "changed"), [("Basket", "bolt", "`things`"), ("Basket", "nut", "`prices`"), ("Own", "bolt", "")]
)
async def test_what_a_tool_changes_for_other_conversations_is_told_once(
    tool: str, thing: str, changed: str, own: str, tmp_path: Path
) -> None:
    notes: list[str] = []
    async with ToolUse(tools=[f"{own}:{tool}"]).open(RunContext(tmp_path, notes.append, {})) as environment:
        for _ in range(2):
            async with environment.conversation(TASK) as (playing, _):
                await playing.step(calls((tool, {"thing": thing})))
    assert [note.partition(", which all conversations share")[0] for note in notes] == (
        [f"the tool {tool} changed {changed}"] if changed else []
    )


async def test_a_restarted_copy_begins_anew(own: str) -> None:
    playing = await opened(ToolUse(tools=[f"{own}:Counter"]))
    await playing.step(calls(("Counter", {})))
    await playing.start(TASK)
    assert observed(await playing.step(calls(("Counter", {})))) == [("Counter", "1")]


@pytest.mark.parametrize("tools", [["calculator"], {"calculator": {"max_digits": 4}}])
async def test_settings_come_from_a_configuration(tools: Any) -> None:
    config = OmegaConf.merge(
        OmegaConf.structured(ToolUse), {"tools": tools, "call_timeout_s": 5, "on_outage": "observe"}
    )
    environment = OmegaConf.to_object(config)
    assert isinstance(environment, ToolUse)
    assert (environment.call_timeout_s, environment.on_outage) == (5.0, OnOutage.observe)
    playing = await opened(environment)
    (answer,) = observed(await playing.step(calls(("calculator", {"expression": "9999 + 1"}))))
    assert answer[1] == ("10000" if isinstance(tools, list) else "error: a number has more than 4 digits")


def test_an_environment_travels_to_another_process() -> None:
    environment = ToolUse(tools={"calculator": {"max_digits": 4}})
    assert pickle.loads(pickle.dumps(environment)) == environment


def test_wrong_settings_are_refused_when_the_environment_is_made(own: str) -> None:
    with pytest.raises(ConfigError, match="there is no tool named 'abacus'"):
        ToolUse(tools=["abacus"])
    with pytest.raises(ConfigError, match="`call_timeout_s` must be > 0, got 0"):
        ToolUse(call_timeout_s=0)
    for name in ("call_retries", "backoff_s"):
        with pytest.raises(ConfigError, match=f"`{name}` must be >= 0, got -1"):
            ToolUse(**{name: -1})  # type: ignore[arg-type]


async def test_a_single_turn_ends_with_the_first_message() -> None:
    environment = await opened(SingleTurn())
    opening = await environment.start(TASK)
    assert (opening.messages, opening.tools) == (TASK.messages, ())
    for message in (Message("assistant", "4"), Message("assistant", error="unreadable"), calls(("x", {}))):
        assert await environment.step(message) == Reply(done=True)


# --- one option, several tools

SERVER = '''
import copy
from contextlib import asynccontextmanager
from dataclasses import dataclass
from mtgrpo.tools import Tool, ToolError
from mtgrpo.types import ToolSpec

@dataclass
class Server(Tool):
    """What a server offers is known while it is open."""
    greeting: str = "hello"
    offered = ()

    @asynccontextmanager
    async def open(self, context):
        running = copy.copy(self)
        running.offered = ("greet", "part")
        running.key = context.secrets["KEY"]
        yield running
        running.key = ""

    def specs(self):
        schema = {"type": "object", "properties": {"who": {"type": ["string", "null"]}}}
        return [ToolSpec(name, f"Say {name}.", schema) for name in self.offered]

    async def call(self, name, arguments):
        if name == "part":
            raise ToolError("stay")
        return f"{self.greeting} {arguments.get('who')} {self.key}"

def greet(who: str) -> str:
    """Greet."""
    return who
'''


async def test_one_option_gives_the_tools_that_a_server_offers_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    settings = ToolUse(tools={"calculator": {}, f"{path}:Server": {"greeting": "hi"}})
    assert [spec.name for spec in settings.tool_specs] == ["calculator"]
    context = RunContext(tmp_path, print, {"KEY": "secret"})
    async with settings.open(context) as running, running.conversation(TASK) as (environment, opening):
        assert [spec.name for spec in opening.tools] == ["calculator", "greet", "part"]
        reply = await environment.step(
            calls(("greet", {"who": None}), ("greet", {"who": 3}), ("part", {}), ("calculator", {"expression": "1+1"}))
        )
        assert observed(reply) == [
            ("greet", "hi None secret"),
            ("greet", "error: argument 'who' must be of type string or null, got 3"),
            ("part", "error: stay"),
            ("calculator", "2"),
        ]
    with pytest.raises(ConfigError, match="two tools are named 'greet'"):
        async with ToolUse(tools=[f"{path}:Server", f"{path}:greet"]).open(context):
            pass
