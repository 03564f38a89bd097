"""Numbers into signal. One algorithm = one file = its advantage and its per-token loss, with formula and paper.

All tensors of a loss are flat: one entry for each sampled token, in any order. A loss returns one value per token and
never divides; `average.py` alone does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from mtgrpo.algorithms.average import Average
from mtgrpo.extension import ConfigError


class Truncated(Enum):
    """What a trajectory that reached a limit is worth."""

    penalise = "penalise"  # its reward becomes the smaller of 0 and what it got
    mask = "mask"  # it counts in its group's statistics, its tokens are not trained
    keep = "keep"  # as scored


@dataclass(frozen=True)
class PerToken:
    """A loss before averaging: `loss` [tokens]; `clipped` [tokens] bool, where the clip removed the gradient."""

    loss: Tensor
    clipped: Tensor


@dataclass
class Algorithm(ABC):
    """Base of all algorithms."""

    average: Average = Average.token_mean  # how tokens are weighed
    truncated: Truncated = Truncated.penalise  # what a trajectory that reached a limit is worth

    def check(self, group_size: int) -> None:
        """Raise ConfigError when this algorithm cannot compare groups of that size."""
        if group_size < 2:
            raise ConfigError(
                f"algorithm {type(self).__name__} compares the siblings of a group: "
                f"rollout.group_size must be at least 2, got {group_size}"
            )

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """One group's rewards [trajectories] -> advantages [trajectories]."""

    @abstractmethod
    def loss(self, logp: Tensor, old_logp: Tensor, advantage: Tensor) -> PerToken:
        """Per-token loss; all arguments [tokens]. Only `logp` carries gradient."""
