"""Parts of every kind that write down when they are opened and closed; each test's run has a file of its own for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtgrpo.condensers.keep_last import KeepLast
from mtgrpo.environments import Opening, Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.log import Sink
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Reward
from mtgrpo.tasks.calculator import Calculator
from mtgrpo.tools import Tool
from mtgrpo.types import Message, Task, ToolCall, Trajectory

LOG = "MTGRPO_TEST_LOG"  # the environment's variable that names the file
WHAT = "MTGRPO_TEST_WHAT"  # what is to happen in the third conversation


def write(line: str) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{line}\n")


def third() -> bool:
    """Whether the third conversation has begun."""
    return Path(os.environ[LOG]).read_text().count("open conversation") >= 3


class Counted:
    """Opens and closes; which part it is for is the name of the class."""

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Any]:
        assert context.folder.is_dir() and context.secrets["PATH"]
        write(f"open {type(self).__name__}")
        try:
            async with super().open(context) as running:  # type: ignore[misc]
                context.note(f"{type(self).__name__} is open")
                yield running
        finally:
            await asyncio.sleep(0)
            write(f"close {type(self).__name__}")


@dataclass
class CountedEnvironment(Counted, ToolUse):
    """The first message of every conversation is taken for a call."""

    max_turns: int = 2

    async def start(self, task: Task) -> Opening:
        write("open conversation")
        self.called = False
        return await super().start(task)

    async def step(self, message: Message) -> Reply:
        calls = () if self.called else (ToolCall("CountedTool", {"number": 1}),)
        self.called = True
        return await super().step(Message("assistant", tool_calls=calls))

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        await super().stop()
        write("close conversation")


@dataclass
class CountedTool(Counted, Tool):
    """Goes wrong where it is asked to."""

    async def start(self, task: Task) -> None:
        write("open tool")

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        write("close tool")

    async def __call__(self, number: int) -> int:
        """Double a number."""
        if third():
            what = os.environ.get(WHAT, "")
            if what == "tool":
                raise OSError("the line is dead")
            if what == "hang":
                await asyncio.Event().wait()
            if what in ("SIGINT", "SIGTERM"):
                if "signal" not in Path(os.environ[LOG]).read_text():  # a second Ctrl-C ends a program at once
                    write("signal")
                    os.kill(os.getpid(), signal.Signals[what])
                await asyncio.sleep(60)
        return 2 * number


@dataclass
class CountedReward(Counted, Reward):
    """Whatever the second token is."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.turns[0].output[0] % 7)


@dataclass
class CountedCondenser(Counted, KeepLast):
    """As keep_last."""


@dataclass
class CountedTask(Counted, Calculator):
    """As calculator."""


class CountedSink(Counted, Sink):
    """Keeps nothing."""

    def stage(self, name: str, total: int) -> None: ...
    def log(self, metrics: Any, step: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class Fraction(Reward):
    """Raises in 5 % of calls."""

    calls = 0

    def reward(self, trajectory: Trajectory) -> float:
        Fraction.calls += 1
        if Fraction.calls % 20 == 7:
            raise OSError("the grader is away")
        return float(trajectory.turns[0].output[0] % 7)


@dataclass
class Never(Reward):
    """Always raises."""

    def reward(self, trajectory: Trajectory) -> float:
        raise OSError("the grader is away")


@dataclass
class Burns(Reward):
    """Takes `seconds` of processor time."""

    cpu_heavy = True
    seconds: float = 1.0

    def reward(self, trajectory: Trajectory) -> float:
        began = time.process_time()
        while time.process_time() - began < self.seconds:
            pass
        return float(os.getpid())


@dataclass
class Dies(Burns):
    """Its process ends the first time."""

    folder: str = ""

    def reward(self, trajectory: Trajectory) -> float:
        mark = Path(self.folder) / "died"
        if not mark.exists():
            mark.touch()
            os._exit(1)
        return 1.0


@dataclass
class Judge(Reward):
    """Waits, as for an answer; cannot tell where nothing was said."""

    seconds: float = 1.0

    async def rewards(self, siblings: Any) -> Any:
        return await asyncio.gather(*map(self.ask, siblings), return_exceptions=True)

    async def ask(self, trajectory: Trajectory) -> float:
        await asyncio.sleep(self.seconds)
        if not trajectory.final:
            raise OSError("no verdict")
        return 0.5


@dataclass
class Spawns(ToolUse):
    """A process for each conversation."""

    async def start(self, task: Task) -> Opening:
        self.process = await asyncio.create_subprocess_exec("sleep", "1000")
        return await super().start(task)

    async def step(self, message: Message) -> Reply:
        if task_fails(message):
            raise OSError("the shop is closed")
        return Reply(done=True)

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()


def task_fails(message: Message) -> bool:
    return message.content.endswith("7")
