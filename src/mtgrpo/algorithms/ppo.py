"""Proximal policy optimisation, with a critic."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Tensor
from mtgrpo.algorithms.grpo import ClippedSurrogate
from mtgrpo.algorithms.reinforce_pp import OptionalBaseline, whiten


@dataclass
class PPO(ClippedSurrogate, OptionalBaseline, value_coef="> 0", value_clip=">= 0"):
    """PPO (arXiv:1707.06347); its advantages are generalised advantage estimates: advantage=gae, model.value_head=true.

    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)
        + value_coef / 2 max((V - target)^2, (clip(V, V_old - value_clip, V_old + value_clip) - target)^2)

    The value loss is averaged over the states that have a target. V is computed from the hidden states of the policy's
    own forward pass. With group_baseline the reward of a trajectory is R_i - mean(R) of its group, and V learns that:
    how hard a task is, siblings tell, and the critic what else a turn is worth.
    When: rewards come at single turns and conversations are long: a critic tells good turns from bad ones.
    """

    value_coef: float = 0.5  # weight of the value loss
    value_clip: float = 0.2  # clip range of a value around its old one; 0 = no clip
    whiten: bool = True  # advantages to mean 0 and variance 1 over the trained tokens of the batch

    def normalise(self, advantage: Tensor) -> Tensor:
        return whiten(advantage) if self.whiten else advantage

    def value_loss(self, value: Tensor, old_value: Tensor, target: Tensor) -> Tensor:
        error = (value - target).square()
        if self.value_clip:
            near = old_value + (value - old_value).clamp(-self.value_clip, self.value_clip)
            error = error.maximum((near - target).square())
        return self.value_coef / 2 * error
