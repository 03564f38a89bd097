"""Several coroutines at once, and an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, in their order. An error or a cancellation comes through once all the others have ended too."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class LoopThread:
    """Runs coroutines until it is closed, also while the loop of the run computes. `name` is that of its thread."""

    def __init__(self, name: str) -> None:
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """What `work` returns or raises, for the loop that calls this; it is cancelled with this."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def answers(self, timeout_s: float) -> bool:
        """Whether it does anything within this time."""
        sign = self.submit(asyncio.sleep(0, True))
        with suppress(TimeoutError):
            return await asyncio.wait_for(sign, timeout_s)
        return False

    async def close(self, timeout_s: float) -> None:
        """Cancel what runs in it, and end its thread unless something blocks it for longer."""
        self._loop.call_soon_threadsafe(self._ended.set)
        ends = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < ends:
            await asyncio.sleep(0.01)
