"""What a trajectory, and each of its turns, is worth. One file = one reward, a dataclass with one to three methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.types import Trajectory


@dataclass
class Reward(ABC):
    """Base of all rewards."""

    success_at: float = 1.0  # a trajectory whose reward reaches this counts as a success in evaluations

    @abstractmethod
    def reward(self, trajectory: Trajectory) -> float:
        """The worth of a finished or truncated trajectory. Pure; never called for failed ones."""

    def rewards(self, siblings: Sequence[Trajectory]) -> list[float]:
        """The worth of each of the siblings of one task that did not fail, in their order; at least one.

        For rewards that depend on the others, or that are cheaper to find together. By default each by itself.
        """
        return [self.reward(trajectory) for trajectory in siblings]

    def turn_rewards(self, trajectory: Trajectory) -> list[float]:
        """The worth of each turn beside that of the whole; [] = turns are not judged. As `reward`."""
        return []

    def note(self, divide_by_std: bool) -> str:
        """What the user should know before training begins; "" = nothing.

        divide_by_std: whether advantages are divided by the deviation of the siblings' rewards.
        """
        return ""
