"""Where the processes of a run are: on this machine, or where a cluster places them. Settings alone, a file each."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from mtgrpo.parts import Part


@dataclass
class Cluster(Part, ABC):
    """Base of all places for the processes of a run."""

    places: ClassVar[bool] = False  # what trains and what samples, each by itself; else both are where the run began
    restarts = 0  # of ranks that were lost, without a new checkpoint in between
    restarted = 0  # how often the run has begun again for that, on a copy

    @property
    def name(self) -> str:
        """As it is chosen."""
        return type(self).__module__.rpartition(".")[2]
