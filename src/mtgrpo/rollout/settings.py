"""How many conversations a step has and how far they may go, which tasks are run, which groups are trained."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mtgrpo.errors import Bounded, ConfigError, require
from mtgrpo.tasks import hashed
from mtgrpo.types import Group, Task


@dataclass
class RolloutSettings:
    """How many conversations, and how long they may grow."""

    group_size: int = 8  # siblings per task
    prompts_per_step: int = 8  # tasks per training step
    max_concurrent: int = 512  # conversations open at once
    max_trajectory_tokens: int = 4096  # sampled by the policy, over all turns
    max_trajectory_tool_tokens: int = 8192  # added by the environment, over all turns
    retries: int = 1  # fresh attempts for a conversation that failed through no fault of the model
    max_failed: float = 0.5  # the share of a batch's conversations that may fail; more ends the run
    timeout_s: float = 3600.0  # of one attempt at a conversation, training meanwhile too; then it has failed; 0 = none
    score_timeout_s: float = 0.0  # of scoring the siblings of a task; what exceeds it fails; 0 = none
    max_staleness: int = 0  # weight updates between a group's admission and its training; 0 = in step
    ahead: float = 1.5  # batches of groups run at once where max_staleness > 0: more hides slower tools, is staler
    extra_samples: int = 0  # run beside `group_size`; the first to finish are trained: quicker, biased to the quick

    def __post_init__(self) -> None:
        require(self, group_size=">= 1", prompts_per_step=">= 1", max_concurrent=">= 1")
        require(self, max_trajectory_tokens=">= 1", max_trajectory_tool_tokens=">= 1")
        require(self, timeout_s=">= 0 (0 = none)", score_timeout_s=">= 0 (0 = none)", extra_samples=">= 0")
        require(self, retries=">= 0", max_failed=">= 0 and <= 1 (1 = the run goes on whatever fails)")
        require(self, max_staleness=">= 0", ahead="> 1 (nothing runs ahead otherwise)")


@dataclass
class Filter:
    """Leaves groups out before they are trained, and with `refill` runs others in their place.

    Without refill a batch is smaller by what is left out, and so is the count that its loss is divided by.
    """

    zero_variance: bool = False  # leave out groups whose rewards are all equal: no token has an advantage
    min_success: float = 0.0  # leave out groups of which a smaller share succeeds: too hard
    max_success: float = 1.0  # leave out groups of which a larger share succeeds: too easy
    refill: bool = False  # run more until the batch is full, training no surplus (dynamic sampling, arXiv:2503.14476)
    max_batches: int = 10  # run for one, at most; then it is trained as it is

    def __post_init__(self) -> None:
        require(self, min_success=">= 0", max_success=f">= {self.min_success} and <= 1 (min_success and 1)")
        require(self, max_batches=">= 1")
        if self.refill and not self.active:
            raise ConfigError(
                "filter.refill=true, but nothing is left out: set filter.zero_variance=true, or filter.min_success and "
                "filter.max_success"
            )

    @property
    def active(self) -> bool:
        """Whether any group may be left out."""
        return self.zero_variance or self.min_success > 0 or self.max_success < 1

    def refuses(self, group: Group, success_at: float, varies: Callable[[Group], bool]) -> str:
        """Why a group is not trained, "" where it is; `varies`: whether its rewards differ, as training sees them."""
        if not self.active:
            return ""
        success = group.success_rate(success_at)
        if success is None:
            return "all its conversations failed"
        if self.zero_variance and not varies(group):
            return "its rewards are all equal"
        if success < self.min_success:
            return f"too hard: its success rate {success:.3g} is below filter.min_success"
        return f"too easy: its success rate {success:.3g} is above filter.max_success" * (success > self.max_success)


@dataclass
class Curriculum(Bounded, easy="> 0 and <= 1 (1 = always run)", hard="> 0 and <= 1 (1 = always run)"):
    """Runs a task again the more often the nearer the success of its last group is to a half.

    When a task comes up again of whose last group the share p succeeded (see `reward.success_at`), it is run with the
    chance c + (1 - c) 4 p (1 - p), where c is `easy` for p above a half and `hard` below; else the next task has its
    turn. A group's rewards differ most where p is a half, and not at all at 0 and 1. Tasks that are new are always run.
    """

    easy: float = 1.0  # the chance of a task that always succeeded; 1 = always run
    hard: float = 1.0  # that of a task that never did

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
