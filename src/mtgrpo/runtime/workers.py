"""Processes for work that takes the processor for long, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from functools import partial
from typing import TypeVar

from mtgrpo.runtime.processes import die_with_parent
from mtgrpo.runtime.resources import SLEEP, WAITING_SET

A = TypeVar("A")
R = TypeVar("R")
NICE = 10  # how far the processes give way to decoding and training, of 19


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
        self._new = partial(ProcessPoolExecutor, count, context, initializer=_begin, initargs=(NICE,))
        self._executor = self._new()

    async def run(self, function: Callable[[A], R], argument: A) -> R:
        executor = self._executor
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


def open_workers() -> closing[Workers]:
    """Workers, as a context after which they have ended."""
    return closing(Workers())


def _begin(nice: int) -> None:
    """In each process: Ctrl-C is left to the one that started it, and the processor to what cannot wait."""
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
