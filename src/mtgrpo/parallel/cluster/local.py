"""All processes are on the machine where the run was started, or where a launcher starts them."""

from dataclasses import dataclass

from mtgrpo.parallel.cluster import Cluster


@dataclass
class OneMachine(Cluster):
    """This machine, or those on which torchrun and the like start the run."""
