"""Debian's Chromium, asked over its debugging protocol: no driver is needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
FLAGS += "--disable-component-update --disable-sync --remote-debugging-port=0 --hide-scrollbars about:blank"
LATE_S = 30.0
AXE = Path(__file__).resolve().parent.parent / ".venv-mcp/node_modules/axe-core/axe.min.js"
SERIOUS = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html).join(" ")}`))"""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []  # of the console: errors, what the policy of the page forbids, exceptions
        self.asked: list[str] = []  # addresses, after Network.enable
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.asked.append(said["params"]["request"]["url"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(str(said["params"]["entry"]))
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        said = await asyncio.wait_for(answer, LATE_S)
        assert "error" not in said, said
        return said["result"]

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait for an expression to become true."""
        async with asyncio.timeout(LATE_S):
            while not await self.value(condition):
                await asyncio.sleep(0.02)

    async def open(self, url: str) -> None:
        """Go there and wait until the screen is shown."""
        await self.call("Page.navigate", url=url)
        await self.until("document.querySelector('#page')?.dataset.path !== undefined")

    async def screen(self, path: str) -> None:
        """Go to another screen of the page."""
        await self.value(f"location.hash = {json.dumps(path)}")
        await self.shown(path)

    async def shown(self, path: str) -> None:
        """Wait until this screen is shown."""
        await self.until(
            f"document.querySelector('#page').dataset.path === {json.dumps(path)} && !document.querySelector('.busy')"
        )

    async def press(self, key: str) -> None:
        """A key of one character."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        """Of the window, in points; and whether the person prefers dark pages."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """What is seen, as a PNG."""
        await asyncio.sleep(0.4)
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def chromium(profile: Path) -> AsyncGenerator[Page]:
    """A tab of a browser of its own, whose files lie in `profile`; the test is skipped where there is no Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    arguments = [program, f"--user-data-dir={profile}", *FLAGS.split()]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*arguments, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(LATE_S):
            while (
                not (profile / "DevToolsActivePort").exists()
                or "\n" not in (profile / "DevToolsActivePort").read_text()
            ):
                await asyncio.sleep(0.05)
        port = (profile / "DevToolsActivePort").read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tab = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
                page._listening.cancel()
    finally:
        process.terminate()
        await process.wait()
