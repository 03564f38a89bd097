"""Work beside an event loop: coroutines together, a loop in a thread, processes for what takes the processor."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from mtgrpo.runtime.processes import die_with_parent
from mtgrpo.runtime.resources import SLEEP, WAITING_SET

A = TypeVar("A")
R = TypeVar("R")
_SAFE = "PYTHONSAFEPATH"
NICE = 10  # how far the processes give way to decoding and training, of 19


async def together(work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
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

    def submit(self, work: Coroutine[Any, Any, R]) -> asyncio.Future[R]:
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


class Workers:
    """A pool of fresh processes, as many as there are processors; they start when they are first asked."""

    def __init__(self) -> None:
        self._shared, self._lone = _Pool(None), _Pool(1)  # the latter for what was underway when another died
        self._turn = asyncio.Lock()  # of the lone process

    async def run(self, function: Callable[[A], R], argument: A) -> R:
        """What `function(argument)` gives or raises in one of the processes; all three must be picklable.

        Where a process dies, or is given up as this is cancelled, all that was underway is done again, where one dies
        then too each by itself; what dies by itself raises BrokenProcessPool.
        """
        for _ in range(2):
            with suppress(BrokenProcessPool):
                return await self._shared.run(function, argument)
        async with self._turn:
            return await self._lone.run(function, argument)

    def close(self) -> None:
        """End the processes, also those that still work."""
        self._shared.close()
        self._lone.close()


class _Pool:
    """Fresh processes, `count` or as many as there are processors; others after one of them has died or hangs."""

    def __init__(self, count: int | None) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the threads' locks, and signal handlers
        begin = (NICE, os.environ.get(_SAFE))
        self._new = partial(ProcessPoolExecutor, count, context, initializer=_begin, initargs=begin)
        with _safe_path():
            self._executor = self._new()

    async def run(self, function: Callable[[A], R], argument: A) -> R:
        executor = self._executor
        with _safe_path():
            future = asyncio.get_running_loop().run_in_executor(executor, function, argument)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio says nobody asked
        try:
            # Shielded: a pool whose processes are ended cannot tell a future that was cancelled; its thread would fail.
            return await asyncio.shield(future)
        except (BrokenProcessPool, asyncio.CancelledError):
            if self._executor is executor:
                self._executor = self._new()
                _terminate(executor)  # it may hang for ever
            raise

    def close(self) -> None:
        _terminate(self._executor)
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def _safe_path() -> Generator[None]:
    """Python that is started within imports nothing of the working folder, in which somebody else's files may be."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        _set_safe(before)


def _set_safe(value: str | None) -> None:
    os.environ.pop(_SAFE, None)
    if value is not None:
        os.environ[_SAFE] = value


def _begin(nice: int, safe: str | None) -> None:
    """In each process: Ctrl-C is left to the one that started it, and the processor to what cannot wait."""
    _set_safe(safe)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not os.environ.keys() & WAITING_SET:  # OpenMP's threads, where a reward imports what has them
        os.environ |= SLEEP
    if hasattr(os, "nice"):  # Unix
        os.nice(nice)


def _terminate(pool: ProcessPoolExecutor) -> None:
    processes: dict[int, multiprocessing.Process] = getattr(pool, "_processes", None) or {}
    for process in list(processes.values()):
        process.terminate()
