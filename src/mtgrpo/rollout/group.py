"""The siblings of one task at once: played, retried where the world failed, scored."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from mtgrpo.condensers import Condenser
from mtgrpo.environments import Environment
from mtgrpo.extension import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rollout.chat import Chat
from mtgrpo.rollout.play import Limits, play
from mtgrpo.types import Attend, Group, Sample, Sampling, Status, Task, Trajectory

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
    timeout_s: float = 0.0  # of one attempt at a conversation, training meanwhile too; what exceeds it fails; 0 = none
    max_staleness: int = 0  # weight updates between a group's admission and its training; 0 = train, then play
    in_play: float = 1.5  # batches of groups played at once where max_staleness > 0: more hides slower tools, is staler
    extra_siblings: int = 0  # played beside `group_size`; the first to finish are trained: quicker, biased to the quick

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
        if self.in_play <= 1:
            raise ConfigError(f"rollout.in_play must be above 1, got {self.in_play}: nothing is played ahead otherwise")
        for name in ("retries", "timeout_s", "max_staleness", "extra_siblings"):
            if getattr(self, name) < 0:
                raise ConfigError(f"rollout.{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Player:
    """All that is the same for every conversation of a run."""

    environment: Environment
    chat: Chat
    reward: Reward
    sampling: Sampling
    limits: Limits
    condenser: Condenser
    retries: int
    timeout_s: float
    open_conversation: OpenConversation
    attend: Attend | None  # None: the engine cannot tell
    slots: asyncio.Semaphore  # bounds the conversations open at once
    scope: str = "train/0"  # what is played for: part of the key of every random number

    def at(self, scope: str, temperature: float | None = None) -> Player:
        """The same, played for another purpose and perhaps at another temperature."""
        if temperature is None:
            return dataclasses.replace(self, scope=scope)
        return dataclasses.replace(
            self, scope=scope, sampling=dataclasses.replace(self.sampling, temperature=temperature)
        )

    async def play_group(self, task: Task, size: int, extra: int = 0) -> Group:
        """Play siblings of `task` at once and score them; failed ones have status FAILED and no reward.

        Of `size` + `extra` siblings the group has the first `size` that end without failure; the others are given up.
        """
        playing = [asyncio.ensure_future(self.play_one(task, sibling)) for sibling in range(size + extra)]
        try:
            if not extra:
                return self._scored(Group(task, list(await asyncio.gather(*playing))))
            ended: list[Trajectory] = []
            for one in asyncio.as_completed(playing):
                ended.append(await one)
                if sum(t.status is not Status.FAILED for t in ended) == size:
                    break
            ended.sort(key=lambda trajectory: (trajectory.status is Status.FAILED, trajectory.sibling))
            return self._scored(Group(task, ended[:size]))
        finally:
            for one in playing:
                one.cancel()

    async def play_one(self, task: Task, sibling: int) -> Trajectory:
        """Play one sibling, unscored; a failure of the world is retried with a fresh environment, then recorded."""
        asked = time.perf_counter()
        async with self.slots:  # kept for all attempts: who plays when must not depend on when others failed
            queued_s = time.perf_counter() - asked
            trajectory = await self._attempt(task, sibling, 0)
            for attempt in range(1, self.retries + 1):
                if trajectory.status is not Status.FAILED:
                    break
                trajectory = await self._attempt(task, sibling, attempt)
                trajectory.attempts = attempt + 1
        trajectory.sibling, trajectory.queued_s = sibling, queued_s
        return trajectory

    def _scored(self, group: Group) -> Group:
        """The group, all that did not fail of it scored together."""
        began = time.perf_counter()
        played = [t for t in group.trajectories if t.status is not Status.FAILED]
        rewards = self.reward.rewards(played) if played else []
        if len(rewards) != len(played):
            raise ConfigError(
                f"reward {type(self.reward).__name__} gave {len(rewards)} rewards for the {len(played)} trajectories "
                f"of task {group.task.id}; it must give one for each"
            )
        for trajectory, reward in zip(played, rewards, strict=True):
            trajectory.reward = float(reward)
            self._score_turns(trajectory)
        group.score_s = time.perf_counter() - began
        return group

    def _score_turns(self, trajectory: Trajectory) -> None:
        name = f"reward {type(self.reward).__name__}"
        trajectory.turn_rewards = [float(amount) for amount in self.reward.turn_rewards(trajectory)]
        if wrong := [amount for amount in (trajectory.reward, *trajectory.turn_rewards) if not math.isfinite(amount)]:
            raise ConfigError(f"{name} gave {wrong[0]} for task {trajectory.task.id}; it must be finite")
        if len(trajectory.turn_rewards) not in (0, len(trajectory.turns)):
            raise ConfigError(
                f"{name} gave {len(trajectory.turn_rewards)} rewards for the {len(trajectory.turns)} turns of task "
                f"{trajectory.task.id}; give one for each, or none"
            )

    async def _attempt(self, task: Task, sibling: int, attempt: int) -> Trajectory:
        deadline = asyncio.timeout(self.timeout_s or None)
        try:
            async with deadline, self.open_conversation(f"{self.scope}/attempt{attempt}", task.id, sibling) as sample:
                return await play(
                    task, self.environment, self.chat, sample, self.sampling, self.limits, self.condenser, self.attend
                )
        except ConfigError:
            raise
        except TimeoutError as error:
            why = f"it took longer than rollout.timeout_s={self.timeout_s}" if deadline.expired() else str(error)
            return Trajectory(task, status=Status.FAILED, reason=f"TimeoutError: {why}")
        except Exception as error:  # whatever a tool or an environment raises is data: it is counted and shown
            return Trajectory(task, status=Status.FAILED, reason=f"{type(error).__name__}: {error}")
