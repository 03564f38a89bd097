"""How calls of tools are made: within limits, again where a tool fails, and hardly at all while it is out of order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass

from mtgrpo.errors import PolicyError, require
from mtgrpo.parts.extension import explained
from mtgrpo.tools import CallTimeoutError

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
        async with AsyncExitStack() as stack:
            if self._broken:
                await stack.enter_async_context(self._trial)
                if not self._broken:
                    await stack.aclose()
                elif asyncio.get_running_loop().time() < self._untried_until:
                    raise RuntimeError(f"the last {self._failed} attempts failed, in the end by {self._why}")
            await stack.enter_async_context(self._slots)
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
