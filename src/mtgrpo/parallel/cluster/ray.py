"""A Ray cluster places what trains and what samples, and places it anew where a machine is lost."""

import os
import socket
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.parallel.cluster import Cluster
from mtgrpo.parts import Network
from mtgrpo.runtime.packages import refuse_without_package

CONNECT_S = 5.0  # for a head that is said to be running


@dataclass
class Ray(Cluster, cpus="> 0", wait_s=">= 0", restarts=">= 0"):
    """A Ray cluster: what trains and what samples are processes of their own, on any of its machines.

    All machines see the folder of the run, under the same name.
    """

    places = True

    # HOST:PORT of a head; auto: one running on this machine; local: a new one; "": RAY_ADDRESS, else auto, else local
    address: Network = ""
    cpus: float = 1.0  # cores of each process, and its threads; those that train or sample on GPUs have one each beside
    wait_s: float = 0.0  # for machines that are not there yet, as with autoscaling; 0 = what does not fit is refused
    restarts: int = 3  # after a rank was lost, from the last checkpoint; in a row, without a new one in between

    def check(self, experiment: Any) -> None:
        """Refuse what a process elsewhere does not do."""
        if self.address.startswith("ray://"):
            raise ConfigError(
                f"cluster.address={self.address} is for Ray's client, and a run is part of the cluster: start it there "
                "with mtgrpo launch ray --address http://HEAD:8265"
            )
        if experiment.trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic=true with cluster=ray: what an engine samples at once depends on how quick "
                "others are; leave it out"
            )
        if experiment.devices.reference.count:
            raise ConfigError(
                "devices.reference is for one machine; with cluster=ray the reference is on the ranks: leave it out"
            )
        if experiment.condenser.attends:
            raise ConfigError(
                f"condenser {experiment.condenser.name} goes by the model's attention, and with cluster=ray engines "
                "are elsewhere: set another condenser"
            )

    def check_machine(self) -> None:
        """Refuse where Ray is not installed, and where nobody answers at the address."""
        refuse_without_package("ray", "cluster=ray")
        if (address := self.address or os.environ.get("RAY_ADDRESS", "auto")) in ("auto", "local"):
            return
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"cluster.address={address}: give auto, local, or HOST:PORT as ray start --head prints")
        reach("cluster.address", address, host.strip("[]"), int(port))


def reach(setting: str, address: str, host: str, port: int) -> None:
    """Raise ConfigError where nobody answers at the address that `setting` gives."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{setting}={address}: no Ray cluster answers ({error}); ray start --head prints its address"
        ) from error
