"""Every rank has the whole model."""

from dataclasses import dataclass

from mtgrpo.parallel import Parallel


@dataclass
class DDP(Parallel):
    """Every rank has the whole model; gradients are summed once an optimiser step."""
