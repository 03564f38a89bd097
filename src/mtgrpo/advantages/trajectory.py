"""One advantage for all tokens of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm, Tensor


@dataclass
class WholeTrajectory(AdvantageEstimator):
    """One advantage for a whole trajectory, from the sum of all its rewards: A_t = A(R + sum over turns of r).

    When: there is a reward for the outcome alone.
    """

    differs_by_turn = False

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        totals = rewards.totals()
        return Assigned(rewards.of_tokens(algorithm.baseline(totals, rewards.group).advantage(totals)))
