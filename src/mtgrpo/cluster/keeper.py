"""A place on a machine, in which one program runs: a rank, or a server that samples. A cluster makes it an actor.

The program ends with the process of its keeper, and that ends with the controller.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, NamedTuple

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.processes import start_logged

GRACE_S = 3.0  # for a program to end by itself
PACKAGE = Path(__file__).parent.parent
SIOCGIFADDR = 0x8915  # of Linux: the address of a network interface


class Facts(NamedTuple):
    """What must be known of a machine."""

    address: str
    node: str  # as Ray names it
    versions: Mapping[str, str]
    sees: bool  # whether it has the folder of the run

    def checked(self, folder: Path) -> Facts:
        """The same. Raises ConfigError where the machine is not fit for the run in `folder`."""
        for name, version in versions().items():
            if (other := self.versions.get(name)) != version:
                raise ConfigError(
                    f"cluster=ray: machine {self.address} has {name} {other}, and here is {version}: install the same "
                    "on all machines"
                )
        if not self.sees:
            raise ConfigError(
                f"cluster=ray: machine {self.address} does not see {folder}: set hydra.run.dir to a folder on a disk "
                "that all machines have"
            )
        return self


class Keeper:
    """Is an actor; see the module."""

    def __init__(self, where: Callable[[], tuple[str, str]]) -> None:
        """where: tells the address of its machine, and how the cluster calls that."""
        self._address, self._node = where()
        self._process: subprocess.Popen[Any] | None = None
        self._door: Listener | None = None

    def facts(self, folder: str) -> Facts:
        """Of its machine; folder: that of the run."""
        return Facts(self._address, self._node, versions(), Path(folder).is_dir())

    def port(self) -> int:
        """One that is free."""
        with socket.create_server((self._address, 0)) as free:
            return free.getsockname()[1]

    def door(self, key: bytes) -> Any:
        """The address at which it lets in, before `run`, those who know `key`."""
        self._door = Listener((self._address, 0), authkey=key)
        return self._door.address

    def run(self, words: Sequence[str], variables: Mapping[str, str], log: str, connections: int = 0) -> int:
        """The exit code of a module of Python that is run with these words, once it has ended.

        The numbers of so many `connections`, which come in by the door, are added to the words.
        """
        with self._door or contextlib.nullcontext() as door:
            inside = [door.accept() for _ in range(connections)] if door else []
        for one in inside:
            send_at_once(one.fileno())
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), environment.get("PYTHONPATH"))))
        environment.setdefault("GLOO_SOCKET_IFNAME", _interface(self._address))
        passed = [one.fileno() for one in inside]
        command = [sys.executable, "-P", "-m", *words, *map(str, passed)]
        self._process = process = start_logged(command, environment, Path(log), passed, GRACE_S)
        for one in inside:
            one.close()
        return process.wait()

    def end(self) -> None:
        """End the program, and return when it is gone."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@functools.cache
def versions() -> dict[str, str]:
    """What must be the same on all machines."""
    found = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return {"mtgrpo": f"of sources {digest.hexdigest()[:8]}", **found}


def _interface(address: str) -> str:
    """The network interface that has this address, by which ranks on other machines are reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"


def send_at_once(number: int) -> None:
    """Let the socket with this number wait for no more to send with what it is given."""
    with socket.socket(fileno=os.dup(number)) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
