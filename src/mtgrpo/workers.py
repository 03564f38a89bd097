"""Processes for work that takes the processor for long, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")
LIMIT_S = 10  # of processor time, for somebody else's code that is tried first
LIMIT_BYTES = 2**30
OUT_OF_MEMORY = 1  # an exit code
NICE = 10  # how far the processes give way to decoding and training, of 19


class Workers:
    """A pool of fresh processes, as many as there are processors; they start when they are first asked."""

    def __init__(self) -> None:
        self._pool = _new_pool()
        self._lone: ProcessPoolExecutor | None = None  # one process, for what was underway when another died
        self._turn = asyncio.Lock()  # of the lone process

    async def run(self, function: Callable[[A], R], argument: A) -> R:
        """`function(argument)`, found in one of the processes; all three must be picklable.

        Raises what it raises. Where a process dies, or is given up as this is cancelled, all that was underway is done
        again, where one dies then too each by itself; what dies by itself raises BrokenProcessPool.
        """
        for _ in range(2):
            pool = self._pool
            try:
                return await _found(pool, function, argument)
            except (BrokenProcessPool, asyncio.CancelledError) as error:
                if self._pool is pool:
                    self._pool = _new_pool()
                    _terminate(pool)  # it may hang for ever
                if isinstance(error, asyncio.CancelledError):
                    raise
        async with self._turn:
            lone = self._lone = self._lone or _new_pool(1)
            try:
                return await _found(lone, function, argument)
            except (BrokenProcessPool, asyncio.CancelledError):
                self._lone = None
                _end(lone)
                raise

    def stop(self) -> None:
        """End the processes, also those that still work."""
        _end(self._pool)
        if self._lone is not None:
            _end(self._lone)


@contextmanager
def open_workers() -> Generator[Workers]:
    """Workers that have ended afterwards."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.stop()


async def _found(pool: ProcessPoolExecutor, function: Callable[[A], R], argument: A) -> R:
    """Shielded: a pool whose processes are ended cannot tell a future that was cancelled, and its thread would fail."""
    future = asyncio.get_running_loop().run_in_executor(pool, function, argument)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio says that nobody asked
    return await asyncio.shield(future)


def _new_pool(count: int | None = None) -> ProcessPoolExecutor:
    """Of fresh processes; count: None = as many as there are processors."""
    context = multiprocessing.get_context("spawn")  # a fork would share the threads' locks, and the signal handlers
    return ProcessPoolExecutor(count, context, initializer=_begin, initargs=(NICE,))


def _begin(nice: int) -> None:
    """In each process: Ctrl-C is left to the one that started it, and the processor to what cannot wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):  # Unix
        os.nice(nice)


def _end(pool: ProcessPoolExecutor) -> None:
    _terminate(pool)
    pool.shutdown(cancel_futures=True)


def _terminate(pool: ProcessPoolExecutor) -> None:
    processes: dict[int, multiprocessing.Process] = getattr(pool, "_processes", None) or {}
    for process in list(processes.values()):
        process.terminate()


def fails_within_limits(work: Callable[[], object]) -> str:
    """How `work`, somebody else's code, fails in a process of its own that may use 10 s and 1 GiB more; "" = not."""
    found = exit_code(work, LIMIT_S, LIMIT_BYTES)
    if found in (0, OUT_OF_MEMORY):
        return "took more memory than 1 GiB" if found else ""
    return f"took longer than {LIMIT_S} s" if found in (-signal.SIGPROF, -signal.SIGKILL) else f"ended with {found}"


def exit_code(work: Callable[[], object], limit_s: float, limit_bytes: int) -> int:
    """The number that `work` gives in a fork of this process, 0 for anything else; below 0: a signal ended it.

    Beyond `limit_s` seconds of processor time SIGPROF does, beyond four times as long without an end SIGKILL. It may
    take `limit_bytes` more memory, else it is OUT_OF_MEMORY; where `work` raises anything else it is 0.
    """
    context = multiprocessing.get_context("fork")  # at once, and nothing has to be picklable; no thread is used there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process = context.Process(target=_limited, args=(work, limit_s, limit_bytes))
        process.start()
    process.join(4 * limit_s + 10)
    process.kill()
    process.join()
    found = process.exitcode
    process.close()
    assert found is not None, "it has ended"
    return found


def _limited(work: Callable[[], object], limit_s: float, limit_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # counted by the kernel: nothing in the process can keep it alive
    if (statm := Path("/proc/self/statm")).exists():  # Linux
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        found = work()
        os._exit(found if isinstance(found, int) else 0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # whoever asked meets it again
        os._exit(0)
