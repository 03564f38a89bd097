"""Hostile tools: the model gets an answer or an error within the limit, the conversation goes on or fails; no hang."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_mistakes import RAISED, hangs, swallows

from mtgrpo.environments import Reply
from mtgrpo.environments.tool_use import OnOutage, ToolUse
from mtgrpo.parts import extension
from mtgrpo.runtime import isolation
from mtgrpo.types import Message, ToolCall
from test_async import in_jumping_time
from test_conversation import TASK

OWN = '''
import threading

def mischief() -> str:
    """Do what the test wants."""
    return work()

async def asked() -> str:
    """Do what the test wants, and wait for it."""
    found = work()
    return await found if hasattr(found, "__await__") else found

mischief.blocking = False
release = threading.Event()

def stuck() -> str:
    """Hang in a thread."""
    release.wait()
    return "late"
'''


class Unspeakable:
    """Cannot be made a text."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __str__(self) -> str:
        if self.error is not None:
            raise self.error
        return 7  # type: ignore[return-value]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(OWN)
    module = extension.load_file(path)
    module.path = path
    yield module
    module.release.set()


def answered(own: Any, name: str, work: Callable[[], Any]) -> tuple[Reply, float]:
    """What one call is answered with, and after how many seconds."""
    own.work = work
    environment = ToolUse(tools=[f"{own.path}:{name}"], call_timeout_s=5, call_retries=0, on_outage=OnOutage.observe)

    async def run() -> tuple[Reply, float]:
        await environment.start(TASK)
        began = asyncio.get_running_loop().time()
        reply = await environment.step(Message("assistant", tool_calls=(ToolCall(name, {}),)))
        await environment.stop()
        return reply, asyncio.get_running_loop().time() - began

    return in_jumping_time(run())


@pytest.mark.parametrize("name", ["mischief", "asked"])
@pytest.mark.parametrize("work", RAISED.values(), ids=list(RAISED))
def test_a_tool_that_raises_is_out_of_order(name: str, work: Callable[[], Any], own: Any) -> None:
    reply, took = answered(own, name, work)
    assert reply.messages[0].content == f"error: the tool {name} is out of order"
    assert len(reply.outages) == 1 and took <= 1


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), asyncio.CancelledError(), None])
def test_an_answer_that_is_no_text_is_an_outage(error: BaseException | None, own: Any) -> None:
    reply, took = answered(own, "asked", lambda: Unspeakable(error))
    assert len(reply.outages) == 1 and took <= 1


@pytest.mark.parametrize(
    "given", [10**5000, functools.reduce(lambda inner, _: [inner], range(10_000), [])], ids=range(2)
)
def test_an_answer_that_is_too_large_or_too_deep_to_be_spelled_is_an_outage(given: Any, own: Any) -> None:
    reply, _ = answered(own, "mischief", lambda: given)
    assert len(reply.outages) == 1


def test_nothing_where_a_text_is_promised_is_an_outage(own: Any) -> None:
    (why,) = answered(own, "mischief", lambda: None)[0].outages
    assert "mischief gave None; give what the model reads" in why


@pytest.mark.parametrize(("given", "text"), [(b"x", "b'x'"), (3, "3"), ([], "[]"), ("\ud800", "\ud800"), ("", "")])
def test_other_answers_are_spelled(given: Any, text: str, own: Any) -> None:
    reply, _ = answered(own, "mischief", lambda: given)
    assert (reply.messages[0].content, reply.outages) == (text, [])


@pytest.mark.parametrize("work", [hangs, swallows])
def test_a_call_is_back_within_its_limit_and_a_second(work: Callable[[], Any], own: Any) -> None:
    reply, took = answered(own, "asked", work)
    assert reply.messages[0].content == "error: no answer within 5 s"
    assert (reply.tool_timeouts, reply.outages) == (1, [])
    assert took <= 6.01


async def test_threads_that_hang_are_counted_and_bounded(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "MAX_ABANDONED_THREADS", isolation.count_abandoned_threads() + 3)
    before = isolation.count_abandoned_threads()
    environment = ToolUse(tools=[f"{own.path}:stuck"], call_timeout_s=0.05, call_retries=0, on_outage=OnOutage.observe)
    await environment.start(TASK)
    call = Message("assistant", tool_calls=(ToolCall("stuck", {}),))
    said = [(await environment.step(call)).messages[0].content for _ in range(5)]
    assert said == ["error: no answer within 0.05 s"] * 3 + ["error: the tool stuck is out of order"] * 2
    assert isolation.count_abandoned_threads() == before + 3
    own.release.set()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(1)
    assert isolation.count_abandoned_threads() == before
    assert (await environment.step(call)).messages[0].content == "late"
