"""Control experiments: advantages from which nothing can be learned, put in the place of the right ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mtgrpo.policy.settings import Control


def apply_control(control: Control, advantage: Tensor, trajectory: Tensor, seed: int) -> Tensor:
    """What a control experiment trains on; advantage, trajectory [tokens], tokens in the order of trajectories."""
    if control is Control.flipped:
        return -advantage
    return _shuffle(advantage, trajectory, seed) if control is Control.shuffled else advantage


def _shuffle(advantage: Tensor, trajectory: Tensor, seed: int) -> Tensor:
    """Give each trajectory the advantages of another, stretched over its own tokens."""
    _, index, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    generator = torch.Generator().manual_seed(seed + 2**40)  # another order than the mini-batches'
    other = torch.randperm(len(counts), generator=generator)[index]
    within = torch.arange(len(trajectory)) - starts[index]
    return advantage[starts[other] + within * counts[other] // counts[index]]
