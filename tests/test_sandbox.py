"""The sandbox: what code may do in it, what is stopped, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.humaneval import HumanEval
from mtgrpo.parts import RunContext
from mtgrpo.rewards import scores
from mtgrpo.rewards.unit_tests import UnitTests
from mtgrpo.tasks import Split, TaskSource
from mtgrpo.tasks.mbpp import MBPP
from mtgrpo.tools import sandbox
from mtgrpo.tools.python import PythonTool
from mtgrpo.tools.sandbox import Result, Sandbox
from mtgrpo.types import Finish, Message, Task, ToolCall, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).parent / "attack"))
from hostile_programs import PROGRAMS

pytestmark = pytest.mark.real
LIMIT_S = 1.0


@pytest.fixture(params=["bubblewrap", "rlimits"], ids=str)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox."""
    if request.param == "bubblewrap":
        require_bubblewrap()
    return request.param


@pytest.fixture
def bubblewrap() -> None:
    require_bubblewrap()


def require_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")


def marked(mark: str) -> set[int]:
    """The processes on this machine whose environment holds `mark`."""
    found = set[int]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"):
                found.add(int(pid))
    return found


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """No process that the test has started in a sandbox is there a moment later. Gives the mark of such processes."""
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox._ENVIRONMENT, "MARK", mark)  # pyright: ignore[reportPrivateUsage]
    yield mark
    end = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


async def run(*code: str, **settings: object) -> list[Result]:
    """The results of pieces of code, one after the other in one session."""
    async with contextlib.aclosing(Sandbox(**settings).session()) as session:  # pyright: ignore[reportArgumentType]
        return [await session.run(part) for part in code]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What programs try to reach: a file that all may read, a port, a socket, a variable; a process to be killed."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text("escaped")
    for place in (secret, *secret.parents[:4]):
        if place.stat().st_uid == os.getuid() and place != Path("/tmp"):
            place.chmod(0o755)
    address = f"hostile-test-{os.getpid()}"  # other test processes have their own
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    os.environ["HOSTILE_TEST"] = "1"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen([*user, "sleep", "1000"]) as victim,
    ):
        try:
            abstract.bind(f"\0{address}")
            abstract.listen()
            yield {"SECRET": str(secret), "PORTS": str([server.getsockname()[1]]), "ADDRESS": address}
            assert victim.poll() is None
        finally:
            victim.kill()
    del os.environ["HOSTILE_TEST"]


@pytest.mark.usefixtures("bubblewrap", "nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
async def test_hostile_programs_harm_nothing_and_are_stopped_in_time(name: str, host: dict[str, str]) -> None:
    code, why = PROGRAMS[name]
    for word, value in host.items():
        code = code.replace(word, value)
    machine = socket.gethostname()
    began = time.monotonic()
    [found] = await run(code, timeout_s=LIMIT_S, memory_mb=256, file_mb=16)
    assert time.monotonic() - began < LIMIT_S + 1
    assert "escaped" not in found.output
    assert len(found.output) < 5000
    if "can't start new thread" not in found.output:  # refused by the limit on processes, it has nothing to be stopped
        assert why in found.stopped and bool(why) <= bool(found.stopped), found
    assert socket.gethostname() == machine


@pytest.mark.usefixtures("bubblewrap", "nothing_left")
@pytest.mark.parametrize("name", ["memory of sockets", "empty files without end"])
async def test_what_the_kernel_holds_counts_as_memory(name: str) -> None:
    [found] = await run(PROGRAMS[name][0], timeout_s=20, memory_mb=64)
    assert found.stopped == "it needed more memory than 64 MB"


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 100


@pytest.mark.usefixtures("nothing_left")
async def test_code_prints_computes_and_keeps_its_variables(kind: str) -> None:
    first, second, third = await run(
        "x = 6\nprint('a')\nx * 7", "x + 1", "import json\njson.dumps({'x': x})", kind=kind
    )
    assert (first, second) == (Result("a\n42\n"), Result("7\n"))
    assert third.output == "'{\"x\": 6}'\n" and third.passed


async def test_mistakes_are_shown_as_python_has_them(kind: str) -> None:
    raised, syntax, left = await run("def f():\n    return 1 / 0\n\nf()", "x = = 1", "raise SystemExit(3)", kind=kind)
    assert raised.error == "ZeroDivisionError" and not raised.stopped
    assert raised.output.splitlines()[1:] == [
        '  File "<code>", line 4, in <module>',
        '  File "<code>", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]
    assert syntax.error == "SyntaxError" and syntax.output.startswith('  File "<code>", line 1')
    assert left == Result("", error="SystemExit")


async def test_after_a_stop_the_session_begins_afresh(kind: str) -> None:
    before, stopped, after = await run("x = 1", "print('so far')\nwhile True: pass", "x", kind=kind, timeout_s=LIMIT_S)
    assert before.passed
    assert stopped.output == "so far\n" and stopped.stopped == "it took longer than 1 s"
    assert after.error == "NameError"


async def test_long_output_keeps_its_ends(kind: str) -> None:
    [found] = await run("print('begin' + 'x' * 10_000 + 'end')", kind=kind, output_chars=100)
    assert found.output.startswith("beginx") and found.output.endswith("xend\n")
    assert f"[{10_000 + 9 - 100} bytes left out]" in found.output


@pytest.mark.parametrize("before", ["", "x"])
async def test_long_output_is_cut_between_characters(kind: str, before: str) -> None:
    [found] = await run(f"print('{before}' + 'é' * 1000)", kind=kind, output_chars=102)
    assert "\ufffd" not in found.output and found.output.count("é") >= 48


@pytest.mark.usefixtures("bubblewrap")
async def test_nothing_goes_on_between_two_pieces_of_code() -> None:
    counting = (
        "import threading, time\nn = 0\ndef count():\n    global n\n    while True:\n        n += 1\n"
        "        time.sleep(.01)\n"
    )
    session = Sandbox().session()
    try:
        await session.run(f"{counting}threading.Thread(target=count, daemon=True).start()")
        await asyncio.sleep(1)
        found = await session.run("n")
    finally:
        await session.aclose()
    assert int(found.output) < 40


LEAVE = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(600)\n"


@pytest.mark.parametrize("rest", ["", "while True: pass", "os._exit(0)"])
async def test_what_leaves_its_session_is_ended(kind: str, rest: str, nothing_left: str) -> None:
    await run(LEAVE + rest, kind=kind, timeout_s=LIMIT_S)


@pytest.mark.usefixtures("nothing_left")
async def test_after_its_start_a_sandbox_does_not_fail(kind: str) -> None:
    end = "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 2)\nos.kill(os.getppid(), 2)\nwhile True: pass"
    found = await run(end, "1", kind=kind, timeout_s=LIMIT_S)
    assert found[0].stopped and found[1] == Result("1\n")


async def test_ordinary_programs_find_the_system_calls_they_need() -> None:
    code = (
        "import asyncio, multiprocessing, sqlite3, subprocess, threading\n"
        "async def said():\n    run = await asyncio.create_subprocess_exec('echo', 'a', stdout=-1)\n"
        "    return await run.communicate()\n"
        "print(asyncio.run(said())[0], subprocess.run(['echo', 'b'], capture_output=True).stdout)\n"
        "thread = threading.Thread(target=print, args=('c',)); thread.start(); thread.join()\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2]))\n"
        "sqlite3.connect('/tmp/x').execute('create table t(x)').fetchall()"
    )
    assert await run(code, timeout_s=20) == [Result("b'a\\n' b'b\\n'\nc\n[1, 2]\n[]\n")]


async def test_what_cannot_work_is_refused_before_anything_is_spent(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"does not work here.*no-such-python.*sandbox.kind=rlimits"):
        await Sandbox(kind=kind, python="no-such-python").opened()
    assert (await Sandbox(kind=kind).opened()).kind is kind


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="`memory_mb` must be"):
        Sandbox(memory_mb=1)
    with pytest.raises(ConfigError, match="`folders="):
        Sandbox(kind="rlimits", folders=["/opt"])


async def test_without_bubblewrap_a_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mtgrpo.tools.sandbox._ENVIRONMENT", {"PATH": str(tmp_path)})
    environment = ToolUse(tools=["python"])
    with pytest.raises(ConfigError, match=r"install version 0\.8"):
        async with environment.open(RunContext(tmp_path, print, {})):
            pass


# --- the tool ---


def calls(*codes: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall("python", {"code": code}) for code in codes))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("stateful", [True, False])
async def test_the_tool_in_a_conversation(kind: str, stateful: bool, tmp_path: Path) -> None:
    settings = {"stateful": stateful, "sandbox": {"kind": kind, "timeout_s": LIMIT_S}}
    environment = ToolUse(tools={"python": settings})
    async with environment.open(RunContext(tmp_path, print, {})) as running:
        said: list[list[str]] = []
        task = Task("task/1", (Message("user", "?"),))
        async with running.conversation(task) as (one, opening), running.conversation(task) as (other, _):
            assert list(opening.tools[0].parameters["properties"]) == ["code"]
            for message in (calls("x = 1"), calls("print(x)"), calls("while True: pass"), calls("1", "2", "3")):
                said.append([answer.content for answer in (await one.step(message)).messages])
            assert "NameError" in (await other.step(calls("x"))).messages[0].content
    lost = "; all variables are lost" if stateful else ""
    assert said[0] == [""] and said[3] == ["1\n", "2\n", "3\n"]
    assert said[1] == ["1\n"] if stateful else "NameError" in said[1][0]
    assert said[2] == [f"error: the code was stopped: it took longer than 1 s{lost}"]
    assert PythonTool(stateful=stateful).idempotent is not stateful


async def test_code_that_prints_no_text_runs_once(kind: str, tmp_path: Path) -> None:
    environment = ToolUse(tools={"python": {"sandbox": {"kind": kind}}})
    task = Task("task/1", (Message("user", "?"),))
    async with (
        environment.open(RunContext(tmp_path, print, {})) as running,
        running.conversation(task) as (playing, _),
    ):
        reply = await playing.step(calls("print('a\\0\\ufffdb')"))
    assert (reply.messages[0].content, reply.tool_retries) == ("a\\x00?b\n", 0)


async def test_endless_loops_take_no_time_from_other_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    tools = {"python": {"sandbox": {"kind": kind, "timeout_s": LIMIT_S}}}
    environment = ToolUse(tools=tools, call_timeout_s=2.5, call_retries=0)
    task = Task("task/1", (Message("user", "?"),))
    async with (
        environment.open(RunContext(tmp_path, print, {})) as running,
        running.conversation(task) as (playing, _),
    ):
        reply = await playing.step(calls(*["while True: pass"] * 3, "1"))
    assert (reply.messages[3].content, reply.tool_timeouts) == ("1\n", 0)


@pytest.mark.usefixtures("bubblewrap")
async def test_a_cancelled_call_leaves_no_process(nothing_left: str) -> None:
    tool = PythonTool()
    await tool.start(Task("task/1", ()))
    work = asyncio.create_task(tool("while True: pass"))
    while len(marked(nothing_left)) < 3:  # bubblewrap, the first process, the worker
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await tool.stop()


# --- unit tests as a reward ---


def answered(task: Task, code: str) -> Trajectory:
    message = Message("assistant", f"```python\n{code}\n```")
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, message)])


ADD = Task("add/1", (), metadata={"tests": "assert add(1, 2) == 3\nassert add(0, 0) == 0"})


@pytest.mark.usefixtures("nothing_left")
async def test_unit_tests_grade_code(kind: str, tmp_path: Path) -> None:
    right = "def add(a, b):\n    return a + b"
    wrong = [
        "def add(a, b):\n    return 3",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        f"{right}\nimport sys\nsys.exit()",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b):\n    while True: pass",
        "def add(a, b:",
        "print('ok')",
    ]
    reward = UnitTests(sandbox=Sandbox(kind=kind, timeout_s=LIMIT_S))
    async with reward.open(RunContext(tmp_path, print, {})) as running:
        found = await scores(running, [answered(ADD, code) for code in (right, *wrong)])
        unfenced = Trajectory(ADD, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", right))])
        found += await scores(running, [unfenced])
        with pytest.raises(ConfigError, match="no `tests`"):
            await running.rewards([answered(Task("other/1", ()), right)])
    assert [getattr(score, "total", score) for score in found] == [1, *(0 for _ in wrong), 0]


async def reference_solutions_fail(source: TaskSource, split: Split, folder: Path) -> list[str]:
    """The tasks whose own solutions do not pass."""
    tasks = list(source.stream(split, 0, repeat=False))
    async with UnitTests(sandbox=Sandbox(timeout_s=60)).open(RunContext(folder, print, {})) as running:
        found = await asyncio.gather(*(scores(running, [answered(task, task.answer)]) for task in tasks))
    return [task.id for task, [score] in zip(tasks, found, strict=True) if getattr(score, "total", 0) != 1]


@pytest.mark.usefixtures("bubblewrap", "nothing_left")
@pytest.mark.parametrize("source, split", [(HumanEval(), Split.eval), (MBPP(), Split.train), (MBPP(), Split.eval)])
async def test_reference_solutions_pass(
    source: TaskSource, split: Split, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    assert await reference_solutions_fail(copy.copy(source), split, tmp_path) == []
