"""What a trajectory is worth. One file = one reward, a dataclass with one or two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mtgrpo.types import Trajectory


@dataclass
class Reward(ABC):
    """Base of all rewards."""

    success_at: float = 1.0  # a trajectory whose reward reaches this counts as a success in evaluations

    @abstractmethod
    def reward(self, trajectory: Trajectory) -> float:
        """The worth of a finished or truncated trajectory. Pure; never called for failed ones."""
