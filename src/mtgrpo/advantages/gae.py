"""Generalised advantage estimation, over turns or tokens, with a critic or without."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from mtgrpo.advantages import AdvantageEstimator, Assigned
from mtgrpo.advantages.rewards import Level, Rewards, discounted_sums, is_first, is_last
from mtgrpo.algorithms import Algorithm, Tensor
from mtgrpo.errors import ConfigError


@dataclass
class GAE(AdvantageEstimator, gamma=">= 0 and <= 1", lam=">= 0 and <= 1"):
    """Generalised advantage estimation (arXiv:1506.02438).

    delta_k = r_k + gamma V_k+1 - V_k, A_k = sum over l >= k of (gamma lam)^(l - k) delta_l, target_k = A_k + V_k

    The outcome is part of the last r. A turn's state is the one before its first token (arXiv:2512.17008); a tool's
    reply is no step, at either level. The outcome is relative to the algorithm's baseline, which with ppo is 0, or the
    mean of the group. Without a critic (every algorithm but ppo) V = 0 and the group's baseline of the whole reward is
    subtracted at the end: without rewards for turns A_k = (gamma lam)^(K - k) (R - mean), that is, the earlier of K
    turns get less. The scale, where the algorithm has one, is the deviation of all A_k of the group.
    When: with ppo; without a critic, to prefer what is near the end of long conversations.
    """

    level: Level = Level.turn  # the time step
    gamma: float | None = None  # null: 0.99 over turns, 1 over tokens
    lam: float | None = None  # null: 0.95 over turns, 1 over tokens

    uses_critic = True

    @property
    def discounts(self) -> tuple[float, float]:
        """gamma and lambda."""
        gamma, lam = (0.99, 0.95) if self.level is Level.turn else (1.0, 1.0)
        return gamma if self.gamma is None else self.gamma, lam if self.lam is None else self.lam

    def check(self, experiment: Any) -> None:
        super().check(experiment)
        if self.level is Level.token and not experiment.algorithm.has_critic:  # it would discount the distance alone
            raise ConfigError(
                f"advantage.level=token needs a critic, and algorithm {type(experiment.algorithm).__name__} has none: "
                "set algorithm=ppo with model.value_head=true, or advantage.level=turn"
            )

    def note(self, algorithm: Algorithm) -> str:
        if algorithm.has_critic:
            return ""
        gamma, lam = self.discounts
        return (
            f"advantage=gae without a critic: of K turns, turn k gets {gamma * lam:.4g}^(K - k) (R - mean), "
            "plus its own and later rewards, discounted"
        )

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        gamma, lam = self.discounts
        centre = algorithm.baseline(rewards.totals(), rewards.group).centre
        relative = replace(rewards, outcome=rewards.outcome - centre)
        if values is None:
            trajectory, per_step = relative.steps(Level.turn)
            advantage = discounted_sums(per_step, trajectory, gamma * lam)
            return Assigned((advantage / algorithm.baseline(advantage, rewards.group[trajectory]).scale)[rewards.turn])
        trajectory, per_step = relative.steps(self.level)
        turn, first = rewards.turn, is_first(rewards.turn)
        state = values
        if self.level is Level.turn:
            state = rewards.per_turn.new_zeros(len(rewards.per_turn))
            state[turn[first]] = values[first]
        following = state.roll(-1).masked_fill(is_last(trajectory), 0.0)
        advantage = discounted_sums(per_step + gamma * following - state, trajectory, gamma * lam)
        target = advantage + state
        if self.level is Level.token:
            return Assigned(advantage, target)
        return Assigned(advantage[turn], target[turn].masked_fill(~first, math.nan))
