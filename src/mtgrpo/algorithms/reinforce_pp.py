"""REINFORCE++: normalised over the batch, not within groups."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Algorithm, Baseline, Tensor
from mtgrpo.algorithms.baseline import group_mean, whitened
from mtgrpo.algorithms.surrogate import ClippedSurrogate


@dataclass
class ReinforcePP(ClippedSurrogate, Algorithm):
    """REINFORCE++ (arXiv:2501.03262).

    A_t = (R_t - mean(R)) / std(R)          over all trained tokens of the batch; R_t is the return from token t on
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)

    group_baseline=true is its baseline form: the mean of the group is subtracted first. The paper's KL penalty is
    kl.place=reward with advantage=return_to_go and advantage.level=token.
    When: groups are small or have one member, or their spread is too uneven to divide by.
    """

    group_baseline: bool = False  # subtract the mean of the group before normalising over the batch

    @property
    def compares_siblings(self) -> bool:
        """Only in the baseline form."""
        return self.group_baseline

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        """Nothing, or the mean of the group."""
        centre = group_mean(returns, group) if self.group_baseline else returns.new_zeros(len(returns))
        return Baseline(centre, returns.new_ones(len(returns)))

    def normalise(self, advantage: Tensor) -> Tensor:
        """Whitened over the trained tokens."""
        return whitened(advantage)
