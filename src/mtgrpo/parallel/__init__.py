"""Several processes that train one policy, called ranks: how they share the work, and which devices do what.

One file = one way to share it: settings alone, which `policy/layouts` carries out. `devices.py`: which devices train
and which sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mtgrpo.parts import Part


@dataclass
class Parallel(Part, ABC):
    """Base of all ways in which several processes train one policy."""

    @property
    @abstractmethod
    def divides(self) -> bool:
        """Whether weights, gradients and moments are divided among the ranks; else each has them whole."""
