"""From rewards to one advantage per trajectory: group by group, failed and truncated trajectories treated as asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtgrpo.algorithms import Algorithm, Truncated
from mtgrpo.types import Group, Status, Trajectory


def trained_reward(trajectory: Trajectory, truncated: Truncated) -> float:
    """The reward that training sees: as scored, or at most 0 where a truncated trajectory is penalised."""
    if truncated is Truncated.penalise and trajectory.status is Status.TRUNCATED:
        return min(0.0, trajectory.reward)
    return trajectory.reward


def comparable(groups: Sequence[Group]) -> list[Group]:
    """The groups without failed trajectories. One that is left alone has nothing to be compared with: it goes too."""
    found: list[Group] = []
    for group in groups:
        played = [t for t in group.trajectories if t.status is not Status.FAILED]
        if played and len(played) >= min(2, len(group.trajectories)):
            found.append(Group(group.task, played))
    return found


def trajectory_advantages(groups: Sequence[Group], algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Advantage and trained mask of every trajectory, in order of group and sibling; none of them has failed.

    A group's statistics are over its trajectories, never over segments.
    """
    advantages: list[Tensor] = [torch.zeros(0)]
    trained: list[bool] = []
    for group in groups:
        played = group.trajectories
        rewards = torch.tensor([trained_reward(t, algorithm.truncated) for t in played], dtype=torch.float64)
        advantages.append(algorithm.advantages(rewards).float())
        masked = algorithm.truncated is Truncated.mask
        trained += [not (masked and t.status is Status.TRUNCATED) for t in played]
    return torch.cat(advantages), torch.tensor(trained, dtype=torch.bool)
