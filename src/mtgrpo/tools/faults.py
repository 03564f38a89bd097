"""Failures on purpose, of every tool: for tests, and for a policy that is to live with tools that fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from mtgrpo.errors import ConfigError, require

Attempt = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


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
            raise ConfigError(
                f"`error_rate`, `hang_rate` and `garbage_rate` are shares, together at most 1, got {total}"
            )

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
