"""One process trains."""

from dataclasses import dataclass

from mtgrpo.parallel import Parallel


@dataclass
class NoParallel(Parallel):
    """One process trains, on a CPU or one GPU."""
