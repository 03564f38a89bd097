"""The page over HTTP, or as files. It answers GET alone, to whoever names the host that it was opened for."""

import asyncio
import errno
import hmac
import secrets
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path

from aiohttp import web

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import strict_json, write_whole
from mtgrpo.runtime.http import LOOPBACK, names_one_of, served_as
from mtgrpo.runtime.text import show
from mtgrpo.viewer.resources import Runs

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY + "; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def static_files() -> dict[str, bytes]:
    """The files of the page by name."""
    place = Path(__file__).with_name("static")
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*.*")}


def application(runs: Runs, hosts: frozenset[str], secret: str) -> web.Application:
    """The page and what it asks for. hosts: as which it may be asked for; secret: what requests must know, or ""."""
    static = static_files()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = _refused(request, hosts, secret) or await _answered(request, handler)
        response.headers.update(HEADERS)
        return response

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        if name not in static:
            raise web.HTTPNotFound
        return web.Response(body=static[name], content_type=_TYPES[Path(name).suffix], charset="utf-8")

    async def resource(request: web.Request) -> web.Response:
        found = await asyncio.to_thread(runs.read, request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        content = await asyncio.to_thread(strict_json, found)
        answer = web.Response(body=content, content_type="application/json", charset="utf-8")
        answer.enable_compression()
        return answer

    app = web.Application(middlewares=[guarded], client_max_size=0)
    app.router.add_get("/api/{name:.+}.json", resource, allow_head=False)
    app.router.add_get("/", page, allow_head=False)
    app.router.add_get("/{name:.+}", page, allow_head=False)
    return app


def _refused(request: web.Request, hosts: frozenset[str], secret: str) -> web.Response | None:
    """The answer to a request that is not served; None for one that is."""
    if not names_one_of(hosts, request):
        return web.Response(status=421, text=f"this page is served as {', '.join(sorted(hosts))} alone\n")
    if request.method != "GET":
        return web.Response(status=405, text="GET alone\n", headers={"Allow": "GET"})
    if request.body_exists:
        return web.Response(status=413, text="a request has no body\n")
    given = request.headers.get("X-View-Secret", "").encode()
    if secret and request.path.startswith("/api/") and not hmac.compare_digest(given, secret.encode()):
        return web.Response(status=401, text="open the whole address that was printed, its part after # too\n")
    return None


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.Response(status=error.status, text=f"{error.reason}\n")
    except (ConfigError, OSError) as error:  # what is in the folder is none of ours, or has just gone
        return web.Response(status=422, text=f"{error}\n")


async def serve(runs: Runs, host: str, port: int, screen: str) -> None:
    """Serve until cancelled; the address that is printed opens `screen`. Raises ConfigError where it is taken."""
    secret = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    for chosen in [port] if port else [*range(8765, 8785), 0]:
        runner = web.AppRunner(application(runs, served_as(host, chosen), secret), access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, host, chosen).start()
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}:{chosen}: {error.strerror}; choose --port") from error
        else:
            name = f"[{host}]" if ":" in host else host
            fragment = (f"secret={secret}" if secret else "") + screen
            show(f"open http://{name}:{chosen}/{'#' * bool(fragment)}{fragment}   (Ctrl-C ends it)")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def write_out(runs: Runs, folder: Path) -> int:
    """Write the page and all that it may ask for as files, the resources of a step in one; returns their number."""
    written = static_files()
    meta = f'<meta name="files"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    written["index.html"] = written["index.html"].replace(b"<head>", f"<head>\n{meta}".encode(), 1)
    for name, content in written.items():
        write_whole(folder / name, content, durable=False)
    count = len(written)
    for place, names in groupby(runs.names(), lambda name: name.rpartition("/")[0]):
        content = {name.rpartition("/")[2]: found for name in names if (found := runs.read(name)) is not None}
        write_whole(folder / "api" / f"{place or 'top'}.json", strict_json(content), durable=False)
        count += 1
    return count
