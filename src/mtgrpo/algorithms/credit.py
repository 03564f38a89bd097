"""From rewards to one advantage per trajectory: group by group, failed and truncated trajectories treated as asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtgrpo.algorithms import Algorithm, Truncated
from mtgrpo.types import Group, Status


def trajectory_advantages(groups: Sequence[Group], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Advantage and trained mask of every trajectory that did not fail, in order of group and sibling.

    A group's statistics are over its trajectories, never over segments. Failed trajectories are in neither.
    """
    advantages: list[Tensor] = [torch.zeros(0)]
    trained: list[bool] = []
    for group in groups:
        played = [t for t in group.trajectories if t.status is not Status.FAILED]
        if not played:
            continue
        cut = [t.status is Status.TRUNCATED for t in played]
        rewards = torch.tensor([t.reward for t in played], dtype=torch.float64)
        if algorithm.truncated is Truncated.penalise:
            rewards = torch.where(torch.tensor(cut), rewards.clamp(max=0), rewards)
        advantages.append(algorithm.advantages(rewards).float())
        trained += [algorithm.truncated is not Truncated.mask or not truncated for truncated in cut]
    return torch.cat(advantages), torch.tensor(trained, dtype=torch.bool)
