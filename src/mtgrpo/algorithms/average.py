"""The one place that divides: from per-token losses to the scalar that is minimised."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Average(Enum):
    """How tokens are weighed.

    All but sequence_mean are unchanged when a trajectory is stored in more or fewer segments.
    """

    token_mean = "token_mean"  # every token of the optimiser step alike (DAPO, arXiv:2503.14476)
    trajectory_mean = "trajectory_mean"  # every trajectory alike, its tokens alike within it
    prompt_mean = "prompt_mean"  # every group alike, the tokens of all its trajectories alike (arXiv:2510.13786)
    constant = "constant"  # every token alike: the sum over trajectories * length (Dr. GRPO, arXiv:2503.20783)
    sequence_mean = "sequence_mean"  # every segment alike, so k segments weigh k times: to reproduce others


def token_weights(average: Average, trajectory: Tensor, group: Tensor, segment: Tensor, length: int = 0) -> Tensor:
    """One weight per sampled token [tokens] fp64, summing to 1 over an optimiser step; average=constant sums to less.

    trajectory, group, segment [tokens] int64: those of all sampled tokens of the step, by number. length: the constant
    of average=constant, in tokens. Computed before any mask, so that leaving tokens out never rescales the rest.
    """
    import torch  # noqa: PLC0415  settings alone import no library

    count = len(trajectory)
    if average is Average.token_mean:
        return torch.full((count,), 1.0 / count, dtype=torch.float64)
    if average is Average.constant:
        return torch.full((count,), 1.0 / (len(trajectory.unique()) * length), dtype=torch.float64)
    parts = {Average.trajectory_mean: trajectory, Average.prompt_mean: group, Average.sequence_mean: segment}
    _, index, counts = parts[average].unique(return_inverse=True, return_counts=True)
    return 1.0 / (counts[index] * len(counts)).double()
