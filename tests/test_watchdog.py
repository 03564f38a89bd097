"""A run in which nothing moves says where everything waits and ends; one that moves is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtgrpo import preset
from mtgrpo.engines import Key, RunningEngine
from mtgrpo.stages import watchdog as watchdog_module
from mtgrpo.stages.run import open_run
from mtgrpo.stages.watchdog import Watchdog, open_watchdog, write_state
from mtgrpo.types import Sampling
from scripted import ScriptedEngine
from test_conversation import said

STUCK = '''
import asyncio
import time
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply

@dataclass
class Stuck(Environment):
    """Hangs in the coroutine, or with the whole event loop."""

    blocks: bool = False

    async def start(self, task):
        return Opening(task.messages)

    async def step(self, message):
        if self.blocks:
            time.sleep(1000)
        await asyncio.Event().wait()
        return Reply(done=True)
'''


def script(key: Key, turn: int) -> list[int]:
    return said("hello")


async def test_what_everything_waits_for_is_written_down(tmp_path: Path) -> None:
    async def deep() -> None:
        await asyncio.sleep(100)

    async def outer() -> None:
        await deep()

    task = asyncio.create_task(outer(), name="train/1 of task 7")
    await asyncio.sleep(0)
    write_state(
        tmp_path / "state.txt", asyncio.get_running_loop(), ScriptedEngine(script), ["rank 1: updating, part 3"]
    )
    task.cancel()
    said_of_it = (tmp_path / "state.txt").read_text()
    assert "# requests to the engine: 0" in said_of_it and "\nrank 1: updating, part 3\n" in said_of_it
    place = said_of_it.partition("train/1 of task 7\n")[2]
    assert place.index("outer") < place.index("deep") < place.index("sleep")
    assert "most recent call first" in said_of_it and Path(__file__).name in said_of_it.partition("# threads")[2]


async def test_turns_and_micro_batches_count(tmp_path: Path) -> None:
    watchdog, engine = Watchdog(), ScriptedEngine(script)
    moved: list[str] = []
    watchdog.moved = lambda: moved.append("moved")  # type: ignore[method-assign]
    async with watchdog.sampling(engine.conversation)(Key(0, "train/1", "t", 0)) as sample:
        assert not moved
        await sample([1, 2], Sampling())
    assert len(moved) == 1


async def test_a_run_that_moves_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    with open_watchdog(0.4, tmp_path, ScriptedEngine(script)) as watchdog:
        for _ in range(12):
            await asyncio.sleep(0.05)
            watchdog.moved()
    assert not sent
    with open_watchdog(0.2, tmp_path, ScriptedEngine(script)):
        await asyncio.sleep(0.6)
    assert sent == [signal.SIGTERM]
    assert (tmp_path / "watchdog.txt").exists()


async def test_a_run_that_was_suspended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent, looks = [0.0], list[int](), list[float]()

    class Slept(threading.Event):
        """Of three looks the second comes an hour late."""

        def wait(self, timeout: float | None = None) -> bool:
            looks.append(timeout or 0.0)
            clock[0] += 3600.0 if len(looks) == 2 else timeout or 0.0
            return len(looks) == 3

    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watchdog_module, "threading", SimpleNamespace(Event=Slept, Thread=threading.Thread))
    with open_watchdog(600.0, tmp_path, ScriptedEngine(script)):
        await asyncio.sleep(0.1)
    assert looks == [5.0, 5.0, 5.0] and not sent


async def test_a_full_disk_does_not_keep_the_run_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, waits, ended = list[int](), list[float](), list[int]()

    class Never(threading.Event):
        """Nothing ends the run."""

        def wait(self, timeout: float | None = None) -> bool:
            clock[0] += timeout or 0.0
            waits.append(timeout or 0.0)
            return False

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    clock = [0.0]
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(watchdog_module, "write_state", full)
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watchdog_module, "threading", SimpleNamespace(Event=Never, Thread=threading.Thread))
    with open_watchdog(600.0, tmp_path, ScriptedEngine(script)):
        await asyncio.sleep(0.1)
    assert sent == [signal.SIGTERM] and ended == [1]
    assert waits[-1] == 600.0, "so long may the run take to save"


@pytest.mark.parametrize(
    ("words", "limit_s"),
    [
        ((), 4200.0),
        (("watchdog_s=0",), 0.0),
        (("watchdog_s=9000",), 9000.0),
        (("rollout.timeout_s=0", "watchdog_s=60"), 60.0),
        (("rollout.score_timeout_s=5000", "trainer.deterministic=false"), 5600.0),
    ],
)
async def test_what_may_take_long_is_waited_for(
    words: tuple[str, ...], limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []

    @contextmanager
    def opened(limit_s: float, folder: Path, engine: RunningEngine, places: object) -> Generator[Watchdog]:
        found.append(limit_s)
        yield Watchdog()

    monkeypatch.setattr("mtgrpo.stages.run.open_watchdog", opened)
    async with open_run(preset("calculator", "log=[jsonl]", *words), tmp_path):
        assert found == [limit_s]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_that_hangs_ends(blocks: bool, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    words = [
        *("train", "model.name=tiny", "sft.steps=0", "eval.tasks=1", "eval.samples=1", "watchdog_s=3", "log=[jsonl]"),
        "rollout.timeout_s=0",
        *(f"environment={tmp_path / 'stuck.py'}:Stuck", f"environment.blocks={str(blocks).lower()}"),
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    start = "import mtgrpo.stages.watchdog as w, mtgrpo.cli as c; w.CLOSING_S = 5; c.main()"
    ended = subprocess.run([sys.executable, "-c", start, *words], capture_output=True, text=True, timeout=300)
    assert f"nothing has moved for 3 seconds (watchdog_s); what everything waits for is in {tmp_path}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == (1 if blocks else 130)
    assert "stuck.py" in (tmp_path / "run" / "watchdog.txt").read_text()
