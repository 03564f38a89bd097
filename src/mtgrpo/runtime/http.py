"""What is asked of others over HTTP: one client, JSON in and out. And which requests are for a server of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mtgrpo.runtime.files import strict_json

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHOWN = 500  # characters of an answer that an error shows
_JSON = {"Content-Type": "application/json"}


class HttpError(RuntimeError):
    """A request that was refused with `status`, or, where that is 0, not answered; `body` is what the server says."""

    def __init__(self, url: str, status: int, body: str) -> None:
        what = f"answered with {status}: {body[:SHOWN]}" if status else f"does not answer: {body}"
        super().__init__(f"{url} {what}")
        self.status, self.body = status, body


class HttpClient(AbstractAsyncContextManager["HttpClient"]):
    """Requests to one server, by connections that are kept open. It opens none before its first request.

    A server may drop connections that were idle for 5 s; they are kept for 1 s, for one that is used just then would
    look like a server that is lost.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, max_concurrent: int = 0, socket: Path | None = None
    ) -> None:
        """max_concurrent: requests at once, 0 = any number; socket: of Unix, in place of a port."""
        self.url = url.rstrip("/")
        self._headers, self._socket = dict(headers or {}), socket
        self._turn = asyncio.Semaphore(max_concurrent) if max_concurrent else nullcontext()
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, str | int] | None = None,
        timeout_s: float | None = 600.0,
    ) -> Any:
        """The JSON that is answered, None for anything else, to `body` as JSON.

        timeout_s: from the moment when it is the request's turn; None = no limit. A redirect is not followed: what is
        sent is for this server alone. Raises HttpError for an answer whose status is 300 or more, and for none.
        """
        import aiohttp  # noqa: PLC0415  half a second, which settings alone need not take

        url, data = f"{self.url}{path}", None if body is None else strict_json(body)
        options: dict[str, Any] = {"data": data, "headers": _JSON if data else None, "params": params}
        options |= {"allow_redirects": False, "proxy": None if self._socket else _proxy_for(url)}
        async with self._turn:
            self._session = self._session or self._open()
            try:
                limit = aiohttp.ClientTimeout(total=timeout_s)
                async with self._session.request(method, url, timeout=limit, **options) as answer:
                    status, content = answer.status, await answer.read()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise HttpError(url, 0, f"{type(error).__name__} {error}".rstrip()) from error
        if status >= 300:
            raise HttpError(url, status, content.decode(errors="replace"))
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp  # noqa: PLC0415

        limits: dict[str, Any] = {"limit": 0, "keepalive_timeout": 1.0}
        path = str(self._socket or "")
        connector = aiohttp.UnixConnector(path, **limits) if path else aiohttp.TCPConnector(**limits)
        return aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _proxy_for(url: str) -> str | None:
    """The proxy of the environment for it. Not by `trust_env`, which would send the passwords in ~/.netrc too."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def served_as(host: str, port: int) -> frozenset[str]:
    """As which a server that listens there may be asked for: the host that it was given; of loopback any name."""
    named = LOOPBACK if host in LOOPBACK else (host.lower(),)
    names = [f"[{name}]" if ":" in name else name for name in named]
    return frozenset([*(f"{name}:{port}" for name in names), *(names if port == 80 else ())])


def names_one_of(hosts: frozenset[str], request: web.Request) -> bool:
    """Whether a request is for one of `hosts`; that of a page whose own name leads to this machine names another."""
    return request.headers.getall("Host", []) == [request.host] and request.host.lower() in hosts
