"""Tools of MCP servers, which run as processes of their own or are reached by a URL."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO, cast

from mtgrpo.errors import ConfigError, require
from mtgrpo.parts import Network, Program, Reach, RunContext, Secret, Text
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.processes import bounded_log, supervise
from mtgrpo.tools import Tool, ToolError
from mtgrpo.types import Task, ToolSpec

if TYPE_CHECKING:
    from mcp import Client

    Connect = Callable[[], AbstractAsyncContextManager[Client]]

HEALTHY_S = 5.0  # within which a server lists its tools; one that does not is started anew
MAX_TOOLS = 1000  # of one server
MAX_PAGES = 100  # on which it lists them
MAX_CHARACTERS = 2**20  # of their names, descriptions and schemas: the model reads them in every conversation
END_S = 1.5  # for a server that is told to end; the SDK kills it after 2
LEAVE_S = 10.0  # for a server to end; the SDK kills its processes after 4


@dataclass
class McpServer:
    """One MCP server, by `command` (it talks on its standard input and output) or by `url` (streamable HTTP)."""

    command: list[Program] = field(default_factory=list[str])  # and its arguments; `python` is the Python of the run
    url: Network = ""  # such as http://127.0.0.1:8000/mcp
    variables: list[Secret] = field(default_factory=list[str])  # of the environment, that its process gets
    headers: dict[str, Secret] = field(default_factory=dict[str, str])  # of requests: variables that hold their values
    tools: list[Text] = field(default_factory=list[str])  # the model may call; [] = all
    prefix: Text | None = None  # before the names of its tools; null = its own name and _
    stateful: bool = False  # every conversation has a server of its own, whose calls are made once
    warm: int = 2  # stateful ones that are kept ready
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require(self, warm=">= 1", start_timeout_s="> 0")
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"an MCP server has either `command` or `url`, got {self.command} and {self.url!r}")


@dataclass
class Mcp(Tool):
    """The tools of MCP `servers`, by their names: {time: {command: [python, -m, mcp_server_time]}}.

    A server is shared by all conversations unless it is `stateful`, and started anew when it dies or hangs. Its process
    gets HOME, PATH and the like, and the `variables` that are listed; values of secrets stand in the environment alone.
    What it writes to standard error is in the run's folder, mcp_NAME.log, the last MiB or two of it.
    """

    servers: Annotated[dict[str, McpServer], Reach.program] = field(default_factory=dict[str, McpServer])

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("the tool mcp needs servers: {mcp: {servers: {NAME: {command: [PROGRAM, ARGUMENT]}}}}")
        refuse_without_package("mcp", "environment.tools={mcp: ...}")
        self._running: dict[str, _Connections] = {}
        self._offers: dict[str, tuple[ToolSpec, str, str]] = {}  # by name: with the server, and the tool's name there
        self._own: dict[str, _Connection] = {}  # those of this conversation
        self.idempotent = not any(server.stateful for server in self.servers.values())

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its servers running. Raises ConfigError for one that does not start, and for tools that it lacks."""
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # each line that is no message would be on the console
        running = copy.copy(self)
        running.__post_init__()  # with dictionaries of its own
        with ExitStack() as logs:
            try:
                for name, server in self.servers.items():
                    log = logs.enter_context(bounded_log(context.folder / f"mcp_{name}.log"))
                    connect = partial(_connect, server, _values(name, server, context.secrets), log)
                    running._running[name] = _Connections(connect, server.warm if server.stateful else 1)
                for name in self.servers:
                    await running._list(name, context.folder)
                yield running
            finally:
                await asyncio.gather(*(server.close() for server in running._running.values()))

    async def _list(self, name: str, folder: Path) -> None:
        server = self.servers[name]
        try:
            async with asyncio.timeout(server.start_timeout_s):
                offered = await self._running[name].ready[0].list_tools()
        except Exception as error:
            why = f"{type(error).__name__}: {error}; see {folder / f'mcp_{name}.log'}"
            raise ConfigError(f"the MCP server {name} does not start: {why}") from error
        if unknown := [tool for tool in server.tools if tool not in offered]:
            raise ConfigError(f"the MCP server {name} has no tool {unknown[0]!r}; it has {', '.join(offered)}")
        for tool in server.tools or offered:
            shown = (f"{name}_" if server.prefix is None else server.prefix) + tool
            if shown in self._offers:
                raise ConfigError(f"two MCP tools are named {shown!r}: set another `prefix` for the server {name}")
            self._offers[shown] = replace(offered[tool], name=shown), name, tool

    def specs(self) -> Sequence[ToolSpec]:
        return [spec for spec, _, _ in self._offers.values()]

    def repeatable(self, name: str) -> bool:
        return not self.servers[self._offers[name][1]].stateful

    async def start(self, task: Task) -> None:
        self._own = {}

    async def stop(self) -> None:
        for connection in self._own.values():
            connection.leave()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        _, server, tool = self._offers[name]
        if not self.servers[server].stateful:
            connection = await self._running[server].shared()
        elif server not in self._own:
            connection = self._own[server] = self._running[server].take()
        else:
            connection = self._own[server]
            if connection.doubtful and not await connection.healthy():
                raise RuntimeError(f"the MCP server {server} is gone, and with it what this conversation did there")
        return await connection.call(tool, arguments)


class _Connection:
    """A client of one server. The SDK wants it entered and left by one and the same task: its own."""

    def __init__(self, connect: Connect) -> None:
        self._failed = False  # a call has not come to its end
        self._left = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        self.task = asyncio.create_task(self._hold(connect))

    async def _hold(self, connect: Connect) -> None:
        try:
            async with connect() as client:
                self._client.set_result(client)
                await self._left.wait()
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = cast("ExceptionGroup[Exception]", error).exceptions[0]
            if not self._client.done():
                self._client.set_exception(error)

    @property
    def doubtful(self) -> bool:
        """Whether there is a reason to ask if the server is healthy."""
        return self._failed or (self._client.done() and self._client.exception() is not None)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """What the server answers: its texts, and for other content what kind it is of.

        Raises ToolError for errors and arguments that it refuses, and what the SDK raises where the server fails.
        """
        from mcp import MCPError  # noqa: PLC0415
        from mcp.types import INVALID_PARAMS  # noqa: PLC0415

        client = await asyncio.shield(self._client)
        try:
            result = await client.call_tool(tool, dict(arguments))
        except (Exception, asyncio.CancelledError) as error:  # the latter also when the call has taken too long
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            self._failed = True
            raise
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise ToolError("\n".join(parts))
        return "\n".join(parts)

    async def list_tools(self) -> dict[str, ToolSpec]:
        """All tools, by their names. Raises RuntimeError for a list without an end."""
        client, size = await asyncio.shield(self._client), 0
        offered: dict[str, ToolSpec] = {}
        cursors: list[str | None] = [None]
        while len(cursors) <= MAX_PAGES:
            page = await client.list_tools(cursor=cursors[-1], cache_mode="refresh")
            for tool in page.tools:
                spec = offered[tool.name] = ToolSpec(tool.name, tool.description or "", _untitled(tool.input_schema))
                size += len(json.dumps((spec.name, spec.description, spec.parameters)))
            if len(offered) > MAX_TOOLS or size > MAX_CHARACTERS:
                raise RuntimeError(f"its tools are more than {MAX_TOOLS:,}, or {MAX_CHARACTERS:,} characters of them")
            if page.next_cursor is None:
                return offered
            if page.next_cursor in cursors:
                raise RuntimeError(f"its list of tools has no end: it goes on at {page.next_cursor!r:.100} again")
            cursors.append(page.next_cursor)
        raise RuntimeError(f"its list of tools has more than {MAX_PAGES} pages")

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTHY_S):
                await self.list_tools()
        except Exception:  # whatever it is, another connection is opened
            return False
        self._failed = False
        return True

    def leave(self) -> None:
        """Begin to end it; a server that was started for it ends with it."""
        self._left.set()
        if not self._client.done():
            self.task.cancel()


class _Connections:
    def __init__(self, connect: Connect, count: int) -> None:
        self._connect = connect
        self._open: set[_Connection] = set()
        self._mending: asyncio.Task[None] | None = None
        self.ready = [self._new() for _ in range(count)]

    def _new(self) -> _Connection:
        connection = _Connection(self._connect)
        self._open.add(connection)
        connection.task.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    async def shared(self) -> _Connection:
        """The one that all conversations share; another where that has failed."""
        if self.ready[0].doubtful:
            if self._mending is None or self._mending.done():
                self._mending = asyncio.create_task(self._mend())
            await asyncio.shield(self._mending)  # it goes on when the time of this call is over
        return self.ready[0]

    async def _mend(self) -> None:
        if not await self.ready[0].healthy():
            self.ready[0].leave()
            self.ready[0] = self._new()

    def take(self) -> _Connection:
        """One for a single conversation, which leaves it; the next begins to start."""
        self.ready.append(self._new())
        return self.ready.pop(0)

    async def close(self) -> None:
        if self._mending is not None:
            self._mending.cancel()
        for connection in self._open:
            connection.leave()
        if self._open:
            await asyncio.wait([connection.task for connection in self._open], timeout=LEAVE_S)


@asynccontextmanager
async def _connect(server: McpServer, values: Mapping[str, str], log: TextIO) -> AsyncGenerator[Client]:
    """A client of the server; `values` are those of its variables or headers, `log` takes its standard error."""
    import httpx2  # noqa: PLC0415
    from mcp import Client, StdioServerParameters, stdio_client  # noqa: PLC0415
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415

    async with AsyncExitStack() as stack:
        if server.url:
            limits = httpx2.Timeout(30, read=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=values, timeout=limits))
            transport = streamable_http_client(server.url, http_client=http)
        else:
            program, *arguments = server.command
            if program == "python":
                program, values = sys.executable, {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **values}
            program, *arguments = supervise([program, *arguments], os.environ, grace_s=END_S)
            process = StdioServerParameters(command=program, args=arguments, env=dict(values))
            process.encoding_error_handler = "replace"  # bytes that are no text must not end the connection
            transport = stdio_client(process, errlog=log)
        async with asyncio.timeout(server.start_timeout_s):
            client = await stack.enter_async_context(Client(transport))
        yield client


def _values(name: str, server: McpServer, secrets: Mapping[str, str]) -> dict[str, str]:
    """The values of a server's variables, or of its headers. Raises ConfigError for a variable that is not set."""
    wanted = server.headers if server.url else {variable: variable for variable in server.variables}
    if missing := [variable for variable in wanted.values() if variable not in secrets]:
        raise ConfigError(f"the MCP server {name} needs the environment variable {missing[0]}, which is not set")
    return {key: secrets[variable] for key, variable in wanted.items()}


def _untitled(schema: Any) -> Any:
    """A schema without the titles that only repeat names, and cost tokens."""
    if isinstance(schema, dict):
        entries = cast("dict[str, Any]", schema).items()
        return {key: _untitled(value) for key, value in entries if key != "title" or not isinstance(value, str)}
    return [_untitled(part) for part in cast("list[Any]", schema)] if isinstance(schema, list) else schema
