"""Rewards that work, or fail, in a process of their own, which imports this file: nothing here needs torch."""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mtgrpo.parts import RunContext
from mtgrpo.rewards import Reward, Score
from mtgrpo.types import Trajectory


@dataclass
class Poisoned(Reward):
    """What it makes of the message "poison" ends its process."""

    cpu_heavy = True

    def reward(self, trajectory: Trajectory) -> float:
        if trajectory.final == "poison":
            os._exit(9)
        time.sleep(0.2)
        return 1.0


@dataclass
class Leaves(Reward):
    """Ends the program, or cancels what asks it, where the message says so."""

    def reward(self, trajectory: Trajectory) -> float:
        if trajectory.final == "exit":
            sys.exit(3)
        if trajectory.final == "cancel":
            raise asyncio.CancelledError
        return 1.0


@dataclass
class LeavesItsProcess(Leaves):
    """The same in another process."""

    cpu_heavy = True


@dataclass
class Elsewhere(Reward):
    """Tells its process; it opens something of its own."""

    cpu_heavy = True
    index = 0

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Elsewhere]:
        running = copy.copy(self)
        running.index = 1
        yield running

    def reward(self, trajectory: Trajectory) -> Score:
        return Score(float(os.getpid()), {"index": self.index})


@dataclass
class Hangs(Reward):
    """Takes for ever over the task "bad"."""

    cpu_heavy = True

    def reward(self, trajectory: Trajectory) -> float:
        if trajectory.task.id == "bad":
            time.sleep(1000)
        return 1.0


@dataclass
class Niceness(Reward):
    """How far its process gives way."""

    cpu_heavy = True

    def reward(self, trajectory: Trajectory) -> float:
        return float(os.nice(0))
