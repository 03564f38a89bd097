"""Group Relative Policy Optimization."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms.baseline import GroupRelative
from mtgrpo.algorithms.surrogate import ClippedSurrogate


@dataclass
class GRPO(ClippedSurrogate, GroupRelative):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300).

    A_i = (r_i - mean(r)) / (std(r) + epsilon)                              one number per trajectory of a group
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)         one number per sampled token
    rho_t = pi(token) / pi_old(token)

    `GroupRelative` computes A, `ClippedSurrogate` L. The paper averages over each trajectory first
    (average=trajectory_mean); token_mean is the default here.
    When: to begin with. Where rewards differ much in spread between tasks, divide_by_std=false is safer.
    """
