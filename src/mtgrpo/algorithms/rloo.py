"""REINFORCE, leave one out."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Baseline, Tensor
from mtgrpo.algorithms.grpo import ClippedSurrogate, group_mean


@dataclass
class RLOO(ClippedSurrogate):
    """RLOO (arXiv:2402.14740): each trajectory is compared with the mean of the others. Unbiased.

    A_i = r_i - mean over j != i of r_j = n / (n - 1) (r_i - mean(r))
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)         at the first update of a batch REINFORCE

    When: an unbiased gradient is wanted, whatever the size of the group.
    """

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        """The mean of the others; in a group of one the return itself."""
        _, index, counts = group.unique(return_inverse=True, return_counts=True)
        mean, n = group_mean(returns, group), counts[index]
        return Baseline((returns - (returns - mean) * n / (n - 1).clamp(min=1)).where(n > 1, returns))
