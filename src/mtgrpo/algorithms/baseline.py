"""Baselines: statistics of the returns of a group, or of a whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Algorithm, Baseline, Tensor
from mtgrpo.errors import require


@dataclass
class GroupRelative(Algorithm):
    """The baseline of a group: advantage_i = (R_i - mean(R)) / (std(R) + epsilon).

    std is the unbiased one (n - 1). A group of one has advantage 0, and so has one of equal returns, exactly.
    """

    divide_by_std: bool = True  # of the returns of the group
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, epsilon="> 0")

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        """The mean of the group, and its standard deviation where it divides."""
        centre = group_mean(returns, group)
        if not self.divide_by_std:
            return Baseline(centre, returns.new_ones(len(returns)))
        return Baseline(centre, group_std(returns - centre, group) + self.epsilon)


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """The mean of `values` [n] over those of the same `group` [n] int64, for each; [n].

    Exactly the value itself where all of a group are equal.
    """
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    least = values.new_zeros(len(counts)).scatter_reduce(0, index, values, "amin", include_self=False)
    above = values - least[index]
    return (least + values.new_zeros(len(counts)).index_add(0, index, above) / counts)[index]


def group_std(centred: Tensor, group: Tensor) -> Tensor:
    """The unbiased standard deviation of each group; `centred` [n] has mean 0 in it. 0 for a group of one. [n]."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    squares = centred.new_zeros(len(counts)).index_add(0, index, centred.square())
    return (squares / (counts - 1).clamp(min=1)).sqrt()[index]


def leave_one_out(values: Tensor, group: Tensor) -> Tensor:
    """The mean of the other `values` [n] of the same group; in a group of one the value itself. [n]."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    mean, n = group_mean(values, group), counts[index]
    return (values - (values - mean) * n / (n - 1).clamp(min=1)).where(n > 1, values)


def whitened(values: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`values` [n] shifted and scaled to mean 0 and (unbiased) variance 1; all 0 where there are fewer than two."""
    if len(values) < 2:
        return values.new_zeros(len(values))
    return (values - values.mean()) * (values.var() + epsilon).rsqrt()
