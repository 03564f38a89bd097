"""The one place that divides: from per-token losses to the scalar that is minimised."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Average(Enum):
    """How tokens are weighed. Both are unchanged when a trajectory is stored in more or fewer segments."""

    token_mean = "token_mean"  # every token of the optimiser step alike (DAPO, arXiv:2503.14476)
    trajectory_mean = "trajectory_mean"  # every trajectory alike, its tokens alike within it


def token_weights(average: Average, trajectory: Tensor) -> Tensor:
    """One weight per sampled token [tokens] fp64, summing to 1 over an optimiser step.

    trajectory [tokens] int64: which trajectory each sampled token of the whole step belongs to. Computed before any
    mask, so that leaving tokens out never rescales the rest.
    """
    if average is Average.token_mean:
        return torch.full(trajectory.shape, 1.0 / len(trajectory), dtype=torch.float64)
    _, index, counts = torch.unique(trajectory, return_inverse=True, return_counts=True)
    return 1.0 / (counts[index] * len(counts)).double()
