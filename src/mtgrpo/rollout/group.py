"""The siblings of one task at once: played, retried where the world failed, scored."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from mtgrpo.environments import Environment
from mtgrpo.extension import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rollout.chat import Chat
from mtgrpo.rollout.play import Limits, play
from mtgrpo.types import EngineError, Group, Sample, Sampling, Status, Task, Trajectory

OpenConversation = Callable[[str, str, int], AbstractAsyncContextManager[Sample]]  # (scope, task id, sibling)


@dataclass
class Rollout:
    """How many conversations, and how long they may grow."""

    group_size: int = 8  # siblings per task
    prompts_per_step: int = 8  # tasks per training step
    max_concurrent: int = 512  # conversations open at once
    max_trajectory_tokens: int = 4096  # sampled by the policy, over all turns
    max_trajectory_tool_tokens: int = 8192  # added by the environment, over all turns
    retries: int = 1  # fresh attempts for a conversation that failed through no fault of the model

    def __post_init__(self) -> None:
        for name in (
            "group_size",
            "prompts_per_step",
            "max_concurrent",
            "max_trajectory_tokens",
            "max_trajectory_tool_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} must be >= 1, got {getattr(self, name)}")
        if self.retries < 0:
            raise ConfigError(f"rollout.retries must be >= 0, got {self.retries}")


@dataclass(frozen=True)
class Player:
    """All that is the same for every conversation of a run."""

    environment: Environment
    chat: Chat
    reward: Reward
    sampling: Sampling
    limits: Limits
    retries: int
    open_conversation: OpenConversation
    slots: asyncio.Semaphore  # bounds the conversations open at once
    scope: str = "train/0"  # what is played for: part of the key of every random number

    def at(self, scope: str, temperature: float | None = None) -> Player:
        """The same, played for another purpose and perhaps at another temperature."""
        if temperature is None:
            return dataclasses.replace(self, scope=scope)
        return dataclasses.replace(
            self, scope=scope, sampling=dataclasses.replace(self.sampling, temperature=temperature)
        )

    async def play_group(self, task: Task, size: int) -> Group:
        """Play `size` siblings of `task` at once and score them; failed ones have status FAILED and no reward."""
        return Group(task, list(await asyncio.gather(*(self.play_one(task, sibling) for sibling in range(size)))))

    async def play_one(self, task: Task, sibling: int) -> Trajectory:
        """Play one sibling; a failure of the world is retried with a fresh environment, then recorded."""
        async with self.slots:  # kept for all attempts: who plays when must not depend on when others failed
            trajectory = await self._attempt(task, sibling, 0)
            for attempt in range(1, self.retries + 1):
                if trajectory.status is not Status.FAILED:
                    break
                trajectory = await self._attempt(task, sibling, attempt)
                trajectory.attempts = attempt + 1
        trajectory.sibling = sibling
        if trajectory.status is not Status.FAILED:
            trajectory.reward = float(self.reward.reward(trajectory))
            if not math.isfinite(trajectory.reward):
                name = type(self.reward).__name__
                raise ConfigError(f"reward {name} gave {trajectory.reward} for task {task.id}; it must be finite")
        return trajectory

    async def _attempt(self, task: Task, sibling: int, attempt: int) -> Trajectory:
        try:
            async with self.open_conversation(f"{self.scope}/attempt{attempt}", task.id, sibling) as sample:
                return await play(task, self.environment, self.chat, sample, self.sampling, self.limits)
        except (ConfigError, EngineError):
            raise
        except Exception as error:  # whatever a tool or an environment raises is data: it is counted and shown
            return Trajectory(task, status=Status.FAILED, reason=f"{type(error).__name__}: {error}")
