"""Which tasks are run again, by the success that the run itself has measured of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtgrpo.errors import require
from mtgrpo.tasks.stream import hashed
from mtgrpo.types import Group, Task


@dataclass
class Curriculum:
    """Runs a task again the more often the nearer the success of its last group is to a half.

    When a task comes up again of whose last group the share p succeeded (see `reward.success_at`), it is run with the
    chance c + (1 - c) 4 p (1 - p), where c is `easy` for p above a half and `hard` below; else the next task has its
    turn. A group's rewards differ most where p is a half, and not at all at 0 and 1. Tasks that are new are always run.
    """

    easy: float = 1.0  # the chance of a task that always succeeded; 1 = always run
    hard: float = 1.0  # that of a task that never did

    def __post_init__(self) -> None:
        require(self, easy="> 0 and <= 1 (1 = always run)", hard="> 0 and <= 1 (1 = always run)")

    @property
    def active(self) -> bool:
        """Whether any task may be passed over."""
        return min(self.easy, self.hard) < 1

    def chance(self, success: float) -> float:
        """That a task is run of whose last group this share succeeded."""
        least = self.easy if success > 0.5 else self.hard
        return least + (1 - least) * 4 * success * (1 - success)


class Difficulty:
    """What a run has measured of its tasks. `success` is its whole state: the share of the last group, by task."""

    def __init__(self, curriculum: Curriculum, success_at: float, seed: int) -> None:
        self._curriculum, self._success_at, self._seed = curriculum, success_at, seed
        self.success: dict[str, float] = {}

    def measure(self, groups: Iterable[Group]) -> None:
        """Take note of groups that were run; those in which every conversation failed say nothing of their task."""
        for group in groups if self._curriculum.active else ():
            if (success := group.success_rate(self._success_at)) is not None:
                self.success[group.task.id] = success

    def skips(self, task: Task, number: int) -> bool:
        """Whether `task`, the stream's task of this number, is passed over; a function of that and of `success`."""
        chance = self._curriculum.chance(self.success.get(task.id, 0.5))
        return chance < 1 and hashed(f"{self._seed}/curriculum/{number}") / 2**64 >= chance
