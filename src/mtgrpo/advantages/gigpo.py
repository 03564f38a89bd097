"""Compares turns of a group that answer the same observation."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned
from mtgrpo.advantages.rewards import Level, Rewards, discounted_sums
from mtgrpo.algorithms import Algorithm, Tensor


@dataclass
class GiGPO(AdvantageEstimator, gamma=">= 0 and <= 1", turn_coef=">= 0"):
    """GiGPO, group in group (arXiv:2505.10978).

    A_k = A(whole rewards, within the group) + turn_coef A(G_k, among the group's turns with the same anchor state)
    G_k = sum over l >= k of gamma^(l - k) r_l, the outcome is part of the last r

    The anchor state of a turn is the observation before it; that of the first turn is the task.
    When: siblings meet the same states again, as in games and on web pages.
    """

    gamma: float = 0.95  # discount per turn
    turn_coef: float = 1.0  # weight of the comparison of turns

    compares_turns = True

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        totals = rewards.totals()
        of_trajectory = algorithm.baseline(totals, rewards.group).advantage(totals)
        trajectory, per_step = rewards.steps(Level.turn)
        returns = discounted_sums(per_step, trajectory, self.gamma)
        of_turn = algorithm.baseline(returns, rewards.anchor).advantage(returns)
        return Assigned((of_trajectory[trajectory] + self.turn_coef * of_turn)[rewards.turn])
