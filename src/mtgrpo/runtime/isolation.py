"""Somebody's code, which must neither end nor stop the program: in a task, a thread or a process of its own.

Work that needs no such walls but takes the processor for long runs in `workers.py`, programs in `processes.py`.
"""

import asyncio
import contextlib
import contextvars
import inspect
import multiprocessing
import os
import resource
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from mtgrpo.errors import harmless
from mtgrpo.runtime.processes import die_with_parent

T = TypeVar("T")
GRACE_S = 1.0  # for what is cancelled to end by itself
MAX_ABANDONED_THREADS = 64  # that took too long and still run
LIMIT_S = 10  # of processor time, for somebody else's code that is tried first
LIMIT_BYTES = 2**30
OUT_OF_MEMORY = 1  # an exit code
DEATHS = (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)  # of the limits, and of what was computed
_abandoned: set[threading.Thread] = set()


async def run_isolated(
    work: Callable[[], T | Awaitable[T]],
    timeout_s: float | None = None,
    late: Exception | None = None,
    grace_s: float = GRACE_S,
) -> T:
    """What `work` gives, in a task of its own, so that a cancellation from within is told from one from outside.

    What it raises comes through if it is an Exception; SystemExit and the like, which would end the whole program,
    become RuntimeError, and so does its own cancellation. Raises `late` after `timeout_s` seconds; None = no limit.
    When it is given up it is cancelled, and ended by force where it has not ended `grace_s` seconds later.
    """

    async def guarded() -> T:
        try:
            result = work()
            return cast(T, await result if inspect.isawaitable(result) else result)
        except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise  # the last three come from outside, or are told apart below
        except BaseException as error:
            raise harmless(error) from error

    coroutine = guarded()
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio logs what nobody awaits
    try:
        # Unlike asyncio.timeout this takes what came in time while the event loop was busy.
        await asyncio.wait({task}, timeout=timeout_s)
        if late is not None and not task.done():
            raise late
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace_s)
        if not task.done():  # it has swallowed its cancellation
            with contextlib.suppress(RuntimeError):  # it may swallow this too, and is then left behind
                coroutine.close()
            task.cancel()
    if task.cancelled():
        raise RuntimeError("CancelledError")
    if isinstance(error := task.exception(), GeneratorExit):
        raise harmless(error)
    return task.result()


def count_abandoned_threads() -> int:
    """How many calls of tools still run in threads although nobody waits for them any more."""
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def run_in_thread(work: Callable[[], Any], bounded: bool = True) -> asyncio.Future[Any]:
    """Run `work` in a daemon thread of its own.

    Unlike in a pool, calls never queue behind others that hang, and a call that hangs cannot keep a program alive.
    Python cannot stop a thread: while `MAX_ABANDONED_THREADS` run on after a time-out, this raises RuntimeError where
    `bounded`, as somebody's code is and what the run itself needs is not.
    """
    if bounded and (count := count_abandoned_threads()) >= MAX_ABANDONED_THREADS:
        raise RuntimeError(f"{count} calls that took too long still run, each in a thread; no more are begun meanwhile")
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # from here on the asyncio side may give up without an error in the thread

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            # A StopIteration is refused by asyncio's futures, and whoever waits would wait for ever.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result.set_exception(error if plain else harmless(error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    awaited = asyncio.wrap_future(result)
    awaited.add_done_callback(lambda ended: _abandoned.add(thread) if ended.cancelled() else None)
    return awaited


def try_within_limits(work: Callable[[], object]) -> str:
    """How `work`, somebody else's code, fails in a process of its own that may use 10 s and 1 GiB more; "" = not."""
    code = run_forked(work, LIMIT_S, LIMIT_BYTES)
    late = f"took longer than {LIMIT_S} s"
    reasons = {0: "", OUT_OF_MEMORY: "took more memory than 1 GiB", -signal.SIGPROF: late, -signal.SIGKILL: late}
    return reasons.get(code, f"ended with {code}")


def run_forked(work: Callable[[], object], limit_s: float, limit_bytes: int) -> int:
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
    with contextlib.closing(process):
        return cast(int, process.exitcode)  # it has ended


def _limited(work: Callable[[], object], limit_s: float, limit_bytes: int) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # counted by the kernel: nothing in the process can keep it alive
    if (statm := Path("/proc/self/statm")).exists():  # Linux
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        code = work()
        os._exit(code if isinstance(code, int) else 0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # whoever asked meets it again
        os._exit(0)
