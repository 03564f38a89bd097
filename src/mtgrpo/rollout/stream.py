"""The next batch of scored groups, for one training step."""

from __future__ import annotations

import asyncio

from mtgrpo.rollout.group import Player, Rollout
from mtgrpo.tasks import TaskStream
from mtgrpo.types import Group


async def play_batch(player: Player, tasks: TaskStream, rollout: Rollout) -> list[Group]:
    """Play the next tasks; every conversation of the batch comes from the policy as it is now."""
    chosen = [next(tasks) for _ in range(rollout.prompts_per_step)]
    return list(await asyncio.gather(*(player.play_group(task, rollout.group_size) for task in chosen)))
