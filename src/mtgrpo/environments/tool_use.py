"""A conversation with tools: it goes on as long as the model calls them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from mtgrpo import tools
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError, require
from mtgrpo.part import RunContext
from mtgrpo.tools import CallTimeoutError, Tool, ToolError
from mtgrpo.tools.schema import ArgumentCheck
from mtgrpo.types import Message, Task, ToolCall, ToolSpec


class OnOutage(Enum):
    """What becomes of a conversation whose tool stays out of order."""

    fail = "fail"  # it is run again (`rollout.retries`), then left out: conversations that call less are trained more
    observe = "observe"  # the model is told and goes on: conversations that call are rewarded less


class OutageError(RuntimeError):
    """A tool stays out of order."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """One of the tools that the model may call."""

    option: str  # that it comes from
    spec: ToolSpec
    check: ArgumentCheck


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one call led to."""

    text: str
    mistake: bool = False  # of the model
    timed_out: bool = False
    retries: int = 0
    outage: Exception | None = None


@dataclass
class ToolUse(Environment):
    """The model may call `tools`, several at once; a message without a call ends the conversation.

    A call that cannot be made (unreadable, unknown tool, wrong arguments, refused by the tool) or takes longer than
    `call_timeout_s` is answered with "error: <why>". A call that fails through the tool is made again, after
    `backoff_s` and then twice as long each time, unless the tool says that its calls are not `idempotent`. Without
    tools there are no calls to count, and the answer to what looks like one comes from the user.
    """

    tools: Any = None  # [calculator, path/to/file.py:search], or with settings {calculator: {max_digits: 20}}
    call_timeout_s: float = 30.0  # of one attempt at a call; then the model is told that there was no answer
    call_retries: int = 4  # further attempts at a call that failed through no fault of the model
    backoff_s: float = 1.0  # before the first further attempt; twice as long before each one after it
    on_outage: OnOutage = OnOutage.fail  # after the last attempt: the conversation fails, or the model is told

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, call_timeout_s="> 0", call_retries=">= 0", backoff_s=">= 0")
        self._use(tools.load(self.tools or []))

    def _use(self, loaded: dict[str, Tool]) -> None:
        """The tools, by their options' names. Raises ConfigError where the model could not tell two apart."""
        self._loaded = self._tools = loaded
        self._started: list[str] = []
        self._offers: dict[str, _Offer] = {}
        for option, tool in loaded.items():
            for spec in tool.specs():
                if spec.name in self._offers:
                    raise ConfigError(f"two tools are named {spec.name!r}: the model could not tell them apart")
                closed = type(tool).specs is Tool.specs  # made from a signature, which takes no other arguments
                self._offers[spec.name] = _Offer(option, spec, ArgumentCheck(spec, closed))

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(offer.spec for offer in self._offers.values())

    @property
    def replayable(self) -> bool:
        return all(tool.idempotent for tool in self._loaded.values())

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its tools open."""
        async with AsyncExitStack() as stack:
            running = copy.copy(self)
            running._use(
                {name: await stack.enter_async_context(tool.open(context)) for name, tool in self._loaded.items()}
            )
            yield running

    async def start(self, task: Task) -> Opening:
        # A conversation has tools of its own, so that one with state shares none of it with another conversation.
        self._tools, self._started = {name: copy.copy(tool) for name, tool in self._loaded.items()}, []
        for name, tool in self._tools.items():
            self._started.append(name)
            await tool.start(task)
        return Opening(task.messages, self.tool_specs)

    async def stop(self) -> None:
        async with AsyncExitStack() as stack:
            for name in self._started:
                stack.push_async_callback(self._tools[name].stop)

    async def step(self, message: Message) -> Reply:
        if not message.error and not message.tool_calls:
            return Reply(done=True)
        if not self._offers:  # then a chat template may have no role "tool"
            return Reply((Message("user", f"error: {message.error or 'there are no tools'}"),))
        if message.error:
            return Reply((Message("tool", f"error: {message.error}"),), tool_calls=1, tool_errors=1)
        # Every call is waited for, also after one has failed: nothing of this conversation runs on behind its back.
        answers = await asyncio.gather(*map(self._answer, message.tool_calls))
        answered = list(zip(message.tool_calls, answers, strict=True))
        failed = [(call.name, answer.outage) for call, answer in answered if answer.outage is not None]
        outages = [f"the tool {name} failed: {type(error).__name__}: {error}" for name, error in failed]
        if outages and self.on_outage is OnOutage.fail:
            raise OutageError(outages[0]) from failed[0][1]
        return Reply(
            tuple(Message("tool", answer.text, name=call.name) for call, answer in answered),
            tool_calls=len(answers),
            tool_errors=sum(answer.mistake for answer in answers),
            tool_timeouts=sum(answer.timed_out for answer in answers),
            tool_retries=sum(answer.retries for answer in answers),
            outages=tuple(outages),
        )

    async def _answer(self, call: ToolCall) -> _Answer:
        """Make a call, and again where the tool fails."""
        offer = self._offers.get(call.name)
        if offer is None:
            return _Answer(f"error: there is no tool {call.name!r}; the tools are: {', '.join(self._offers)}", True)
        try:
            offer.check(call.arguments)
        except ToolError as error:
            return _Answer(f"error: {error}", mistake=True)
        tool, retries = self._tools[offer.option], 0
        most = self.call_retries if tool.idempotent else 0
        while True:
            try:
                said = await tools.call(tool, call.name, call.arguments, self.call_timeout_s)
                return _Answer(said, retries=retries)
            except ToolError as error:
                timed_out = isinstance(error, CallTimeoutError)
                if timed_out:  # what still runs in a thread keeps the state of this object to itself
                    self._tools[offer.option] = copy.copy(tool)
                return _Answer(f"error: {error}", mistake=True, timed_out=timed_out, retries=retries)
            except Exception as error:
                if retries == most:
                    why = f"error: the tool {call.name} is out of order"
                    return _Answer(why, retries=retries, outage=error)
            await asyncio.sleep(self.backoff_s * 2**retries)
            retries += 1
