"""Parts of `chaos.py`: conversations of several turns with a tool that takes a moment, and a reward that differs."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.rewards import Reward
from mtgrpo.types import Message, Task, Trajectory


@dataclass
class Talk(Environment):
    """Says something that depends on what it was told, `turns` times."""

    turns: int = 4
    nap_s: float = 0.02

    async def start(self, task: Task) -> Opening:
        self._said, self._heard = 0, zlib.crc32(task.id.encode())
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        await asyncio.sleep(self.nap_s)
        self._said, self._heard = self._said + 1, zlib.crc32(message.content.encode(), self._heard)
        return Reply((Message("user", f"{self._heard % 97} and {self._said}"),), done=self._said == self.turns)


class Tokens(Reward):
    """Every conversation has a worth of its own."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(token % 7 for turn in trajectory.turns for token in turn.output))
