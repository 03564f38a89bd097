"""Groups for training, run ahead of the trainer as far as `max_staleness` allows; every one of them is trained.

A group that is admitted at policy version v (the number of weight updates) has the deadline v + max_staleness: it is
trained then or before, unless a filter leaves it out or has refilled the batch with more than it needs. A batch is the
groups at their deadline, which it waits for, and then what else has finished, the oldest first, as long as all
that is left can still be trained in time. `ahead` times `prompts_per_step` groups run at once, and one more for each
that others have overtaken, but no more than could be trained in time. So quick tasks go on while slow
ones run, no group is older than `max_staleness` updates when it is trained, none is thrown away, and a slow task
is trained as often as a quick one. With `max_staleness` 0 every deadline is now: synchronous training.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtgrpo.errors import ConfigError, RunError
from mtgrpo.journal import Event, Journal
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import Curriculum, Difficulty, RolloutSettings
from mtgrpo.tasks import ENDED, TaskStream
from mtgrpo.types import Group, Task


@dataclass(eq=False)
class PendingGroup:
    """One admitted group."""

    number: int  # of its admission, from 0
    position: dict[str, Any]  # of the task stream, whose next task is its
    version: int  # of the policy when it was admitted
    epoch: int  # the pass over the tasks that it belongs to, from 0
    overtaken: bool  # a later one was trained before it
    group: asyncio.Task[Group] = field(init=False)
    finished_s: float = 0.0  # when it was finished, by `time.perf_counter`


@dataclass(frozen=True)
class RolloutBatch:
    """The groups of one training step, in the order of their admission, and how they came."""

    groups: list[Group]
    trained: list[Group]  # those of them that are: as many as a batch has, unless a filter left too few
    left_out: int  # how many `keeps` left out
    admitted: list[int]  # the version of the policy at which each was
    queue_s: list[float]  # for how long each was finished and not trained
    arrived: list[Group]  # what has finished since the batch before, whether it is in this one or not
    skipped: int  # tasks that the curriculum has passed over since then


class Stream:
    """Admits tasks and hands out their groups."""

    def __init__(
        self,
        runner: RolloutRunner,
        tasks: TaskStream,
        settings: RolloutSettings,
        keeps: Callable[[Group], bool] = lambda group: True,
        batches: int = 1,  # that are run for one where `keeps` leaves groups out, at most
        journal: Journal | None = None,
        difficulty: Difficulty | None = None,
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
        self._passed: set[int] = set()  # which of the next ones were trained or skipped before the run was resumed
        self._chosen_before = 0  # tasks that were taken then
        self._journal = journal or Journal()
        self._difficulty = difficulty or Difficulty(Curriculum(), 1.0, 0)
        self._skipped = 0  # tasks passed over since the last batch
        self._live = asyncio.Event()  # unset while batches that were trained before a crash are trained again

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

        That is number and position of the first such group, the numbers after it of those that were handed out or
        skipped, how far tasks were taken, and what was measured of them.
        """
        left = sorted([*self._chosen_so_far, *self._pending], key=lambda pending: pending.number)
        first, position = (left[0].number, left[0].position) if left else (self._drawn, self._tasks.state_dict())
        handed_out = set(range(first, self._drawn)) - {pending.number for pending in left}
        later = {number for number in self._passed if number >= self._drawn}
        drawn = max(self._drawn, self._chosen_before)
        known = {"drawn": drawn, "success": dict(self._difficulty.success)}
        return {"tasks": position, "first": first, "trained": sorted(handed_out | later), **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, before the first batch. Raises ConfigError where the tasks are not what they were."""
        self._tasks.load_state_dict(state["tasks"])
        self._drawn, self._passed, self._chosen_before = state["first"], set(state["trained"]), state["drawn"]
        self._difficulty.success = dict(state["success"])

    def go_on(self, version: int) -> None:
        """After `load_state_dict`: take back from the journal what a run did that had come to `version` or further.

        Its batches come again as they were; meanwhile no conversation runs. Then those that had begun go on.
        """
        self._journal.go_on(version, self._drawn, self._passed)

    async def batch(self, version: int) -> RolloutBatch:
        """The groups to be trained by the policy of this version.

        Raises RunError when more of its conversations failed than `rollout.max_failed` allows.
        """
        trained: list[Group] = []
        queue_s: list[float] = []
        self._journal.begin(version)
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
        skipped, self._skipped = self._skipped, 0
        return RolloutBatch(
            groups=[pending.group.result() for pending in chosen],
            trained=trained[: self._settings.prompts_per_step],
            left_out=len(chosen) - len(trained),
            admitted=[pending.version for pending in chosen],
            queue_s=queue_s,
            arrived=arrived,
            skipped=skipped,
        )

    async def _next(self, version: int) -> list[PendingGroup]:
        """As many groups as a batch has, handed out."""
        before = self._journal.batch(version)
        self._admit(version, again=before is not None)
        if before is not None:
            chosen = [pending for pending in self._pending if pending.number in before]
            await asyncio.wait([pending.group for pending in chosen])
        else:
            self._live.set()
            while (chosen := self._chosen(version)) is None:
                running = [pending.group for pending in self._pending if not pending.group.done()]
                await asyncio.wait(running, return_when="FIRST_COMPLETED")
            _check_failed([pending.group.result() for pending in chosen], self._settings.max_failed)
            for pending in chosen:
                self._note_finished(pending.number, pending.group.result(), failed=True)
            self._journal.add(batch=version, groups=[pending.number for pending in chosen])
        for pending in self._pending[: self._pending.index(chosen[-1])]:
            pending.overtaken = True
        self._pending = [pending for pending in self._pending if pending not in chosen]
        self._difficulty.measure(pending.group.result() for pending in chosen)
        return chosen

    async def close(self) -> None:
        """End what still runs."""
        left = [pending.group for pending in self._pending]
        self._pending = []
        for group in left:
            group.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._journal.close()

    def _admit(self, version: int, again: bool) -> None:
        while self._may_admit(version, again):
            position, epoch, task = self._tasks.state_dict(), self._tasks.epoch, next(self._tasks, None)
            if task is None:
                raise ConfigError(ENDED)
            number, self._drawn = self._drawn, self._drawn + 1
            if number in self._passed:
                continue
            event: Event | None = self._journal.admitted(number)
            if event is None and number >= self._chosen_before and self._difficulty.skips(task, number):
                self._journal.add(skipped=number)
                self._skipped += 1
                continue
            if event is None:
                repeated = self._names[version, task.id]  # in a small data set: then with other random numbers
                scope = f"train/{version + 1}" + (f"/again{repeated}" if repeated else "")
                event = {"admitted": number, "version": version, "scope": scope, "task": task.id}
                self._journal.add(**event)
            self._names[event["version"], task.id] += 1
            if event["task"] != task.id:
                raise ConfigError(
                    f"the run had task {event['task']} where the data has {task.id} now: continue with the data of "
                    "that run, or with resume_mode=exact"
                )
            overtaken = any(later > number for later in self._passed)
            pending = PendingGroup(number, position, event["version"], epoch, overtaken)
            pending.group = asyncio.create_task(self._run(pending, task, event["scope"]))
            self._pending.append(pending)
        self._names = Counter({key: count for key, count in self._names.items() if key[0] == version})

    def _may_admit(self, version: int, again: bool) -> bool:
        """Whether the next task may be drawn. What was admitted before a crash is, at the version at which it was."""
        if self._drawn in self._passed:
            return True
        if event := self._journal.admitted(self._drawn):
            return event["version"] <= version
        batch = self._settings.prompts_per_step
        in_time = (self._settings.max_staleness + 1) * batch
        wanted = math.ceil(self._settings.ahead * batch) + sum(pending.overtaken for pending in self._pending)
        return not again and len(self._pending) < min(in_time, wanted)

    async def _run(self, pending: PendingGroup, task: Task, scope: str) -> Group:
        settings = self._settings
        group = self._journal.group(pending.number, task)
        if group is None:
            await self._live.wait()
            group = await self._runner.at(scope).run_group(task, settings.group_size, settings.extra_samples)
            self._note_finished(pending.number, group, failed=False)
        pending.finished_s = time.perf_counter()
        self._arrived.append(group)
        return group

    def _note_finished(self, number: int, group: Group, failed: bool) -> None:
        """Write a group down: one with conversations that have `failed` only when it is trained; else it runs again."""
        if self._journal.groups and failed == (len(group.valid) < len(group.trajectories)):
            self._journal.add(finished=number, group=group)

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


def _check_failed(groups: list[Group], allowed: float) -> None:
    """Raise RunError when more than the share `allowed` of the conversations failed."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    causes = Counter(t.reason for t in trajectories if t.failed)
    if causes.total() > allowed * len(trajectories):
        why, often = causes.most_common(1)[0]
        raise RunError(
            f"{causes.total()} of the {len(trajectories)} conversations of a batch failed, more than "
            f"rollout.max_failed={allowed} allows; {often} of them because of {why}; "
            "all are in trajectories/untrained.jsonl"
        )
