"""Tools of MCP servers: real processes and sockets, some of which die, hang and talk nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.environments.tool_use import OnOutage, OutageError, ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.runtime.processes import LOG_BYTES
from mtgrpo.types import Message, ToolCall
from test_conversation import TASK

pytest.importorskip("mcp", reason="the package mcp is not installed")
pytestmark = pytest.mark.real

STUBBORN = Path(__file__).with_name("stubborn_server.py")


def server(mark: Path, **settings: Any) -> dict[str, Any]:
    """Settings of the stubborn server; `mark` tells its processes from those of other tests."""
    return {"command": ["python", str(STUBBORN), str(mark)], "prefix": "", **settings}


def processes(mark: Path) -> list[int]:
    """The processes that were started with `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(mark).encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@asynccontextmanager
async def opened(folder: Path, servers: dict[str, Any], **settings: Any) -> AsyncGenerator[ToolUse]:
    """The environment while a run lasts; every process of it has ended afterwards."""
    secrets = {**os.environ, "MY_KEY": "sesame"}
    environment = ToolUse(tools={"mcp": {"servers": servers}}, **{"backoff_s": 0.01, **settings})
    async with environment.open(RunContext(folder, print, secrets)) as running:
        yield running
    assert processes(folder) == []


@asynccontextmanager
async def talking(folder: Path, servers: dict[str, Any], **settings: Any) -> AsyncGenerator[ToolUse]:
    """One conversation of such a run."""
    async with opened(folder, servers, **settings) as environment, environment.conversation(TASK) as (playing, _):
        yield playing


async def said(environment: Any, tool: str, **arguments: Any) -> str:
    """What the model is answered to one call."""
    reply = await environment.step(Message("assistant", tool_calls=(ToolCall(tool, arguments),)))
    return reply.messages[0].content


async def test_tools_are_offered_with_their_schemas_and_answer(tmp_path: Path) -> None:
    servers = {"a": server(tmp_path, tools=["echo", "fail"], prefix=None), "b": server(tmp_path, variables=["MY_KEY"])}
    async with opened(tmp_path, servers) as environment, environment.conversation(TASK) as (playing, opening):
        specs = {spec.name: spec for spec in opening.tools}
        assert {"a_echo", "a_fail", "echo", "secret"} <= specs.keys() and "a_secret" not in specs
        assert specs["a_echo"].parameters["properties"] == {"text": {"type": "string"}}
        assert await said(playing, "a_echo", text="hällo") == "hällo"
        assert await said(playing, "a_echo") == "error: missing argument 'text'"
        assert await said(playing, "a_fail", text="fish") == "error: no fish today"
        assert await said(playing, "refuse") == "error: not with these arguments"
        assert await said(playing, "picture") == "[image]"
        assert [await said(playing, "secret", text=name) for name in ("MY_KEY", "MTGRPO_DATA")] == ["sesame", "unset"]
        with pytest.raises(OutageError, match="the tool broken failed: MCPError: the database is gone"):
            await said(playing, "broken")
        assert await said(playing, "echo", text="still here") == "still here"
        assert "ready" in (tmp_path / "mcp_a.log").read_text()


async def test_stateless_servers_are_shared_and_start_once(tmp_path: Path) -> None:
    async with opened(tmp_path, {"a": server(tmp_path)}) as environment:

        async def talk() -> int:
            async with environment.conversation(TASK) as (playing, _):
                return int(await said(playing, "count"))

        assert sorted(await asyncio.gather(*(talk() for _ in range(100)))) == list(range(1, 101))
        assert len(processes(tmp_path)) == 1


async def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(
        "import runpy, subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]\n"
        "subprocess.Popen(sleep, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\n"
        f"runpy.run_path({str(STUBBORN)!r}, run_name='__main__')"
    )
    settings = {**server(tmp_path), "command": ["python", str(program), str(tmp_path)]}
    async with talking(tmp_path, {"a": settings}) as one:
        assert await said(one, "echo", text="x") == "x"
        assert len(processes(tmp_path)) == 2


async def test_a_server_that_dies_is_started_anew_and_the_call_made_again(tmp_path: Path) -> None:
    async with talking(tmp_path, {"a": server(tmp_path)}, on_outage=OnOutage.observe, call_retries=2) as playing:
        assert await said(playing, "count") == "1"
        os.kill(processes(tmp_path)[0], signal.SIGKILL)
        reply = await playing.step(Message("assistant", tool_calls=(ToolCall("count", {}), ToolCall("count", {}))))
        assert sorted(message.content for message in reply.messages) == ["1", "2"]
        assert reply.tool_retries >= 1 and not reply.outages
        assert await said(playing, "die") == "error: the tool die is out of order"
        assert await said(playing, "garbage") == ""
        assert await said(playing, "echo", text="again") == "again"


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_server_that_hangs_is_started_anew(tmp_path: Path, frozen: bool) -> None:
    """By its own call, or because its process stands still."""
    async with talking(tmp_path, {"a": server(tmp_path)}, call_timeout_s=0.5, call_retries=1) as playing:
        assert await said(playing, "count") == "1"
        (first,) = processes(tmp_path)
        if frozen:
            os.kill(first, signal.SIGSTOP)
        else:
            assert await said(playing, "hang") == "error: no answer within 0.5 s"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mtgrpo.tools.mcp.HEALTHY_S", 0.7)  # longer than a call may take
            while not (await said(playing, "count")).isdigit():
                assert first in processes(tmp_path) or len(processes(tmp_path)) == 1
        await until(lambda: first not in processes(tmp_path))


async def test_long_answers_are_cut(tmp_path: Path) -> None:
    limits = {"large": {"max_output_chars": 1000, "call_timeout_s": 60}}
    async with talking(tmp_path, {"a": server(tmp_path)}, limits=limits) as playing:
        text = await said(playing, "large")
        assert len(text) < 1100 and "[9999000 of 10000000 characters left out]" in text
    with pytest.raises(ConfigError, match=r"environment\.limits: there is no tool 'lage'"):
        async with opened(tmp_path, {"a": server(tmp_path)}, limits={"lage": {}}):
            pass


async def test_a_stateful_server_belongs_to_one_conversation(tmp_path: Path) -> None:
    async with opened(tmp_path, {"a": server(tmp_path, stateful=True, warm=1)}, call_timeout_s=5) as environment:
        async with environment.conversation(TASK) as (one, _), environment.conversation(TASK) as (two, _):
            assert [await said(one, "count") for _ in range(3)] == ["1", "2", "3"]
            assert await said(two, "count") == "1"
            await until(lambda: len(processes(tmp_path)) == 3)  # and a warm one
            with pytest.raises(OutageError):
                await said(two, "die")
            with pytest.raises(OutageError, match="the MCP server a is gone"):
                await said(two, "count")
            assert await said(one, "count") == "4"
        await until(lambda: len(processes(tmp_path)) == 1)


def test_what_a_stateful_server_has_done_is_not_done_again(tmp_path: Path) -> None:
    def replayable(**settings: Any) -> bool:
        servers = {"a": server(tmp_path), "b": server(tmp_path, **settings)}
        return ToolUse(tools={"mcp": {"servers": servers}}).replayable

    assert replayable() and not replayable(stateful=True)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it, at most 10 seconds."""
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come about")


async def test_http_servers_that_come_and_go(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mtgrpo.tools.market", str(port)]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for _ in range(400):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            time.sleep(0.05)
        raise AssertionError("the server does not listen")

    process = start()
    try:
        servers = {"market": {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Key": "MY_KEY"}}}
        async with talking(tmp_path, servers, call_retries=1, on_outage=OnOutage.observe) as playing:
            assert await said(playing, "market_open_day", day=3) == "4"
            assert await said(playing, "market_price", stock="Gold", day=3) == "closed on day 3"
            process.kill()
            process.wait()
            assert await said(playing, "market_open_day", day=3) == "error: the tool market_open_day is out of order"
            process = await asyncio.to_thread(start)
            assert await said(playing, "market_open_day", day=4) == "4"
    finally:
        process.kill()
        process.wait()


async def test_what_cannot_work_is_refused_before_a_run(tmp_path: Path) -> None:
    for settings, why in (
        ({}, "either `command` or `url`"),
        ({"command": ["python", "-c", "raise SystemExit(3)"]}, "the MCP server a does not start: .*mcp_a.log"),
        (server(tmp_path, tools=["ecco"]), "the MCP server a has no tool 'ecco'; it has echo, secret"),
        (server(tmp_path, variables=["NOBODY_HAS_THIS"]), "needs the environment variable NOBODY_HAS_THIS"),
    ):
        with pytest.raises(ConfigError, match=why):
            async with opened(tmp_path, {"a": settings}):
                pass
    with pytest.raises(ConfigError, match="two MCP tools are named 'echo'"):
        async with opened(tmp_path, {"a": server(tmp_path), "b": server(tmp_path)}):
            pass


@pytest.mark.parametrize(
    ("manner", "why"),
    [
        ("endless", "its list of tools has more than 100 pages"),
        ("circle", "its list of tools has no end: it goes on at '1' again"),
        ("again", "its list of tools has no end: it goes on at '0' again"),
        ("many", "its tools are more than 1,000"),
        ("large", "or 1,048,576 characters"),
    ],
)
async def test_a_list_of_tools_without_an_end_is_refused(manner: str, why: str, tmp_path: Path) -> None:
    strange = {"command": ["python", str(STUBBORN), str(tmp_path), manner]}
    async with asyncio.timeout(30):
        with pytest.raises(ConfigError, match=f"the MCP server a does not start: .*{why}"):
            async with opened(tmp_path, {"a": strange}):
                pass


async def test_the_end_of_what_a_server_says_on_its_standard_error_is_kept(tmp_path: Path) -> None:
    noisy = {"command": ["python", str(STUBBORN), str(tmp_path), "noisy"], "prefix": ""}  # 38 MB
    async with talking(tmp_path, {"a": noisy}) as playing:
        assert await said(playing, "echo", text="hi") == "hi"
    kept = (tmp_path / "mcp_a.log").read_bytes()
    assert LOG_BYTES <= len(kept) <= 2 * LOG_BYTES + 2**16
    assert kept.endswith(b"x" * 180 + b"\n") and b"line 199999 " in kept


@pytest.mark.slow
async def test_no_process_is_left_after_a_thousand_conversations(tmp_path: Path) -> None:
    """A tenth of which end by an error, and some by the death of their server."""
    servers = {"own": server(tmp_path, stateful=True), "all": server(tmp_path, prefix="all_")}
    async with opened(tmp_path, servers, on_outage=OnOutage.observe) as environment:
        turns = asyncio.Semaphore(16)

        async def talk(index: int) -> int:
            async with turns:
                try:
                    async with environment.conversation(TASK) as (playing, _):
                        await said(playing, "die" if index % 17 == 0 else "count")
                        if index % 10 == 0:
                            raise RuntimeError("the reward fails")
                        return int(await said(playing, "all_count" if index % 17 == 0 else "count"))
                except RuntimeError:
                    return 0

        found = await asyncio.gather(*(talk(index) for index in range(1000)))
        assert sum(count == 2 for count in found) > 800
        await until(lambda: len(processes(tmp_path)) <= 3)
