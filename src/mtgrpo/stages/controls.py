"""Control experiments: advantages from which nothing can be learned, put in the place of the right ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mtgrpo.config.experiment import Advantages
from mtgrpo.policy.updater import Control


def control(chosen: Advantages) -> Control | None:
    """What `debug.advantages` does to the advantages; None: nothing."""
    if chosen is Advantages.flipped:
        return lambda advantage, trajectory, seed: -advantage
    if chosen is Advantages.shuffled:
        return _shuffled
    return None


def _shuffled(advantage: Tensor, trajectory: Tensor, seed: int) -> Tensor:
    """Each trajectory gets the advantages of another, stretched over its own tokens."""
    _, index, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    generator = torch.Generator().manual_seed(seed + 2**40)  # another order than the mini-batches'
    other = torch.randperm(len(counts), generator=generator)[index]
    within = torch.arange(len(trajectory)) - starts[index]
    return advantage[starts[other] + within * counts[other] // counts[index]]
