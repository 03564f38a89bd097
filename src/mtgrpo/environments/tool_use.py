"""A conversation with tools: it goes on as long as the model calls them."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mtgrpo import tools
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.tools import CallTimeoutError, Tool, ToolError
from mtgrpo.types import Message, Task, ToolCall, ToolSpec


class OnOutage(Enum):
    """What becomes of a conversation whose tool stays out of order."""

    fail = "fail"  # it is run again (`rollout.retries`), then left out: conversations that call less are trained more
    observe = "observe"  # the model is told and goes on: conversations that call are rewarded less


class OutageError(RuntimeError):
    """A tool stays out of order."""


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
        if self.call_timeout_s <= 0:
            raise ConfigError(f"environment.call_timeout_s must be above 0 seconds, got {self.call_timeout_s}")
        if self.call_retries < 0 or self.backoff_s < 0:
            raise ConfigError(
                "environment.call_retries and environment.backoff_s must be >= 0, "
                f"got {self.call_retries} and {self.backoff_s}"
            )
        self._loaded = tools.load(self.tools or [])
        self._specs = {name: tools.spec(name, tool) for name, tool in self._loaded.items()}
        self._tools = self._loaded

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._specs.values())

    async def start(self, task: Task) -> Opening:
        # A conversation has tools of its own, so that one with state shares none of it with another conversation.
        self._tools = {name: copy.copy(tool) for name, tool in self._loaded.items()}
        for tool in self._tools.values():
            if isinstance(tool, Tool):
                tool.begin(task)
        return Opening(task.messages, self.tool_specs)

    async def step(self, message: Message) -> Reply:
        if not message.error and not message.tool_calls:
            return Reply(done=True)
        if not self._tools:  # then a chat template may have no role "tool"
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
        if call.name not in self._tools:
            return _Answer(f"error: there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}", True)
        tool, retries = self._tools[call.name], 0
        most = self.call_retries if getattr(tool, "idempotent", True) else 0
        while True:
            try:
                tools.check_arguments(self._specs[call.name], call.arguments)
                return _Answer(await tools.call(tool, call.arguments, self.call_timeout_s), retries=retries)
            except ToolError as error:
                timed_out = isinstance(error, CallTimeoutError)
                if timed_out:  # what still runs in a thread keeps the state of this object to itself
                    self._tools[call.name] = copy.copy(tool)
                return _Answer(f"error: {error}", mistake=True, timed_out=timed_out, retries=retries)
            except Exception as error:
                if retries == most:
                    why = f"error: the tool {call.name} is out of order"
                    return _Answer(why, retries=retries, outage=error)
            await asyncio.sleep(self.backoff_s * 2**retries)
            retries += 1
