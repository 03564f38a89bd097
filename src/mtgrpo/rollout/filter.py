"""Which groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtgrpo.errors import ConfigError, require
from mtgrpo.types import Group, Trajectory


@dataclass
class Filter:
    """Leaves groups out before they are trained, and with `refill` runs others in their place.

    Without refill a batch is smaller by what is left out, and so is the count that its loss is divided by.
    """

    zero_variance: bool = False  # leave out groups whose rewards are all equal: nothing to compare
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

    def keeps(self, group: Group, success_at: float, reward: Callable[[Trajectory], float]) -> bool:
        """Whether a group is trained; `reward` is what training sees of a trajectory's outcome."""
        if not self.active:
            return True
        success = group.success_rate(success_at)
        if success is None:
            return False
        if self.zero_variance and len({(reward(t), tuple(t.turn_rewards)) for t in group.valid}) == 1:
            return False
        return self.min_success <= success <= self.max_success
