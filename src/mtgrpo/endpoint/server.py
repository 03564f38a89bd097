"""The endpoint as an HTTP server on loopback, in a thread with an event loop of its own.

So streams are kept alive while the trainer's event loop computes. Sessions belong to the trainer's loop; requests hop
over to it, and replies back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from mtgrpo.endpoint import Address, RefusedError, Reply
from mtgrpo.endpoint.chat_completions import ChatCompletions
from mtgrpo.endpoint.dialect import STATUS, Dialect, event, mapping, words
from mtgrpo.endpoint.messages import Messages
from mtgrpo.endpoint.responses import Responses
from mtgrpo.endpoint.session import Session

T = TypeVar("T")
KEEP_ALIVE_S = 5.0  # between signs of life in a stream
MOST_BYTES = 8 * 2**20  # of the body of a request
DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/messages": Messages(),
    "/messages/count_tokens": Messages(),
    "/responses": Responses(),
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]


class Endpoint:
    """Hands the requests that carry a session's key to this session."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: that of the sessions."""
        self.url = ""  # while it is open
        self._loop = loop
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[int, Session] = {}
        self._opened = 0

    @asynccontextmanager
    async def conversation(self, session: Session) -> AsyncGenerator[Address]:
        """The address under which `session` is reached; afterwards it is closed, and its key answered by 409."""
        number = self._opened = self._opened + 1
        session.name, self._sessions[number] = str(number), session
        try:
            yield Address(self.url, self._key(number))
        finally:
            await session.close()
            del self._sessions[number]

    def _key(self, number: int) -> str:
        sign = hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()
        return f"sk-{number}-{sign[:32]}"

    def _session(self, key: str) -> Session:
        """Raises RefusedError for an unknown key, and for that of a session that is closed."""
        number = key.split("-")[1] if key.count("-") == 2 else ""
        if not number.isdecimal() or not hmac.compare_digest(key.encode(), self._key(int(number)).encode()):
            raise RefusedError("key", "unknown API key: send the one that the agent was given, such as OPENAI_API_KEY")
        if int(number) not in self._sessions:
            raise RefusedError("closed", "the conversation of this key has ended")
        return self._sessions[int(number)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; an ASGI application."""
        client = _Connection(scope, receive, send)
        try:
            answer = await self._answered(client)
            if answer is not None:
                await client.say(answer)
        except RefusedError as refused:
            await client.say(client.dialect.error(refused.kind, str(refused)), STATUS[refused.kind])
        except Exception as error:  # ours: the agent is told, and the run goes on
            await client.say(client.dialect.error("broken", f"{type(error).__name__}: {error}"), 500)
        finally:
            client.stop()

    async def _answered(self, client: _Connection) -> dict[str, Any] | None:
        """The body of the response; None where it has been sent, or nobody is there. Raises RefusedError."""
        method, path, dialect = client.method, client.path, client.dialect
        if (method, path) == ("GET", "/health"):
            return {"status": "ok"}
        if method == "GET" and path.startswith("/models"):
            return _models(path.removeprefix("/models").removeprefix("/"))
        if method != "POST" or path not in (*DIALECTS, "/rewards"):
            known = ", ".join((*DIALECTS, "/models", "/rewards"))
            raise RefusedError("missing", f"there is no {method} {path}; known: {known}")
        session = self._session(client.key)
        body = await client.body()
        if path == "/rewards":
            amount, reply = body.get("reward"), words(body.get("reply"), "reply")
            if isinstance(amount, bool) or not isinstance(amount, int | float):
                raise RefusedError("invalid", f"reward must be a number, got {amount!r:.100}")
            await self._there(_called(session.reward, float(amount), reply))
            return {"ok": True}
        request = dialect.read(body, client.retry)
        if path.endswith("/count_tokens"):
            return {"input_tokens": await self._there(_called(session.count, request))}
        work = self._there(session.answer(request, client, (dialect.reply_prefix, dialect.call_prefix)))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        delivered = False
        try:
            reply = await client.waits(work, streams=body.get("stream") is True)
            if reply is not None and body.get("stream") is True:
                for piece in dialect.events(reply, body):
                    await client.push(piece)
                await client.push(b"", more=False)
            elif reply is not None:
                await client.say(dialect.write(reply, body))
            delivered = reply is not None and not client.gone.is_set()
        finally:
            await self._there(_called(session.settle, client, delivered))
        return None

    def _there(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` in the loop of the sessions."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class _Connection:
    """One request: who sends it, whether they are still there, and what is sent to them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.method, self.path = scope["method"], scope["path"]
        self.key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.path.startswith("/s/"):  # for agents that cannot set a key
            self.key, _, self.path = self.path.removeprefix("/s/").partition("/")
            self.path = f"/{self.path}"
        self.path = self.path.removeprefix("/v1")
        usual = "/messages" if "anthropic-version" in headers else "/chat/completions"
        self.dialect = DIALECTS.get(self.path, DIALECTS[usual])
        retry = headers.get("x-stainless-retry-count", "")
        self.retry = int(retry) if retry.isdecimal() else -1
        self.gone = asyncio.Event()
        self._receive, self._send = receive, send
        self._begun = False
        self._listening: asyncio.Task[None] | None = None

    async def body(self) -> dict[str, Any]:
        """The JSON object that was sent. Raises RefusedError."""
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RefusedError("invalid", "the body of the request ended too soon")
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size <= MOST_BYTES:  # the rest is read too: who still sends would not see the answer
                pieces.append(message.get("body", b""))
        if size > MOST_BYTES:
            raise RefusedError("large", f"the body of the request has {size:,} bytes, at most {MOST_BYTES:,} are read")
        self._listening = asyncio.create_task(self._listen())
        try:
            found = json.loads(b"".join(pieces))
        except (ValueError, RecursionError) as error:
            raise RefusedError("invalid", f"the body of the request is no JSON: {error}") from None
        return dict(mapping(found, "the body of the request"))

    async def waits(self, work: asyncio.Future[Reply], streams: bool) -> Reply | None:
        """The reply, or None where the client has gone, or was told of an error. A stream is kept alive meanwhile."""
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            while True:
                await asyncio.wait({work, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if work.done() or gone.done():
                    return work.result() if work.done() else None
                if streams:
                    await self.push(b": keep-alive\n\n")
        except RefusedError as refused:
            if not self._begun:
                raise
            await self.push(event(self.dialect.error(refused.kind, str(refused)), "error"))
            await self.push(b"", more=False)
            return None
        finally:
            gone.cancel()

    async def push(self, data: bytes, more: bool = True) -> None:
        """Send a piece of a stream; the first sends the headers."""
        if not self._begun:
            await self._head(200, b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def say(self, answer: dict[str, Any], status: int = 200) -> None:
        """Send the whole response."""
        body = json.dumps(answer).encode()
        again = () if status == 200 else ((b"x-should-retry", b"false"),)  # it would be refused again
        await self._head(status, b"application/json", (b"content-length", str(len(body)).encode()), *again)
        await self._send({"type": "http.response.body", "body": body})

    def stop(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.cancel()

    async def _head(self, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._begun = True
        headers = ((b"content-type", kind), *headers)
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


async def _called(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _models(name: str) -> dict[str, Any]:
    """The list of models in the words of both SDK families, or one of them; whatever is asked for is the policy."""
    model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "mtgrpo", "type": "model"}
    model |= {"display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
    return model if name else {"object": "list", "data": [model], "has_more": False}


@asynccontextmanager
async def open_endpoint() -> AsyncGenerator[Endpoint]:
    """A running endpoint on a free port of 127.0.0.1, whose sessions belong to the present event loop."""
    import uvicorn  # noqa: PLC0415  of the extra `agents`

    endpoint = Endpoint(asyncio.get_running_loop())
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    endpoint.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what goes wrong is in the replies
    config = uvicorn.Config(
        endpoint,
        http="h11",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="endpoint", daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.should_exit = server.force_exit = True
        while thread.is_alive():
            await asyncio.sleep(0.01)
        listening.close()
