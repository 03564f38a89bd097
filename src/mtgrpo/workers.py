"""Processes for work that takes the processor for long, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Workers:
    """A pool of fresh processes, as many as there are processors; they start when they are first asked."""

    def __init__(self) -> None:
        self._pool = _new_pool()

    async def run(self, function: Callable[[A], R], argument: A) -> R:
        """`function(argument)`, found in one of the processes; all three must be picklable.

        Raises what it raises, and BrokenProcessPool where its process dies: then others take over.
        """
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, argument)
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = _new_pool()
            raise

    def stop(self) -> None:
        """End the processes, also those that still work."""
        workers: dict[int, multiprocessing.Process] = getattr(self._pool, "_processes", None) or {}
        for worker in list(workers.values()):
            worker.terminate()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def open_workers() -> Generator[Workers]:
    """Workers that have ended afterwards."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.stop()


def _new_pool() -> ProcessPoolExecutor:
    """Its processes leave Ctrl-C to the one that started them."""
    context = multiprocessing.get_context("spawn")  # a fork would share the threads' locks, and the signal handlers
    return ProcessPoolExecutor(mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
