"""The return of a turn is the sum of the rewards from that turn on."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned, Level, discounted, last_of
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm, Tensor
from mtgrpo.errors import require


@dataclass
class ReturnToGo(AdvantageEstimator):
    """The discounted sum of the rewards from a turn, or token, on.

    G_k = sum over l >= k of gamma^(l - k) r_l, the outcome is part of the last r
    A_k = (G_k - centre) / scale

    The centre is that of the group's whole returns G_1, not of the siblings that reached turn k, which are not a fair
    sample. The scale, where the algorithm has one, is the standard deviation of all G_k of the group.
    When: turns have rewards of their own, and what is past should not count for what comes after.
    """

    gamma: float = 1.0  # discount per step
    level: Level = Level.turn  # token: REINFORCE++ with a KL penalty in the reward

    def __post_init__(self) -> None:
        require(self, gamma=">= 0 and <= 1")

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """Returns from each step on, less the baseline of the trajectory."""
        if self.level is Level.turn:
            sequence, per_step = rewards.trajectory, rewards.turn_sums()
        else:
            sequence = rewards.trajectory[rewards.turn]
            per_step = rewards.per_token + rewards.per_turn[rewards.turn] * last_of(rewards.turn)
        per_step = per_step + rewards.outcome[sequence] * last_of(sequence)
        returns = discounted(per_step, sequence, self.gamma)
        first = last_of(sequence.flip(0)).flip(0)
        whole = rewards.outcome.clone()  # also of trajectories without a step
        whole[sequence[first]] = returns[first]
        centre = algorithm.baseline(whole, rewards.group).centre[sequence]
        advantage = (returns - centre) / algorithm.baseline(returns, rewards.group[sequence]).scale
        return Assigned(advantage[rewards.turn] if self.level is Level.turn else advantage)
