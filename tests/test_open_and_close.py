"""Parts of a run are opened once, closed once, and nothing of them is left, however the run ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import counted
from mtgrpo import cli
from mtgrpo.config.compose import preset
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import EngineError
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Score, opened, scores
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.stages.run import ENDING, _ended_by_signals, open_parts
from mtgrpo.types import Completion, Finish, Message, Status, Task, Trajectory, Turn
from scripted import ScriptedEngine
from test_conversation import TASK, make_runner, said

FILE = counted.__file__
PARTS = {"Environment", "Tool", "Reward", "Condenser", "Task", "Sink"}
WORDS = [
    *(f"{group}={FILE}:Counted{group.title()}" for group in ("environment", "reward", "condenser", "task")),
    *(
        f"environment.tools=[{FILE}:CountedTool,calculator]",
        f"log=['{FILE}:CountedSink',jsonl]",
        "environment.call_retries=0",
    ),
    *("trainer.steps=2", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=8", "eval.tasks=2", "eval.samples=2", "environment.call_timeout_s=5"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]


def ran(folder: Path, what: str, *words: str, patch: pytest.MonkeyPatch) -> tuple[int, Counter[str]]:
    """The exit code of a run, and how often what was opened and closed; in a process of its own if that is killed."""
    log = folder / "log.txt"
    log.touch()
    patch.setenv(counted.LOG, str(log))
    patch.setenv(counted.WHAT, what)
    patch.chdir(folder)
    command = ["train", *WORDS, f"hydra.run.dir={folder}/run", *words]
    if what.startswith("SIG"):
        code = subprocess.run([sys.executable, "-m", "mtgrpo", *command], timeout=110, check=False).returncode
    else:
        with pytest.raises(SystemExit) as done:
            try:
                cli.main(command)
            except Exception as error:  # what would be shown with its traceback
                raise SystemExit(1) from error
        code = int(str(done.value.code))
    return code, Counter(log.read_text().splitlines())


@pytest.mark.parametrize(
    ("what", "words", "code"),
    [
        ("", [], 0),
        ("tool", [], 1),
        ("hang", ["rollout.timeout_s=0.3", "trainer.deterministic=false", "rollout.retries=0"], 1),
        ("engine", [], 1),
        ("SIGINT", [], 130),
        ("SIGTERM", [], 130),
    ],
)
def test_what_is_opened_is_closed_however_the_run_ends(
    what: str, words: Sequence[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "engine":
        ask = LocalEngine._ask

        async def broken(*arguments: Any) -> Completion:
            if counted.third():
                raise EngineError("out of memory")
            return await ask(*arguments)

        monkeypatch.setattr(LocalEngine, "_ask", broken)
    exit_code, seen = ran(tmp_path, what, *words, patch=monkeypatch)
    assert exit_code == code
    for part in PARTS:
        assert seen[f"open Counted{part}"] == seen[f"close Counted{part}"] == 1, (part, seen)
    assert seen["open conversation"] == seen["close conversation"] >= 3
    assert seen["open tool"] == seen["close tool"] >= 3
    notes = (tmp_path / "run" / "notes.txt").read_text()
    assert all(f"Counted{part} is open" in notes for part in PARTS - {"Sink"})


def test_the_handlers_of_signals_are_set_back() -> None:
    async def run() -> None:
        with _ended_by_signals():
            assert signal.getsignal(signal.SIGTERM) is not mine

    def mine(number: int, frame: Any) -> None: ...

    before = {number: signal.signal(number, mine) for number in ENDING}
    try:
        asyncio.run(run())
        assert all(signal.getsignal(number) is mine for number in ENDING)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_dry_run_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(tmp_path, "", "--dry-run", patch=monkeypatch) == (0, Counter())
    assert not (tmp_path / "run").exists()


def processes() -> int:
    """The children of this process, those that nobody has waited for included."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return sum(len(found.read_text().split()) for found in children)


async def test_a_thousand_conversations_with_a_process_each_leave_none() -> None:
    before = processes()
    engine = ScriptedEngine(lambda key, turn: said(f"#### {key.sample_index}"))
    runner = make_runner(engine, counted.Spawns(), retries=0, max_concurrent=50)
    groups = [runner.run_group(Task(str(number), TASK.messages), 10) for number in range(100)]
    last = asyncio.ensure_future(asyncio.gather(*groups[90:]))
    found = await asyncio.gather(*groups[:90])
    last.cancel()
    await asyncio.wait([last])
    statuses = Counter(t.status for group in found for t in group.trajectories)
    assert statuses == {Status.COMPLETED: 810, Status.FAILED: 90}
    assert processes() == before


# --- rewards beside the event loop


def told(text: str, sample_index: int = 0) -> Trajectory:
    turn = Turn([1], [sample_index], [0.0], [0], Finish.STOP, Message("assistant", text))
    return Trajectory(Task("task/1", (Message("user", "?"),)), sample_index, [turn])


async def test_a_reward_that_takes_long_lets_others_work(tmp_path: Path) -> None:
    """Whether it waits or computes: a coroutine that only needs its turn goes on all the time."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    async with opened(counted.Burns(seconds=0.2), RunContext(tmp_path, print, os.environ)) as burns:
        for reward in (burns, counted.Judge(seconds=0.2)):
            ticking = asyncio.create_task(tick())
            ticks = 0
            found = await scores(reward, [told("a"), told("b"), told("c")])
            ticking.cancel()
            assert all(isinstance(score, Score) for score in found)
            assert ticks > 5
            if reward is burns:
                assert os.getpid() not in {score.total for score in found if isinstance(score, Score)}
    assert multiprocessing.active_children() == []


async def test_a_judge_that_cannot_tell_fails_that_trajectory_alone() -> None:
    first, second, third = await scores(counted.Judge(seconds=0.0), [told("a"), told(""), told("c")])
    assert (first, third) == (Score(0.5), Score(0.5))
    assert isinstance(second, OSError)


async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async with opened(counted.Dies(folder=str(tmp_path)), RunContext(tmp_path, print, os.environ)) as reward:
        assert await scores(reward, [told("a")]) == [Score(1.0)]
    assert (tmp_path / "died").exists()


def graded(reward: object) -> RolloutRunner:
    runner = make_runner(ScriptedEngine(lambda key, turn: said(f"#### {key.sample_index}")), ToolUse())
    return replace(runner, reward=reward)


async def test_a_reward_that_fails_now_and_then_is_asked_again() -> None:
    group = await graded(counted.Fraction()).run_group(TASK, 40)
    assert {t.status for t in group.trajectories} == {Status.COMPLETED}
    assert counted.Fraction.calls == 42


async def test_what_cannot_be_scored_has_failed_and_is_not_worth_nothing() -> None:
    group = await graded(counted.Never()).run_group(TASK, 2)
    reasons = {(t.status, t.reason) for t in group.trajectories}
    assert reasons == {(Status.FAILED, "RewardError: Never: OSError: the grader is away")}


async def test_parts_are_closed_in_reverse_where_a_later_one_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(counted.LOG, str(tmp_path / "log.txt"))
    experiment = preset("calculator", *(word for word in WORDS if word.startswith(("environment", "reward", "task="))))

    def broken(self: object, context: RunContext) -> None:
        raise OSError("no judge")

    monkeypatch.setattr(type(experiment.reward), "open", broken)
    with pytest.raises(OSError, match="no judge"):
        async with open_parts(experiment, RunContext(tmp_path, print, os.environ)):
            pass
    lines = (tmp_path / "log.txt").read_text().splitlines()
    opened = [line.split()[1] for line in lines if line.startswith("open")]
    closed = [line.split()[1] for line in lines if line.startswith("close")]
    assert sorted(opened) == ["CountedEnvironment", "CountedTask", "CountedTool"]
    assert closed[-1] == "CountedTask" and sorted(closed) == sorted(opened)
