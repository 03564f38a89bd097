"""Threads of asyncio that are all busy with somebody else's call, which does not end."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager


@asynccontextmanager
async def busy_threads(timeout_s: float = 60.0) -> AsyncGenerator[None]:
    """What is done within must not wait for one of them: TimeoutError after `timeout_s`."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(ended.wait)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        finally:
            ended.set()
