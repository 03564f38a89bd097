"""What a trajectory, and each of its turns, is worth. One file = one reward, a dataclass with one or two methods."""

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

    def turn_rewards(self, trajectory: Trajectory) -> list[float]:
        """The worth of each turn beside that of the whole; [] = turns are not judged. As `reward`."""
        return []
