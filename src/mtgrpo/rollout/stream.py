"""Groups for training, played ahead of the trainer as far as `max_staleness` allows; every one of them is trained.

A group that is admitted at policy version v (the number of weight updates) is due at version v + max_staleness: it is
trained then or before, unless a filter leaves it out or has refilled the batch with more than it needs. A batch is the
groups that are due, which it waits for, and then what else has finished, the oldest first, as long as all
that is left can still be trained in time. `in_play` times `prompts_per_step` groups are in play, and one more for each
that others have overtaken, but no more than could be trained in time. So quick tasks go on while slow
ones are played, no group is older than `max_staleness` updates when it is trained, none is thrown away, and a slow task
is trained as often as a quick one. With `max_staleness` 0 everything is due at once: synchronous training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mtgrpo.rollout.group import Player, Rollout
from mtgrpo.tasks import TaskStream
from mtgrpo.types import EngineError, Group, Status, Task


@dataclass(eq=False)
class Playing:
    """One admitted group."""

    version: int  # of the policy when it was admitted
    epoch: int  # the pass over the tasks that it belongs to, from 0
    group: asyncio.Task[Group] = field(init=False)
    finished_s: float = 0.0  # when it was finished, by `time.perf_counter`
    overtaken: bool = False  # a later one was trained before it


@dataclass(frozen=True)
class Played:
    """The groups of one training step, in the order of their admission, and how they came; see `describe_stream`."""

    groups: list[Group]
    trained: list[Group]  # those of them that are: as many as a batch has, unless a filter left too few
    left_out: int  # how many `keeps` left out
    admitted: list[int]  # the version of the policy at which each was
    queue_s: list[float]  # for how long each was finished and not trained
    arrived: list[Group]  # what has finished since the batch before, whether it is in this one or not


class Stream:
    """Admits tasks and hands out their groups."""

    def __init__(
        self,
        player: Player,
        tasks: TaskStream,
        settings: Rollout,
        keeps: Callable[[Group], bool] = lambda group: True,
        batches: int = 1,  # that are played for one where `keeps` leaves groups out, at most
    ) -> None:
        self._player = player
        self._tasks = tasks
        self._settings = settings
        self._keeps, self._batches = keeps, batches
        self._chosen_so_far: list[Playing] = []  # for the batch that is being put together
        self._playing: list[Playing] = []  # admitted and not handed out, the oldest first
        self._arrived: list[Group] = []
        self._names: Counter[tuple[int, str]] = Counter()  # how often a task was admitted at a version

    @property
    def epoch(self) -> int:
        """Passes over the tasks of which every group was handed out."""
        return min((playing.epoch for playing in self._playing), default=self._tasks.epoch)

    @property
    def finished(self) -> list[Group]:
        """Groups that have finished and are not part of a batch yet."""
        playing = [*self._chosen_so_far, *self._playing]
        done = [p.group for p in playing if p.group.done() and not p.group.cancelled()]
        return [group.result() for group in done if group.exception() is None]

    async def batch(self, version: int) -> Played:
        """The groups to be trained by the policy of this version.

        Raises EngineError when the engine failed in every conversation of the batch.
        """
        trained: list[Group] = []
        queue_s: list[float] = []
        for _ in range(self._batches):
            more = await self._next(version)
            now = time.perf_counter()
            queue_s += [now - playing.finished_s for playing in more]
            self._chosen_so_far += more
            trained += [group for playing in more if self._keeps(group := playing.group.result())]
            if len(trained) >= self._settings.prompts_per_step:
                break
        chosen, self._chosen_so_far = self._chosen_so_far, []
        arrived, self._arrived = self._arrived, []
        return Played(
            groups=[playing.group.result() for playing in chosen],
            trained=trained[: self._settings.prompts_per_step],
            left_out=len(chosen) - len(trained),
            admitted=[playing.version for playing in chosen],
            queue_s=queue_s,
            arrived=arrived,
        )

    async def _next(self, version: int) -> list[Playing]:
        """As many groups as a batch has, handed out."""
        self._admit(version)
        while (chosen := self._chosen(version)) is None:
            await asyncio.wait([p.group for p in self._playing if not p.group.done()], return_when="FIRST_COMPLETED")
        self._hand_out(chosen)
        _check_engine([playing.group.result() for playing in chosen])
        return chosen

    async def close(self) -> None:
        """End what is still being played."""
        left = [playing.group for playing in self._playing]
        self._playing = []
        for group in left:
            group.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _admit(self, version: int) -> None:
        settings, batch = self._settings, self._settings.prompts_per_step
        in_time = (settings.max_staleness + 1) * batch
        wanted = math.ceil(settings.in_play * batch)
        while len(self._playing) < min(in_time, wanted + sum(playing.overtaken for playing in self._playing)):
            epoch, task = self._tasks.epoch, next(self._tasks)
            again = self._names[version, task.id]  # in a small data set: then with other random numbers
            self._names[version, task.id] += 1
            scope = f"train/{version + 1}" + (f"/again{again}" if again else "")
            playing = Playing(version, epoch)
            playing.group = asyncio.create_task(self._play(playing, task, scope))
            self._playing.append(playing)
        self._names = Counter({key: count for key, count in self._names.items() if key[0] == version})

    async def _play(self, playing: Playing, task: Task, scope: str) -> Group:
        settings = self._settings
        group = await self._player.at(scope).play_group(task, settings.group_size, settings.extra_siblings)
        playing.finished_s = time.perf_counter()
        self._arrived.append(group)
        return group

    def _chosen(self, version: int) -> list[Playing] | None:
        """The next batch; None while it is not complete. Raises what went wrong in a group."""
        done = [playing for playing in self._playing if playing.group.done()]
        for playing in done:
            playing.group.result()
        chosen = done[: self._settings.prompts_per_step]
        due = [p.version + self._settings.max_staleness for p in self._playing if p not in chosen]
        # The n-th of those that are left (from 0) can be trained n // prompts_per_step + 1 versions from now.
        in_time = all(last > version + n // self._settings.prompts_per_step for n, last in enumerate(due))
        return chosen if len(chosen) == self._settings.prompts_per_step and in_time else None

    def _hand_out(self, chosen: list[Playing]) -> None:
        last = self._playing.index(chosen[-1])
        for playing in self._playing[:last]:
            playing.overtaken = True
        self._playing = [playing for playing in self._playing if playing not in chosen]


def _check_engine(groups: list[Group]) -> None:
    """Raise EngineError when every conversation failed, and the engine is why: it will not get better."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    name = f"{EngineError.__name__}: "
    if all(t.status is Status.FAILED and t.reason.startswith(name) for t in played):
        raise EngineError(f"every conversation failed: {played[0].reason.removeprefix(name)}")


def describe_stream(played: Played, version: int) -> dict[str, float]:
    """Staleness in weight updates: of groups since their admission, of tokens since they were sampled; queueing time.

    `version` is that of the policy which trains on the groups. Where what arrives is on average longer than what is
    trained (`rollout/sampled_tokens`), long conversations are still waited for.
    """
    versions = [v for g in played.groups for t in g.trajectories for turn in t.turns for v in turn.versions]
    lengths = [t.sampled_tokens for g in played.arrived for t in g.trajectories]
    return {
        "rollout/arrived_tokens": sum(lengths) / max(1, len(lengths)),
        "rollout/staleness_max": float(version - min(played.admitted)),
        "rollout/token_staleness": sum(version - v for v in versions) / max(1, len(versions)),
        "time/queue_s": sum(played.queue_s) / len(played.queue_s),
    }
