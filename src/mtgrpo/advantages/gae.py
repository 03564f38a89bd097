"""Generalised advantage estimation, over turns or tokens, with a critic or without."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned, Level, discounted, last_of
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm, Tensor
from mtgrpo.errors import ConfigError, require


@dataclass
class GAE(AdvantageEstimator):
    """Generalised advantage estimation (arXiv:1506.02438).

    delta_k = r_k + gamma V_k+1 - V_k, A_k = sum over l >= k of (gamma lam)^(l - k) delta_l, target_k = A_k + V_k

    The outcome is part of the last r. A turn's state is the one before its first token (arXiv:2512.17008); a tool's
    reply is no step, at either level. Without a critic (every algorithm but ppo) V = 0 and the group's baseline of the
    whole reward is subtracted at the end: without rewards for turns A_k = (gamma lam)^(K - k) (R - mean), that is, the
    earlier of K turns get less. The scale, where the algorithm has one, is the deviation of all A_k of the group.
    When: with ppo; without a critic, to prefer what is near the end of long conversations.
    """

    level: Level = Level.turn  # the time step
    gamma: float | None = None  # null: 0.99 over turns, 1 over tokens
    lam: float | None = None  # null: 0.95 over turns, 1 over tokens

    uses_critic = True

    def __post_init__(self) -> None:
        require(self, gamma=">= 0 and <= 1", lam=">= 0 and <= 1")

    @property
    def discounts(self) -> tuple[float, float]:
        """gamma and lambda, with the defaults of the level."""
        gamma, lam = (0.99, 0.95) if self.level is Level.turn else (1.0, 1.0)
        return gamma if self.gamma is None else self.gamma, lam if self.lam is None else self.lam

    def check(self, algorithm: Algorithm) -> None:
        """level=token needs a critic: without one it would discount nothing but the distance to the end."""
        super().check(algorithm)
        if self.level is Level.token and not algorithm.has_critic:
            raise ConfigError(
                f"advantage.level=token needs a critic, and algorithm {type(algorithm).__name__} has none: set "
                "algorithm=ppo with model.value_head=true, or advantage.level=turn"
            )

    def note(self, algorithm: Algorithm) -> str:
        """How advantages fall towards the beginning where there is no critic."""
        if algorithm.has_critic:
            return ""
        gamma, lam = self.discounts
        return (
            f"advantage=gae without a critic: of K turns, turn k gets {gamma * lam:.4g}^(K - k) (R - mean), "
            "plus its own and later rewards, discounted"
        )

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """Over turns or tokens; `values` where the algorithm has a critic."""
        if values is None:
            return Assigned(self._without_critic(rewards, algorithm)[rewards.turn])
        if self.level is Level.token:
            sequence = rewards.trajectory[rewards.turn]
            per_step = rewards.per_token + rewards.per_turn[rewards.turn] * last_of(rewards.turn)
            advantage = self._estimate(per_step, rewards.outcome, sequence, values)
            return Assigned(advantage, advantage + values)
        first = last_of(rewards.turn.flip(0)).flip(0)
        of_turn = rewards.per_turn.new_zeros(len(rewards.per_turn))
        of_turn[rewards.turn[first]] = values[first]
        advantage = self._estimate(rewards.turn_sums(), rewards.outcome, rewards.trajectory, of_turn)
        target = (advantage + of_turn)[rewards.turn].masked_fill(~first, math.nan)
        return Assigned(advantage[rewards.turn], target)

    def _estimate(self, per_step: Tensor, outcome: Tensor, sequence: Tensor, values: Tensor) -> Tensor:
        gamma, lam = self.discounts
        end = last_of(sequence)
        following = values.roll(-1).masked_fill(end, 0.0)
        delta = per_step + outcome[sequence] * end + gamma * following - values
        return discounted(delta, sequence, gamma * lam)

    def _without_critic(self, rewards: Rewards, algorithm: Algorithm) -> Tensor:
        totals = rewards.totals()
        baseline = algorithm.baseline(totals, rewards.group)
        sequence = rewards.trajectory
        final = (rewards.outcome - baseline.centre)[sequence] * last_of(sequence)
        gamma, lam = self.discounts
        advantage = discounted(rewards.turn_sums() + final, sequence, gamma * lam)
        return advantage / algorithm.baseline(advantage, rewards.group[sequence]).scale
