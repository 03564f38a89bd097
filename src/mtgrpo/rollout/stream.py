"""The next batch of scored groups, for one training step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from mtgrpo.rollout.group import Player, Rollout
from mtgrpo.tasks import TaskStream
from mtgrpo.types import Group


async def play_batch(player: Player, tasks: TaskStream, rollout: Rollout) -> list[Group]:
    """Play the next tasks; every conversation of the batch comes from the policy as it is now."""
    chosen = [next(tasks) for _ in range(rollout.prompts_per_step)]
    played: Counter[str] = Counter()
    groups: list[Coroutine[Any, Any, Group]] = []
    for task in chosen:
        again = played[task.id]  # in a small data set: then with other random numbers
        played[task.id] += 1
        scope = f"{player.scope}/again{again}" if again else player.scope
        groups.append(player.at(scope).play_group(task, rollout.group_size))
    return list(await asyncio.gather(*groups))
