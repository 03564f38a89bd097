"""GRPO done right: no division by the length, none by the standard deviation of the group."""

from dataclasses import dataclass

from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import ClippedSurrogate, GroupRelative


@dataclass
class DrGRPO(ClippedSurrogate, GroupRelative):
    """Dr. GRPO (arXiv:2503.20783): no bias towards long wrong answers, none towards easy and hard tasks.

    A_i = r_i - mean(r)
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A), summed, divided by trajectories * average_length

    When: wrong answers grow longer and longer under GRPO.
    """

    average: Average = Average.constant
    divide_by_std: bool = False
