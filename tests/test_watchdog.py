"""A run in which nothing moves says where everything waits and ends; one that moves is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtgrpo.engines import Key
from mtgrpo.engines.scripted import ScriptedEngine
from mtgrpo.stages.watchdog import Watchdog, open_watchdog, write_state
from mtgrpo.types import Sampling
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
    write_state(tmp_path / "state.txt", asyncio.get_running_loop(), ScriptedEngine(script))
    task.cancel()
    said_of_it = (tmp_path / "state.txt").read_text()
    assert "# requests to the engine: 0" in said_of_it
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

    def work() -> object:
        yield
        yield
        return 7

    running = watchdog.training(work())  # type: ignore[arg-type]
    assert [next(running), next(running), next(running, "done")] == [None, None, "done"]
    assert len(moved) == 3


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


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_that_hangs_ends(blocks: bool, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    words = [
        *("train", "recipe=calculator", "sft.steps=0", "eval.tasks=1", "eval.samples=1", "watchdog_s=3", "log=[jsonl]"),
        *(f"environment={tmp_path / 'stuck.py'}:Stuck", f"environment.blocks={str(blocks).lower()}"),
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    start = "import mtgrpo.stages.watchdog as w, mtgrpo.cli as c; w.CLOSING_S = 5; c.main()"
    ended = subprocess.run([sys.executable, "-c", start, *words], capture_output=True, text=True, timeout=300)
    assert f"nothing has moved for watchdog_s=3 seconds; what everything waits for is in {tmp_path}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == (1 if blocks else 130)
    assert "stuck.py" in (tmp_path / "run" / "watchdog.txt").read_text()
