"""How calls of tools are made: within limits, hardly at all while a tool is out of order, and to fail on purpose."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from mtgrpo.errors import ConfigError, PolicyError, require
from mtgrpo.parts.extension import awaited, explained
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.tools import CallTimeoutError, Tool

Attempt = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
_UNREADABLE = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufffd]")


@dataclass
class CallLimits:
    """What a call of a tool may take, and what is done about failures. Every tool by itself is counted and limited."""

    call_timeout_s: float = 30.0  # of one attempt at a call; then the model is told that there was no answer
    call_retries: int = 4  # further attempts at a call that failed through no fault of the model
    backoff_s: float = 1.0  # before the first further attempt; twice as long before each one after it
    max_concurrent_calls: int = 0  # of one tool at once, over all conversations; the others wait; 0 = as the tool says
    break_after: int = 20  # failures in a row, no time-outs; then an attempt every `backoff_s` seconds; 0 = never
    max_output_chars: int = 0  # of an answer, head and tail; 0 = what environment.max_tool_tokens allows

    def __post_init__(self) -> None:
        require(self, call_timeout_s="> 0", call_retries=">= 0", backoff_s=">= 0")
        require(self, max_concurrent_calls=">= 0 (0 = any number)", break_after=">= 0 (0 = never)")
        require(self, max_output_chars=">= 0 (0 = what environment.max_tool_tokens allows)")


def readable(answer: str) -> bool:
    """Whether it is text, as far as its characters tell."""
    return not _UNREADABLE.search(answer)


class Gate:
    """What the attempts at calls of one tool share during a run: how many there are, and whether they fail."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self._slots = asyncio.Semaphore(limits.max_concurrent_calls) if limits.max_concurrent_calls else nullcontext()
        self._trial = asyncio.Lock()
        self._failed, self._why = 0, ""  # attempts in a row, and the reason of the last
        self._untried_until = 0.0  # in the time of the event loop

    @property
    def _broken(self) -> bool:
        return 0 < self.limits.break_after <= self._failed

    async def attempt(self, work: Callable[[], Awaitable[str]]) -> str:
        """What `work` gives or raises. RuntimeError, without a call, while the tool is out of order.

        One attempt at a time then tries whether it works again; what that finds holds for those that wait.
        """
        if self._broken:
            async with self._trial:
                if self._broken and asyncio.get_running_loop().time() < self._untried_until:
                    raise RuntimeError(f"the last {self._failed} attempts failed, in the end by {self._why}")
                if self._broken:
                    return await self._attempt(work)
        return await self._attempt(work)

    async def _attempt(self, work: Callable[[], Awaitable[str]]) -> str:
        async with self._slots:
            try:
                answer = await work()
            except Exception as error:
                if not isinstance(error, CallTimeoutError):  # which may be the doing of the model's arguments
                    failed = not isinstance(error, PolicyError)
                    self._failed, self._why = self._failed + 1 if failed else 0, explained(error)
                self._untried_until = asyncio.get_running_loop().time() + self.limits.backoff_s
                raise
            self._failed = 0
            return answer


@dataclass
class Faults:
    """What share of the attempts at calls of tools fails on purpose; which of them depends on the seed alone."""

    error_rate: float = 0.0  # of attempts that raise an error
    hang_rate: float = 0.0  # of attempts that never end
    garbage_rate: float = 0.0  # of attempts that answer what is no text
    latency_s: float = 0.0  # before every attempt

    def __post_init__(self) -> None:
        require(self, error_rate=">= 0", hang_rate=">= 0", garbage_rate=">= 0", latency_s=">= 0")
        if (total := self.error_rate + self.hang_rate + self.garbage_rate) > 1:
            names = "`error_rate`, `hang_rate` and `garbage_rate`"
            raise ConfigError(f"{names} are shares, together at most 1, got {total}")

    @contextmanager
    def during(self, *key: object) -> Generator[None]:
        """In the conversation that begins here; `key` tells it from all others."""
        attempts = (partial(self._attempt, random.Random(repr((key, number)))) for number in count(1))
        token = _attempts.set(attempts)
        try:
            yield
        finally:
            _attempts.reset(token)

    async def _attempt(self, draw: random.Random, work: Callable[[], Awaitable[Any]]) -> Any:
        drawn = draw.random()
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if drawn < self.error_rate:
            raise ConnectionError("a fault on purpose (faults.error_rate)")
        if (drawn := drawn - self.error_rate) < self.hang_rate:
            await asyncio.Event().wait()
        if drawn - self.hang_rate < self.garbage_rate:
            return draw.randbytes(40).decode("latin-1") + "\0"
        return await work()


_attempts: ContextVar[Iterator[Attempt]] = ContextVar("_attempts")  # of each call of a conversation


def next_call() -> Attempt | None:
    """What makes the attempts at the next call of this conversation, and lets some of them fail; None outside one."""
    return next(_attempts.get(iter(())), None)


async def call_tool(
    tool: Tool, name: str, arguments: Mapping[str, Any], timeout_s: float, fault: Attempt | None = None
) -> str:
    """What the tool answers to checked arguments, as a string. Raises CallTimeoutError, and what the tool raises.

    A blocking tool goes on, unheard, after a time-out. fault: makes the attempt, or lets it fail on purpose.
    """

    async def answer() -> str:
        work = partial(awaited, tool.call, name, arguments)
        return str(await (fault(work) if fault else work()))

    return await run_isolated(answer, timeout_s, CallTimeoutError(f"no answer within {timeout_s:g} s"))
