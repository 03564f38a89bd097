"""Tools that fail now and then must not choose what is trained: the calls are made again, not the conversations."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.environments import Opening, Reply
from mtgrpo.environments.tool_use import OnOutage, ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext, extension
from mtgrpo.stages.evaluate import evaluate
from mtgrpo.stages.metrics import describe_tools
from mtgrpo.tools import CallTimeoutError, ToolError
from mtgrpo.tools.calls import CallLimits, Faults, Gate
from mtgrpo.types import CallOutcome, CallRecord, Message, Status, Task, ToolCall, Trajectory
from mtgrpo.weights.source import ModelWeights
from scripted import ScriptedEngine
from test_async import in_jumping_time
from test_conversation import TASK, make_runner, model, said

CALLS = 0.6  # the probability of one more call, of at most MOST
MOST = 4
TOOLS = '''
import asyncio
import random
from dataclasses import dataclass
from typing import ClassVar

from mtgrpo.tools import Tool

rng = random.Random(0)
asked = []

async def now() -> float:
    """Tell the time."""
    return asyncio.get_running_loop().time()

async def times_out() -> None:
    """Ask a server that does not answer."""
    asked.append(await now())
    raise TimeoutError("the server")

def wordy() -> str:
    """Say the alphabet."""
    return "abcdefghijklmnopqrstuvwxyz"

wordy.blocking = False

@dataclass
class Unsteady(Tool):
    """Fails now and then."""

    blocking: ClassVar[bool] = False
    rate: float = 0.0

    def __call__(self) -> str:
        if rng.random() < self.rate:
            raise OSError("the line is dead")
        return "done"

@dataclass
class Order(Tool):
    """Buys something, and fails afterwards."""

    idempotent: ClassVar[bool] = False

    async def __call__(self) -> None:
        asked.append(await now())
        raise OSError("the line is dead")
'''


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    module = extension.load_file(path)
    module.path = path
    yield module


def script(key: Key, turn: int) -> list[int]:
    """Calls or answers, whatever the tool has said: a policy of known probabilities."""
    drawn = random.Random(f"{key.scope}/{key.task}/{key.sample_index}/{turn}").random()
    return said('<tool_call>\n{"name": "Unsteady", "arguments": {}}\n</tool_call>' if drawn < CALLS else "#### 1")


def trained(tools: Any, rate: float, **settings: Any) -> dict[tuple[str, int], int]:
    """How many calls each conversation makes that did not fail, of 100 tasks with 4 siblings."""
    return {(t.task.id, t.sample_index): t.tool_calls for t in conversations(tools, rate, **settings)}


def conversations(
    tools: Any, rate: float = 0.0, faults: Faults | None = None, seed: int = 0, **settings: Any
) -> list[Trajectory]:
    """The conversations that did not fail, of 100 tasks with 4 siblings."""
    tools.rng.seed(7)
    environment = ToolUse(tools={f"{tools.path}:Unsteady": {"rate": rate}}, max_turns=MOST, **settings)

    async def run() -> list[Trajectory]:
        runner = make_runner(ScriptedEngine(script), environment)
        runner = dataclasses.replace(runner, faults=partial((faults or Faults()).during, seed))
        groups = [runner.run_group(Task(str(index), TASK.messages), 4) for index in range(100)]
        return [trajectory for group in await asyncio.gather(*groups) for trajectory in group.trajectories]

    return [trajectory for trajectory in in_jumping_time(run()) if trajectory.status is not Status.FAILED]


def test_what_is_trained_is_what_would_be_without_failures(tools: Any) -> None:
    """Every single conversation, while there are retries left; and afterwards, if the model is told."""
    never = trained(tools, 0.0)
    assert len(never) == 400 and set(never.values()) == set(range(MOST + 1))
    assert trained(tools, 0.05) == never
    assert trained(tools, 0.3, call_retries=12) == never
    assert trained(tools, 0.3, call_retries=0, on_outage=OnOutage.observe) == never


def test_conversations_played_anew_select_those_that_call_less(tools: Any) -> None:
    """As a formula has it, the policy's probabilities being known: with n calls, (1 - rate) ** n of them survive."""
    never, rate = trained(tools, 0.0), 0.3
    anew = trained(tools, rate, call_retries=0)
    share = [CALLS**n * (1 - CALLS if n < MOST else 1) for n in range(MOST + 1)]
    survive = [share[n] * (1 - rate) ** n for n in range(MOST + 1)]
    # a conversation may survive at once, or fail and survive when it is played anew: equally distributed
    expected = sum(n * survive[n] for n in range(MOST + 1)) / sum(survive)
    assert mean(never.values()) == pytest.approx(sum(n * share[n] for n in range(MOST + 1)), abs=0.2)
    assert mean(anew.values()) == pytest.approx(expected, abs=0.15)
    assert expected < 0.6 * mean(never.values())
    assert len(anew) < 380
    retried = trained(tools, rate)
    assert len(retried) == 400 and mean(retried.values()) > 0.98 * mean(never.values())


def test_retries_wait_twice_as_long_each_time(tools: Any) -> None:
    async def times(name: str, **settings: Any) -> tuple[list[float], Reply]:
        tools.asked.clear()
        environment = ToolUse(tools=[f"{tools.path}:{name}"], **settings)
        await environment.start(TASK)
        reply = await environment.step(Message("assistant", tool_calls=(ToolCall(name, {}),)))
        return list(tools.asked), reply

    asked, reply = in_jumping_time(times("times_out", call_retries=4, backoff_s=0.5, on_outage=OnOutage.observe))
    assert asked == pytest.approx([0, 0.5, 1.5, 3.5, 7.5])
    assert reply.outages == [f"the tool times_out failed: TimeoutError: the server ({tools.path}, line 19)"]
    assert (reply.tool_retries, reply.tool_timeouts, reply.tool_errors) == (4, 0, 0)
    asked, reply = in_jumping_time(times("Order", on_outage=OnOutage.observe))
    assert asked == [0]  # nothing is bought twice
    assert (reply.messages[0].content, reply.tool_retries) == ("error: the tool Order is out of order", 0)


def test_the_first_failure_of_a_tool_is_told_at_once(tools: Any, tmp_path: Path) -> None:
    """Long before an evaluation that waits for it has ended."""
    told: list[tuple[float, str]] = []

    async def call() -> None:
        def note(text: str) -> None:
            told.append((asyncio.get_running_loop().time(), text))

        environment = ToolUse(tools=[f"{tools.path}:times_out"], on_outage=OnOutage.observe)
        async with environment.open(RunContext(tmp_path, note, {})) as running:
            for _ in range(2):
                async with running.conversation(TASK) as (world, _):
                    await world.step(Message("assistant", tool_calls=(ToolCall("times_out", {}),)))

    in_jumping_time(call())
    why = f"TimeoutError: the server ({tools.path}, line 19)"
    assert told == [(0.0, f"the tool times_out failed; such calls are made again up to 4 times: {why}")]


@dataclass
class Busy(ToolUse):
    """The model's first two messages are taken for calls, whatever they say."""

    async def start(self, task: Task) -> Opening:
        self.turn = 0
        return await super().start(task)

    async def step(self, message: Message) -> Reply:
        self.turn += 1
        calls = (ToolCall("Unsteady", {}),) * (1 + len(message.content) % 3) if self.turn < 3 else ()
        return await super().step(Message("assistant", tool_calls=calls))


def test_failures_and_waiting_change_no_digit(tools: Any) -> None:
    """Neither of which conversations decode together nor of their random numbers."""

    def digits(rate: float) -> tuple[list[Any], int]:
        environment = Busy(tools={f"{tools.path}:Unsteady": {"rate": rate}}, call_retries=20)
        runner = make_runner(
            Local().start(ModelWeights(model()), True, 1024), environment, max_concurrent=5, max_new_tokens=6
        )
        runner.sampling.stop_ids = list(range(1024))  # half of all tokens end the turn

        async def run() -> list[Trajectory]:
            groups = [runner.run_group(Task(str(index), TASK.messages), 3) for index in range(4)]
            return [trajectory for group in await asyncio.gather(*groups) for trajectory in group.trajectories]

        found = in_jumping_time(run())
        return [(t.turns, t.status, t.reward) for t in found], sum(t.tool_retries for t in found)

    (never, none), (often, some) = digits(0.0), digits(0.3)
    assert (none, some > 5) == (0, True)
    assert often == never


def test_evaluation_has_the_same_rule(tools: Any) -> None:
    def measured(rate: float, **settings: Any) -> dict[str, float]:
        environment = ToolUse(tools={f"{tools.path}:Unsteady": {"rate": rate}}, max_turns=MOST, **settings)
        tasks = [Task(str(index), TASK.messages) for index in range(50)]
        return in_jumping_time(evaluate(make_runner(ScriptedEngine(script), environment), tasks, 4))

    never, often = measured(0.0), measured(0.3, call_retries=12)
    told = measured(0.3, call_retries=0, on_outage=OnOutage.observe)
    counts = ("eval/tool_retries", "eval/tool_outages")
    assert [never[name] for name in counts] == [0, 0]
    assert often["eval/tool_retries"] > 0.3 and often["eval/tool_outages"] == 0
    assert told["eval/tool_retries"] == 0 and told["eval/tool_outages"] > 0.2
    for name in never.keys() - counts:
        assert often[name] == told[name] == never[name]


def test_faults_on_purpose_change_nothing_that_is_trained(tools: Any) -> None:
    """One attempt in seven fails, hangs or answers nonsense: every conversation is the same, and none hangs."""
    never = trained(tools, 0.0)
    faults = Faults(error_rate=0.05, hang_rate=0.05, garbage_rate=0.05, latency_s=0.01)
    played = conversations(tools, faults=faults)
    assert {(t.task.id, t.sample_index): t.tool_calls for t in played} == never
    records = [record for t in played for record in t.calls]
    assert {record.outcome for record in records} <= {CallOutcome.answered, CallOutcome.timed_out}
    assert 0.1 < sum(record.retries for record in records) / len(records) < 0.25
    assert sum(record.outcome is CallOutcome.timed_out for record in records) < 0.01 * len(records)


def test_which_attempts_fail_is_a_function_of_the_seed(tools: Any) -> None:
    faults = Faults(error_rate=0.3)
    one, again, other = ([t.tool_retries for t in conversations(tools, faults=faults, seed=seed)] for seed in (0, 0, 1))
    assert one == again != other
    with pytest.raises(ConfigError, match="shares, together at most 1, got 1"):
        Faults(error_rate=0.6, hang_rate=0.6)


def gate(**limits: Any) -> Gate:
    return Gate(CallLimits(**limits))


def test_no_more_calls_of_a_tool_at_once_than_allowed() -> None:
    async def most_at_once(gate: Gate) -> int:
        running, most = 0, 0

        async def call() -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return ""

        await asyncio.gather(*(gate.attempt(call) for _ in range(20)))
        return most

    assert in_jumping_time(most_at_once(gate(max_concurrent_calls=3))) == 3
    assert in_jumping_time(most_at_once(gate())) == 20


def test_a_tool_that_keeps_failing_is_hardly_called() -> None:
    """Once 5 attempts have failed it is tried every 10 seconds, by one at a time, until it works again."""

    async def run() -> None:
        asked: list[float] = []
        error = OSError("down")
        broken, shared = True, gate(break_after=5, backoff_s=10)
        now = asyncio.get_running_loop().time

        async def call() -> str:
            asked.append(now())
            await asyncio.sleep(1)
            if broken:
                raise error
            return "here"

        async def attempts(count: int) -> list[str | BaseException]:
            return await asyncio.gather(*(shared.attempt(call) for _ in range(count)), return_exceptions=True)

        why = f"{type(error).__name__}: {error}"
        assert await attempts(5) == [error] * 5 and asked == [0] * 5
        assert {str(one) for one in await attempts(20)} == {f"the last 5 attempts failed, in the end by {why}"}
        await asyncio.sleep(10)
        first, *others = await attempts(20)
        assert (first, asked[5:]) == (error, [11])
        assert {str(one) for one in others} == {f"the last 6 attempts failed, in the end by {why}"}
        await asyncio.sleep(10)
        broken = False
        assert await attempts(20) == ["here"] * 20
        assert asked[6:] == [22] + [23] * 19  # one tries, the others follow

    in_jumping_time(run())


def test_calls_that_hang_say_nothing_of_a_tool() -> None:
    """They may hang by the model's arguments; between failures they do not end the row of those."""

    async def run() -> None:
        shared = gate(break_after=2)

        async def attempt(error: Exception) -> None:
            async def work() -> str:
                raise error

            await shared.attempt(work)

        for _ in range(5):
            with pytest.raises(CallTimeoutError):
                await attempt(CallTimeoutError("no answer within 1 s"))
        for error in (OSError("down"), CallTimeoutError("no answer within 1 s"), OSError("down")):
            with pytest.raises(type(error)):
                await attempt(error)
        why = "the last 2 attempts failed, in the end by OSError: down"
        with pytest.raises(RuntimeError, match=why):
            await attempt(OSError("down"))
        await asyncio.sleep(1)
        with pytest.raises(CallTimeoutError):
            await attempt(CallTimeoutError("no answer within 1 s"))
        with pytest.raises(RuntimeError, match=why):  # the next ones do not hang one after the other
            await attempt(OSError("down"))

    in_jumping_time(run())


def test_refusals_of_a_tool_are_no_failures() -> None:
    async def run() -> None:
        shared = gate(break_after=2)

        async def refuse() -> str:
            raise ToolError("not today")

        for _ in range(5):
            with pytest.raises(ToolError, match="not today"):
                await shared.attempt(refuse)

    in_jumping_time(run())


def test_single_tools_have_limits_of_their_own(tools: Any) -> None:
    limits = {"times_out": {"call_retries": 1, "backoff_s": 7}, "wordy": {"max_output_chars": 20}}

    async def run() -> None:
        environment = ToolUse(
            tools=[f"{tools.path}:times_out", f"{tools.path}:wordy"], limits=limits, on_outage=OnOutage.observe
        )
        await environment.start(TASK)
        calls = (ToolCall("times_out", {}), ToolCall("wordy", {}))
        reply = await environment.step(Message("assistant", tool_calls=calls))
        assert tools.asked == [0, 7]
        assert reply.messages[1].content == "abcdefghij\n[6 of 26 characters left out]\nqrstuvwxyz"

    tools.asked.clear()
    in_jumping_time(run())
    with pytest.raises(ConfigError, match=r"environment\.limits of Unsteady has no setting 'timeout_s'"):
        ToolUse(tools=[f"{tools.path}:Unsteady"], limits={"Unsteady": {"timeout_s": 5}})


def test_how_many_calls_of_a_tool_there_may_be_at_once() -> None:
    """A tool says itself how many there may be at once; settings lower it, and those of the tool alone replace it."""

    def at_once(**settings: Any) -> list[int]:
        environment = ToolUse(tools=["python", "calculator"], **settings)
        return [offer.gate.limits.max_concurrent_calls for offer in environment._offers.values()]  # pyright: ignore[reportPrivateUsage]

    processors = os.cpu_count() or 1
    assert at_once() == [processors, 0]
    assert at_once(max_concurrent_calls=1) == [1, 1]
    assert at_once(max_concurrent_calls=999) == [processors, 999]
    assert at_once(limits={"python": {"max_concurrent_calls": 99}}) == [99, 0]


def test_every_tool_is_described_by_itself() -> None:
    def trajectory(reward: float, *calls: CallRecord) -> Trajectory:
        return Trajectory(TASK, reward=reward, calls=calls)

    searches = [CallRecord("search", seconds=second / 10) for second in range(20)]
    failed = CallRecord("search", CallOutcome.timed_out, seconds=30)
    played = [
        trajectory(1, *searches),
        trajectory(0, failed, CallRecord("abacus", CallOutcome.unknown), CallRecord("", CallOutcome.refused)),
        trajectory(1, CallRecord("read")),
        trajectory(0),
    ]
    assert describe_tools(played, 1.0) == {
        "tool/hallucinated": 0.25,
        "tool/search/calls": 21 / 4,
        "tool/search/errors": 1 / 21,
        "perf/tool/search/p50_s": 1.0,
        "perf/tool/search/p95_s": 1.9,
        "tool/search/success_with": 0.5,
        "tool/search/success_without": 0.5,
        "tool/read/calls": 0.25,
        "tool/read/errors": 0.0,
        "perf/tool/read/p50_s": 0.0,
        "perf/tool/read/p95_s": 0.0,
        "tool/read/success_with": 1.0,
        "tool/read/success_without": 1 / 3,
    }
