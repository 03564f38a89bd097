"""Every token of a trajectory deserves the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.credit import Rewards
from mtgrpo.credits import Assigned, Credit


@dataclass
class WholeTrajectory(Credit):
    """One advantage for a whole trajectory, from the sum of all its rewards: A_t = A(R + sum over turns of r).

    When: there is a reward for the outcome alone.
    """

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """Compared within the group."""
        totals = rewards.totals()
        return Assigned(rewards.of_tokens(algorithm.baseline(totals, rewards.group).advantage(totals)))
