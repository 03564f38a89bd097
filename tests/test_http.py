"""The client of HTTP: JSON in and out, errors that say what was answered, time limits, and how many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from mtgrpo.runtime.http import HttpClient, HttpError


class Waiting:
    """Counts the requests that it holds at once."""

    def __init__(self) -> None:
        self.held, self.most = 0, 0

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/echo":
            return web.Response(body=await request.read())  # of no type
        if request.path != "/wait":
            return web.Response(status=418, text="short and stout " * 100)
        self.held += 1
        self.most = max(self.most, self.held)
        await asyncio.sleep(0.05)
        self.held -= 1
        return web.Response(text="no JSON")


@asynccontextmanager
async def served(path: Path) -> AsyncGenerator[Waiting]:
    server = Waiting()
    runner = web.ServerRunner(web.Server(server))
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield server
    finally:
        await runner.cleanup()


async def test_json_goes_and_comes_whatever_its_type(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    async with served(socket), HttpClient("http://x/", socket=socket) as client:
        assert await client.request("POST", "/echo", {"a": ["\ud800", float("nan")]}) == {"a": ["\ud800", None]}
        assert await client.request("GET", "/wait") is None


async def test_an_error_says_the_address_the_status_and_the_beginning_of_the_answer(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    async with served(socket), HttpClient("http://x", socket=socket) as client:
        with pytest.raises(HttpError, match=r"^http://x/tea answered with 418: short and stout") as refused:
            await client.request("GET", "/tea")
        assert (refused.value.status, len(refused.value.body), len(str(refused.value)) < 600) == (418, 1600, True)
        with pytest.raises(HttpError, match="http://x/wait does not answer: TimeoutError") as late:
            await client.request("GET", "/wait", timeout_s=0.01)
        assert late.value.status == 0
    async with HttpClient("http://x", socket=tmp_path / "none") as client:
        with pytest.raises(HttpError, match="http://x/ does not answer: UnixClientConnectorError"):
            await client.request("GET", "/")
    async with HttpClient("nowhere") as client:
        with pytest.raises(HttpError, match="does not answer: "):
            await client.request("GET", "/")


async def test_waiting_for_ones_turn_takes_none_of_the_time(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    async with served(socket) as server, HttpClient("http://x", max_concurrent=2, socket=socket) as client:
        await asyncio.gather(*(client.request("GET", "/wait", timeout_s=0.2) for _ in range(12)))
    assert server.most == 2
