"""The one place that divides: from per-token losses to the scalar that is minimised."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Membership:
    """The trajectory, group and segment of each sampled token, by number; [tokens] int64."""

    trajectory: Tensor
    group: Tensor
    segment: Tensor

    def __getitem__(self, chosen: Tensor) -> Membership:
        return Membership(self.trajectory[chosen], self.group[chosen], self.segment[chosen])


def token_weights(average: Average, members: Membership, length: int = 0) -> Tensor:
    """One weight per sampled token [tokens] fp64, summing to 1 over an optimiser step; average=constant sums to less.

    `members` are those of all sampled tokens of the step; `length` is the constant of average=constant, in tokens.
    Computed before any mask, so that leaving tokens out never rescales the rest.
    """
    import torch  # noqa: PLC0415  settings alone import no library

    count = len(members.trajectory)
    if average is Average.token_mean:
        return torch.full((count,), 1.0 / count, dtype=torch.float64)
    if average is Average.constant:
        trajectories = len(members.trajectory.unique())
        return torch.full((count,), 1.0 / (trajectories * length), dtype=torch.float64)
    parts = {
        Average.trajectory_mean: members.trajectory,
        Average.prompt_mean: members.group,
        Average.sequence_mean: members.segment,
    }
    _, index, counts = parts[average].unique(return_inverse=True, return_counts=True)
    return 1.0 / (counts[index] * len(counts)).double()
