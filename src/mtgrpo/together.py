"""Several things at once, none of which is left running; and somebody's code, which must not end the program."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from mtgrpo.errors import harmless

T = TypeVar("T")
GRACE_S = 1.0  # for what is cancelled to end by itself


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, in their order. An error or a cancellation comes through once all the others have ended too."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def by_itself(
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

    async def found() -> T:
        try:
            given = work()
            return cast(T, await given if inspect.isawaitable(given) else given)
        except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise  # the last three come from outside, or are told apart below
        except BaseException as error:
            raise harmless(error) from error

    coroutine = found()
    task = asyncio.create_task(coroutine)
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
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            task.cancel()
    if task.cancelled():
        raise RuntimeError("CancelledError")
    if isinstance(error := task.exception(), GeneratorExit):
        raise harmless(error)
    return task.result()
