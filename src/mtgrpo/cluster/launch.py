"""How ranks start: by the controller, or by torchrun and `accelerate launch`, whose rank 0 starts the controller.

The controller and rank 0 speak through two pairs of sockets that the one inherits from the other.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.parallel.launch import DOOR, KEY
from mtgrpo.runtime.processes import start_logged
from mtgrpo.runtime.resources import openmp_settings, threads_each

OF_LAUNCHERS = r"((GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 3.0  # for a rank to end after SIGTERM
CONTROLLER_S = 120.0  # for a controller to end after its ranks have


def inherited_sockets() -> list[socket.socket]:
    """To rank 0, which has started this process, when first asked for; [] where it has not."""
    return [socket.socket(fileno=int(number)) for number in os.environ.pop(DOOR, "").split()[1:]]


class Processes:
    """Ranks that the controller has started on this machine; they end with it, also where it is killed."""

    def __init__(self, devices: Sequence[int], folder: Path) -> None:
        """devices: the GPU of each, where there are any. folder: for what they print, and say of themselves."""
        from torch.distributed import TCPStore  # noqa: PLC0415  # pyright: ignore[reportPrivateImportUsage]

        listening = socket.create_server(("127.0.0.1", 0))  # by itself a store listens to other machines too
        host, port = listening.getsockname()
        self._store = TCPStore(  # where they meet
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        common = os.environ | openmp_settings(threads_each(len(devices)))
        common |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(devices))}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 makes no store of its own
        common[KEY] = secrets.token_hex(32)
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
        common.setdefault("GLOO_SOCKET_IFNAME", loopback)  # by itself gloo listens where the machine's name leads
        pairs = [socket.socketpair() for _ in range(2)]
        self.sockets = [ours for ours, _ in pairs]
        self.started: list[subprocess.Popen[Any]] = []
        for rank, device in enumerate(devices):
            inherited = [theirs.fileno() for _, theirs in pairs] if rank == 0 else []
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(device)}
            command = [sys.executable, "-P", "-m", "mtgrpo.cluster.rank", str(folder), *map(str, inherited)]
            log = folder / f"rank_{rank}.log"
            self.started.append(start_logged(command, environment, log, inherited, GRACE_S))
        for _, theirs in pairs:
            theirs.close()

    def end(self, after_s: float = 0.0) -> None:
        """Return when all have ended: by themselves, or because they had to after so many seconds."""
        until = time.monotonic() + after_s
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self.started:
            process.terminate()
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(4 * GRACE_S)


def join() -> None:
    """Be the rank that a launcher has started this process as, and end as it does. Rank 0 starts the controller.

    The controller has the words and streams of this process. What asks a run to end reaches it too: it saves before it
    ends, and for that needs its ranks, so that those go on. Raises ConfigError where the launcher is none.
    """
    if absent := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {absent[0]} is not set: start with torchrun or accelerate "
            "launch, or unset WORLD_SIZE"
        )
    controller, connections = _start_controller() if os.environ["RANK"] == "0" else (None, [])
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    from mtgrpo.cluster.rank import flush_and_exit, serve  # noqa: PLC0415  the controller begins before torch is loaded

    def leave(code: int) -> None:
        for connection in connections:
            connection.close()
        if controller is not None:  # which has more to do when it has closed, and says what became of its ranks
            with suppress(subprocess.TimeoutExpired):
                code = controller.wait(CONTROLLER_S if code else None)
        flush_and_exit(code if code >= 0 else 128 - code)

    serve(connections, None, leave)


def _start_controller() -> tuple[subprocess.Popen[Any], Sequence[Connection]]:
    pairs = [socket.socketpair() for _ in range(2)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    environment = {name: value for name, value in os.environ.items() if not re.fullmatch(OF_LAUNCHERS, name)}
    environment[DOOR] = " ".join(map(str, [os.environ["WORLD_SIZE"], *numbers]))
    controller = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment, pass_fds=numbers)
    for _, theirs in pairs:
        theirs.close()
    return controller, [Connection(ours.detach()) for ours, _ in pairs]
