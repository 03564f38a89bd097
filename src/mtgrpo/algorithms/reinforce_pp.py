"""REINFORCE++: normalised over the batch, not within groups."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Algorithm, Baseline, Tensor
from mtgrpo.algorithms.grpo import ClippedSurrogate, group_mean


@dataclass
class OptionalBaseline(Algorithm):
    """No baseline, for the whole batch is normalised; or the mean of the group."""

    group_baseline: bool = False  # subtract the mean of the group before normalising over the batch

    @property
    def compares_siblings(self) -> bool:
        return self.group_baseline

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        return Baseline(group_mean(returns, group) if self.group_baseline else returns.new_zeros(len(returns)))


@dataclass
class ReinforcePP(ClippedSurrogate, OptionalBaseline):
    """REINFORCE++ (arXiv:2501.03262).

    A_t = (R_t - mean(R)) / std(R)          over all trained tokens of the batch; R_t is the return from token t on
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)

    group_baseline=true is its baseline form: the mean of the group is subtracted first. The paper's KL penalty is
    kl.place=reward with advantage=return_to_go and advantage.level=token.
    When: groups are small or have one member, or their spread is too uneven to divide by.
    """

    def normalise(self, advantage: Tensor) -> Tensor:
        return whiten(advantage)


def whiten(values: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`values` [n] shifted and scaled to mean 0 and (unbiased) variance 1; all 0 where there are fewer than two."""
    if len(values) < 2:
        return values.new_zeros(len(values))
    return (values - values.mean()) * (values.var() + epsilon).rsqrt()
