"""A run in which nothing moves any more says where everything waits, and ends as SIGTERM would end it."""

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from mtgrpo.engines import Key, RunningEngine
from mtgrpo.types import Completion, Sample, Sampling

CLOSING_S = 120.0  # at least, for a run to save and end by itself; one whose event loop is blocked never would


class Watchdog:
    """Knows when something moved last: a turn was sampled, or a micro-batch trained."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()

    def moved(self) -> None:
        """Something has moved."""
        self.moved_s = time.monotonic()

    def sampling(
        self, conversation: Callable[[Key], AbstractAsyncContextManager[Sample]]
    ) -> Callable[[Key], AbstractAsyncContextManager[Sample]]:
        """The same conversations of an engine, whose turns count."""

        @asynccontextmanager
        async def watched(key: Key) -> AsyncGenerator[Sample]:
            async with conversation(key) as sample:

                async def sample_turn(tokens: Sequence[int], sampling: Sampling) -> Completion:
                    completion = await sample(tokens, sampling)
                    self.moved()
                    return completion

                yield sample_turn

        return watched


@contextmanager
def open_watchdog(
    limit_s: float, folder: Path, engine: RunningEngine, places: Callable[[], Sequence[str]] = tuple
) -> Generator[Watchdog]:
    """A watchdog that looks on from a thread of its own until the run has ended; limit_s: 0 = it does nothing.

    After `limit_s` seconds in which nothing moves it writes `watchdog.txt` into the run's folder, says so, and sends
    SIGTERM. Where that has not ended the run after as long again, at least `CLOSING_S`, it ends the process. places:
    where each of several ranks stands.
    """
    watchdog, over, loop = Watchdog(), threading.Event(), asyncio.get_running_loop()

    def watch() -> None:
        wait_s, path = min(5.0, limit_s / 4), folder / "watchdog.txt"
        while time.monotonic() - watchdog.moved_s <= limit_s:
            looked_s = time.monotonic()
            if over.wait(wait_s):
                return
            if time.monotonic() - looked_s > 2 * wait_s + 1:  # the whole process was suspended
                watchdog.moved()
        said = f"mtgrpo: nothing has moved for {limit_s:g} seconds (watchdog_s); what everything waits for is in {path}"
        with suppress(Exception):  # the disk may be full
            write_state(path, loop, engine, places())
        with suppress(Exception):  # the terminal may be gone
            print("; ".join([said, *places(), "the run ends"]), file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(max(CLOSING_S, limit_s)):
            print("mtgrpo: the run does not end by itself: the process does", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    if limit_s:
        thread.start()
    try:
        yield watchdog
    finally:
        over.set()
        if limit_s:
            thread.join()


def write_state(path: Path, loop: asyncio.AbstractEventLoop, engine: RunningEngine, places: Sequence[str] = ()) -> None:
    """Write down where every thread and every coroutine is, and what the engine was asked for; `places`: of ranks."""
    with path.open("w", encoding="utf-8") as file:
        requests = engine.requests
        file.write(f"# requests to the engine: {len(requests)}\n\n")
        file.writelines(f"{request}\n" for request in requests)
        file.writelines(f"\n{place}\n" for place in places)
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        file.write(f"\n# coroutines: {len(tasks)}\n")
        for task in tasks:
            file.write(f"\n{task.get_name()}\n")
            file.writelines(f"    {place}\n" for place in _places(task.get_coro()))
        file.write("\n# threads\n\n")
        file.flush()
        faulthandler.dump_traceback(file)


def _places(coroutine: Any) -> Iterator[str]:
    """Where a suspended coroutine is, from the outermost call to what it waits for."""
    while coroutine is not None:
        for kind in ("cr", "gi", "ag"):
            if frame := getattr(coroutine, f"{kind}_frame", None):
                yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        waits = (getattr(coroutine, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        coroutine = next((inner for inner in waits if inner is not None), None)
