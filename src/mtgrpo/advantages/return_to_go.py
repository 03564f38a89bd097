"""The return of a turn is the sum of the rewards from that turn on."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned
from mtgrpo.advantages.rewards import Level, Rewards, discounted_sums, is_first
from mtgrpo.algorithms import Algorithm, Tensor


@dataclass
class ReturnToGo(AdvantageEstimator, gamma=">= 0 and <= 1"):
    """The discounted sum of the rewards from a turn, or token, on.

    G_k = sum over l >= k of gamma^(l - k) r_l, the outcome is part of the last r
    A_k = (G_k - centre) / scale

    The centre is that of the group's whole returns G_1, not of the siblings that reached turn k, which are not a fair
    sample. The scale, where the algorithm has one, is the standard deviation of all G_k of the group.
    When: turns have rewards of their own, and what is past should not count for what comes after.
    """

    gamma: float = 1.0  # discount per step
    level: Level = Level.turn  # token: REINFORCE++ with a KL penalty in the reward

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        trajectory, per_step = rewards.steps(self.level)
        returns = discounted_sums(per_step, trajectory, self.gamma)
        first = is_first(trajectory)
        whole = rewards.outcome.clone()  # also of trajectories without a step
        whole[trajectory[first]] = returns[first]
        centre = algorithm.baseline(whole, rewards.group).centre[trajectory]
        advantage = (returns - centre) / algorithm.baseline(returns, rewards.group[trajectory]).scale
        return Assigned(advantage[rewards.turn] if self.level is Level.turn else advantage)
