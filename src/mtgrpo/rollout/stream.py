"""Groups for training, run ahead of the trainer as far as `max_staleness` allows; every one of them is trained.

A group that is admitted at policy version v (the number of weight updates) has the deadline v + max_staleness: it is
trained then or before, unless a filter leaves it out or has refilled the batch with more than it needs. A batch is the
groups at their deadline, which it waits for, and then what else has finished, the oldest first, as long as all
that is left can still be trained in time. `ahead` times `prompts_per_step` groups run at once, and one more for each
that others have overtaken, but no more than could be trained in time. So quick tasks go on while slow
ones run, no group is older than `max_staleness` updates when it is trained, none is thrown away, and a slow task
is trained as often as a quick one. With `max_staleness` 0 every deadline is now: synchronous training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtgrpo.errors import RunError
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import RolloutSettings
from mtgrpo.tasks import TaskStream
from mtgrpo.types import Group, Status, Task


@dataclass(eq=False)
class PendingGroup:
    """One admitted group."""

    number: int  # of its admission, from 0
    position: dict[str, Any]  # of the task stream, whose next task is its
    version: int  # of the policy when it was admitted
    epoch: int  # the pass over the tasks that it belongs to, from 0
    group: asyncio.Task[Group] = field(init=False)
    finished_s: float = 0.0  # when it was finished, by `time.perf_counter`
    overtaken: bool = False  # a later one was trained before it


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step, in the order of their admission, and how they came."""

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
        runner: RolloutRunner,
        tasks: TaskStream,
        settings: RolloutSettings,
        keeps: Callable[[Group], bool] = lambda group: True,
        batches: int = 1,  # that are run for one where `keeps` leaves groups out, at most
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._settings = settings
        self._keeps, self._batches = keeps, batches
        self._chosen_so_far: list[PendingGroup] = []  # for the batch that is being put together
        self._pending: list[PendingGroup] = []  # admitted and not handed out, the oldest first
        self._arrived: list[Group] = []
        self._names: Counter[tuple[int, str]] = Counter()  # how often a task was admitted at a version
        self._drawn = 0  # tasks that were taken from the stream
        self._passed: set[int] = set()  # which of the next ones were trained before the run was resumed

    @property
    def epoch(self) -> int:
        """Passes over the tasks of which every group was handed out."""
        return min((pending.epoch for pending in self._pending), default=self._tasks.epoch)

    @property
    def finished(self) -> list[Group]:
        """Groups that have finished and are not part of a batch yet."""
        pending = [*self._chosen_so_far, *self._pending]
        done = [p.group for p in pending if p.group.done() and not p.group.cancelled()]
        return [group.result() for group in done if group.exception() is None]

    def state_dict(self) -> dict[str, Any]:
        """Where another stream goes on so that it runs every group that was not handed out, and no other.

        That is the position of the first such group, and how far behind it those lie that were handed out.
        """
        left = sorted([*self._chosen_so_far, *self._pending], key=lambda pending: pending.number)
        first, position = (left[0].number, left[0].position) if left else (self._drawn, self._tasks.state_dict())
        handed_out = set(range(first, self._drawn)) - {pending.number for pending in left}
        later = {number for number in self._passed if number >= self._drawn}
        return {"tasks": position, "trained": sorted(number - first for number in handed_out | later)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, before the first batch. Raises ConfigError where the tasks are not what they were."""
        self._tasks.load_state_dict(state["tasks"])
        self._passed = set(state["trained"])

    async def batch(self, version: int) -> RolloutBatch:
        """The groups to be trained by the policy of this version.

        Raises RunError when more of its conversations failed than `rollout.max_failed` allows.
        """
        trained: list[Group] = []
        queue_s: list[float] = []
        for _ in range(self._batches):
            more = await self._next(version)
            now = time.perf_counter()
            queue_s += [now - pending.finished_s for pending in more]
            self._chosen_so_far += more
            trained += [group for pending in more if self._keeps(group := pending.group.result())]
            if len(trained) >= self._settings.prompts_per_step:
                break
        chosen, self._chosen_so_far = self._chosen_so_far, []
        arrived, self._arrived = self._arrived, []
        return RolloutBatch(
            groups=[pending.group.result() for pending in chosen],
            trained=trained[: self._settings.prompts_per_step],
            left_out=len(chosen) - len(trained),
            admitted=[pending.version for pending in chosen],
            queue_s=queue_s,
            arrived=arrived,
        )

    async def _next(self, version: int) -> list[PendingGroup]:
        """As many groups as a batch has, handed out."""
        self._admit(version)
        while (chosen := self._chosen(version)) is None:
            await asyncio.wait([p.group for p in self._pending if not p.group.done()], return_when="FIRST_COMPLETED")
        _check_failed([pending.group.result() for pending in chosen], self._settings.max_failed)
        self._hand_out(chosen)
        return chosen

    async def close(self) -> None:
        """End what still runs."""
        left = [pending.group for pending in self._pending]
        self._pending = []
        for group in left:
            group.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _admit(self, version: int) -> None:
        settings, batch = self._settings, self._settings.prompts_per_step
        in_time = (settings.max_staleness + 1) * batch
        wanted = math.ceil(settings.ahead * batch)
        while len(self._pending) < min(in_time, wanted + sum(pending.overtaken for pending in self._pending)):
            position, epoch, task = self._tasks.state_dict(), self._tasks.epoch, next(self._tasks)
            number, self._drawn = self._drawn, self._drawn + 1
            if number in self._passed:
                continue
            again = self._names[version, task.id]  # in a small data set: then with other random numbers
            self._names[version, task.id] += 1
            scope = f"train/{version + 1}" + (f"/again{again}" if again else "")
            pending = PendingGroup(number, position, version, epoch)
            pending.group = asyncio.create_task(self._run(pending, task, scope))
            self._pending.append(pending)
        self._names = Counter({key: count for key, count in self._names.items() if key[0] == version})

    async def _run(self, pending: PendingGroup, task: Task, scope: str) -> Group:
        settings = self._settings
        group = await self._runner.at(scope).run_group(task, settings.group_size, settings.extra_samples)
        pending.finished_s = time.perf_counter()
        self._arrived.append(group)
        return group

    def _chosen(self, version: int) -> list[PendingGroup] | None:
        """The next batch; None while it is not complete. Raises what went wrong in a group."""
        done = [pending for pending in self._pending if pending.group.done()]
        for pending in done:
            pending.group.result()
        chosen = done[: self._settings.prompts_per_step]
        deadline_versions = [p.version + self._settings.max_staleness for p in self._pending if p not in chosen]
        # The n-th of those that are left (from 0) can be trained n // prompts_per_step + 1 versions from now.
        in_time = all(last > version + n // self._settings.prompts_per_step for n, last in enumerate(deadline_versions))
        return chosen if len(chosen) == self._settings.prompts_per_step and in_time else None

    def _hand_out(self, chosen: list[PendingGroup]) -> None:
        last = self._pending.index(chosen[-1])
        for pending in self._pending[:last]:
            pending.overtaken = True
        self._pending = [pending for pending in self._pending if pending not in chosen]


def _check_failed(groups: list[Group], allowed: float) -> None:
    """Raise RunError when more than the share `allowed` of the conversations failed."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    causes = Counter(t.reason for t in trajectories if t.status is Status.FAILED)
    if causes.total() > allowed * len(trajectories):
        why, often = causes.most_common(1)[0]
        raise RunError(
            f"{causes.total()} of the {len(trajectories)} conversations of a batch failed, more than "
            f"rollout.max_failed={allowed} allows; {often} of them because of {why}; "
            "all are in trajectories/untrained.jsonl"
        )
