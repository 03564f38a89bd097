"""A sandbox behind a URL: a server with the interface that SandboxFusion has published runs real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Score
from mtgrpo.rewards.unit_tests import UnitTests
from mtgrpo.tools.python import PythonTool
from mtgrpo.tools.sandbox import Result, Sandbox
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn


class RunCode(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and asked["language"] == "python" and asked["memory_limit_MB"] == 512
        ran = {"status": "Finished", "return_code": None, "stdout": None, "stderr": None}
        answer = {"status": "Success", "message": "", "compile_result": None, "run_result": ran, "files": {}}
        if "no pod is left" in asked["code"]:
            answer |= {"status": "SandboxError", "message": "no pod is left"}
        else:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-c", asked["code"]],
                    capture_output=True,
                    text=True,
                    timeout=asked["run_timeout"],
                    check=False,
                )
                ran |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
                answer["status"] = "Failed" if done.returncode else "Success"
            except subprocess.TimeoutExpired:
                ran["status"], answer["status"] = "TimeLimitExceeded", "Failed"
        said = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with ThreadingHTTPServer(("127.0.0.1", 0), RunCode) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield Sandbox(kind="fusion", url=f"http://127.0.0.1:{server.server_port}", timeout_s=5)
        server.shutdown()


async def run(sandbox: Sandbox, *code: str) -> list[Result]:
    session = sandbox.session()
    try:
        return [await session.run(part) for part in code]
    finally:
        await session.aclose()


async def test_variables_stay_and_what_was_printed_before_is_not_printed_again(sandbox: Sandbox) -> None:
    found = await run(sandbox, "x = 20\nprint('once')", "x + 1", "1 / 0", "x * 2", "import os; os._exit(3)", "x")
    assert [result.output for result in found[:2]] == ["once\n", "21\n"]
    assert found[2].error == "ZeroDivisionError" and found[2].output.startswith("Traceback")
    assert found[3] == Result("40\n") and not found[2].passed and found[3].passed
    assert found[4] == Result("", stopped="its process ended with code 3")
    assert found[5].error == "NameError"


async def test_it_ends_what_takes_too_long_and_cuts_what_is_long(sandbox: Sandbox) -> None:
    quick = Sandbox(kind="fusion", url=sandbox.url, timeout_s=1, output_chars=100)
    long, late = await run(quick, "print('a' * 1000)", "while True: pass")
    assert 100 < len(long.output) < 200 and "bytes left out" in long.output
    assert late.stopped == "it took longer than 1 s"


async def test_a_server_that_fails_is_no_mistake_of_the_code(sandbox: Sandbox) -> None:
    with pytest.raises(RuntimeError, match="failed: no pod is left"):
        await run(sandbox, "'no pod is left'")
    with pytest.raises(ConfigError, match=r"sandbox\.url=http://127\.0\.0\.1:9 does not work"):
        await Sandbox(kind="fusion", url="http://127.0.0.1:9").opened()


async def test_a_tool_and_a_reward_use_it(sandbox: Sandbox, tmp_path: Path) -> None:
    context = RunContext(tmp_path, print, {})
    async with PythonTool(sandbox=sandbox).open(context) as tool:
        await tool.start(Task("1", ()))
        assert await tool("6 * 7") == "42\n"
        await tool.stop()
    task = Task("1", (), metadata={"tests": "assert add(2, 3) == 5"})
    codes = ["def add(a, b): return a + b", "def add(a, b): return 4", "raise SystemExit", "import os; os._exit(0)"]
    answers = [Message("assistant", f"```python\n{code}\n```") for code in codes]
    played = [Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, answer)]) for answer in answers]
    async with UnitTests(sandbox=sandbox).open(context) as reward:
        assert await reward.rewards(played) == [Score(n, {"objects": 0}) for n in (1, 0, 0, 0)]


def test_settings_that_say_different_things_are_refused() -> None:
    for wrong in ({"kind": "fusion"}, {"url": "http://x"}):
        with pytest.raises(ConfigError, match="belong together"):
            Sandbox(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="`file_mb="):
        Sandbox(kind="fusion", url="http://x", file_mb=8)
