"""Group Relative Policy Optimization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.algorithms import Algorithm, PerToken
from mtgrpo.extension import ConfigError


@dataclass
class GRPO(Algorithm):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300).

    A_i = (r_i - mean(r)) / (std(r) + epsilon)                              one number per trajectory of a group
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)         one number per sampled token
    rho_t = pi(token) / pi_old(token)

    `divide_by_std=false` leaves the division out (Dr. GRPO, arXiv:2503.20783); std is the unbiased one (n - 1).
    """

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    divide_by_std: bool = True
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise ConfigError(
                "algorithm.clip_low must be in (0, 1] and algorithm.clip_high above 0, "
                f"got {self.clip_low} and {self.clip_high}"
            )
        if self.epsilon <= 0:
            raise ConfigError(f"algorithm.epsilon must be above 0, got {self.epsilon}")

    def advantages(self, rewards: Tensor) -> Tensor:
        """Centre by the group's mean, scale by its standard deviation. A group of one has advantage 0."""
        shifted = rewards - rewards[0]  # equal rewards are then 0 exactly, whatever the mean is rounded to
        centred = shifted - shifted.mean()
        if not self.divide_by_std or len(rewards) < 2:
            return centred
        return centred / (rewards.std() + self.epsilon)

    def loss(self, logp: Tensor, old_logp: Tensor, advantage: Tensor) -> PerToken:
        """The clipped surrogate of PPO, per token."""
        ratio = (logp - old_logp).exp()
        clipped_ratio = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
        clipped = clipped_ratio * advantage < ratio * advantage
        return PerToken(loss, clipped)
