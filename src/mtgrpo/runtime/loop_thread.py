"""An event loop in a thread of its own: it goes on while the loop of the run computes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines until it is closed."""

    def __init__(self, name: str) -> None:
        """name: of the thread."""
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
