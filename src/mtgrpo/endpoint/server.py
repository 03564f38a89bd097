"""The endpoint as an HTTP server on loopback, in a thread with an event loop of its own.

So streams are kept alive while the trainer's event loop computes. Sessions belong to the trainer's loop; requests hop
over to it, and replies back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from mtgrpo.endpoint import Address, RefusedError, TurnReply
from mtgrpo.endpoint.chat_completions import ChatCompletions
from mtgrpo.endpoint.dialect import ERRORS, Body, Dialect, event, parse_json, string, typed
from mtgrpo.endpoint.messages import Messages
from mtgrpo.endpoint.responses import Responses
from mtgrpo.endpoint.session import MAX_PAID, AgentSession
from mtgrpo.runtime.files import strict_json
from mtgrpo.runtime.workers import LoopThread

T = TypeVar("T")
KEEP_ALIVE_S = 5.0  # between signs of life in a stream
MAX_BODY_BYTES = 8 * 2**20
CLOSE_S = 5.0  # for the thread to end
SAMPLES, POSTS = "sk", "rk"  # the kinds of keys: what samples does not pay
DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/messages": Messages(),
    "/messages/count_tokens": Messages(),
    "/responses": Responses(),
}


class Endpoint:
    """Hands the requests that carry a session's key to this session."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: that of the sessions."""
        self.url = ""  # while it is open
        self._loop = loop
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, AgentSession] = {}
        self._opened = 0

    @asynccontextmanager
    async def conversation(self, session: AgentSession, posts_rewards: bool = False) -> AsyncGenerator[Address]:
        """The address under which `session` is reached; afterwards it is closed, and its key answered by 409.

        posts_rewards: the address has a second key, with which rewards can be posted.
        """
        self._opened += 1
        name = session.name = str(self._opened)
        self._sessions[name] = session
        rewards_key = self._key(POSTS, name) if posts_rewards else ""
        try:
            yield Address(self.url, self._key(SAMPLES, name), rewards_key=rewards_key)
        finally:
            try:
                await session.close()
            finally:
                del self._sessions[name]

    def _key(self, kind: str, name: str) -> str:
        sign = hmac.new(self._secret, _bytes(f"{kind}-{name}"), hashlib.sha256).hexdigest()
        return f"{kind}-{name}-{sign[:32]}"

    def _session(self, key: str, kind: str) -> AgentSession:
        """Raises RefusedError for an unknown key, one of another kind, and that of a session that is closed."""
        name = key.split("-")[1] if key.count("-") == 2 else ""
        if not hmac.compare_digest(_bytes(key), _bytes(self._key(kind, name))):
            if kind == POSTS:
                why = "agent.posts_rewards=true gives the agent's own program, as MTGRPO_REWARDS_KEY"
                raise RefusedError("key", f"unknown key: rewards are posted with the one that {why}")
            raise RefusedError("key", "unknown API key: send the one that the agent was given, such as OPENAI_API_KEY")
        if name not in self._sessions:
            raise RefusedError("closed", "the conversation of this key has ended")
        return self._sessions[name]

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer one HTTP request."""
        client = _Client(request)
        try:
            return await self._answer(client)
        except Exception as error:
            refused = _refusal(error)
            status, *_ = ERRORS[refused.kind]
            return await client.send(client.dialect.error(refused.kind, str(refused)), status)

    async def _answer(self, client: _Client) -> web.StreamResponse:
        """The response, sent. Raises RefusedError. It is cancelled where the client goes."""
        method, path, dialect = client.request.method, client.path, client.dialect
        if (method, path) == ("GET", "/health"):
            return await client.send({"status": "ok"})
        if method == "GET" and path.startswith("/models"):
            return await client.send(_models(path.removeprefix("/models").removeprefix("/")))
        if method != "POST" or path not in (*DIALECTS, "/rewards"):
            routes = ", ".join((*DIALECTS, "/models", "/rewards"))
            raise RefusedError("missing", f"there is no {method} {path}; known: {routes}")
        session = self._session(client.key, POSTS if path == "/rewards" else SAMPLES)
        body = await client.body()
        if path == "/rewards":
            await self._there(_call(session.pay, body.get("reward"), string(body.get("reply"), "reply"), MAX_PAID))
            return await client.send({"ok": True})
        request = dialect.read(body, client.retry)
        if path.endswith("/count_tokens"):
            return await client.send({"input_tokens": await self._there(_call(session.count, request))})
        work = self._there(session.answer(request, client, dialect.prefixes))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        delivered = False
        try:
            if body.get("stream") is not True:
                response = await client.send(dialect.write(await asyncio.shield(work), body))
            else:
                response = await client.stream(work, body)
            delivered = not work.exception()
        finally:
            asyncio.run_coroutine_threadsafe(_call(session.settle, client, delivered), self._loop)  # after `answer`
        return response

    def _there(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` in the loop of the sessions."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class _Client:
    """One request: who sends it, and what is sent to them."""

    def __init__(self, request: web.Request) -> None:
        self.request, self.path, headers = request, request.path, request.headers
        self.key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.path.startswith("/s/"):  # for agents that cannot set a key
            self.key, _, self.path = self.path.removeprefix("/s/").partition("/")
            self.path = f"/{self.path}"
        self.path = self.path.removeprefix("/v1")
        usual = "/messages" if "anthropic-version" in headers else "/chat/completions"
        self.dialect = DIALECTS.get(self.path, DIALECTS[usual])
        retry = headers.get("x-stainless-retry-count", "")
        self.retry = int(retry[:9]) if retry.isdecimal() else -1

    async def body(self) -> Body:
        """The JSON object that was sent. Raises RefusedError."""
        what = "the body of the request"
        try:
            content = await self.request.read()
        except web.HTTPRequestEntityTooLarge:
            raise RefusedError("large", f"{what} has more than the {MAX_BODY_BYTES:,} bytes that are read") from None
        return typed(parse_json(content, what), dict, what)

    async def send(self, answer: dict[str, Any], status: int = 200) -> web.StreamResponse:
        """Send the whole response."""
        response = web.Response(status=status, body=strict_json(answer), content_type="application/json")
        if status != 200:
            response.headers["x-should-retry"] = "false"  # it would be refused again
        await response.prepare(self.request)
        await response.write_eof()
        return response

    async def stream(self, work: asyncio.Future[TurnReply], body: Body) -> web.StreamResponse:
        """Send the events of the reply, and signs of life until it is there; once they began, also what is wrong."""
        response = web.StreamResponse(headers={"cache-control": "no-cache"})
        response.content_type, response.charset = "text/event-stream", "utf-8"
        while not (await asyncio.wait({work}, timeout=KEEP_ALIVE_S))[0]:
            await response.prepare(self.request)
            await response.write(b": keep-alive\n\n")
        try:
            pieces = self.dialect.events(work.result(), body)
        except Exception as error:
            if not response.prepared:  # who called says it, with a status
                raise
            refused = _refusal(error)
            pieces = iter([event(self.dialect.error(refused.kind, str(refused)), "error")])
        await response.prepare(self.request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response


def _refusal(error: Exception) -> RefusedError:
    """What the agent is told of an error; of one of ours too, so that the run goes on."""
    return error if isinstance(error, RefusedError) else RefusedError("broken", f"{type(error).__name__}: {error}")


async def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _bytes(key: str) -> bytes:
    return key.encode(errors="replace")  # of a header that is no text


def _models(name: str) -> dict[str, Any]:
    """The list of models in the words of both SDK families, or one of them; whatever is asked for is the policy."""
    model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "mtgrpo", "type": "model"}
    model |= {"display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    return model if name else {"object": "list", "data": [model], "has_more": False}


@asynccontextmanager
async def open_endpoint() -> AsyncGenerator[Endpoint]:
    """A running endpoint on a free port of 127.0.0.1, whose sessions belong to the present event loop."""
    endpoint = Endpoint(asyncio.get_running_loop())
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    endpoint.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # what goes wrong is in the replies
    thread = LoopThread("endpoint")
    try:
        runner = await thread.submit(_serve(endpoint, listening))
        try:
            yield endpoint
        finally:
            await thread.submit(runner.cleanup())
    finally:
        await thread.close(CLOSE_S)
        listening.close()


async def _serve(endpoint: Endpoint, listening: socket.socket) -> web.AppRunner:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", endpoint.respond)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=75, auto_decompress=False, shutdown_timeout=0
    )
    await runner.setup()
    await web.SockSite(runner, listening, backlog=1024).start()
    return runner
