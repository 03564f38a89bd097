"""Ray places the processes of a run on the machines of a cluster, and says where they are. No data goes through it.

Ranks are packed, in a placement group; each server is placed by itself, spread, so that one can be lost and another can
join. All are kept by actors, which end with the controller; see `keeper.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.job_submission import JobSubmissionClient
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mtgrpo.cluster.keeper import GRACE_S, Facts, Keeper, send_at_once
from mtgrpo.engines.server.replica import SAID, LostError, ServerProcess
from mtgrpo.errors import ConfigError
from mtgrpo.parallel.cluster.ray import Ray
from mtgrpo.parallel.launch import KEY
from mtgrpo.runtime.processes import read_end
from mtgrpo.runtime.resources import cores

STORE_BYTES = 80 * 2**20  # of the object store of a cluster that is started here: nothing is kept there
PLACED_S = 120.0  # for a keeper to begin where there is room
SHOWN = 500  # characters of what Ray says


class RayCluster:
    """A cluster that this process has joined, or started."""

    def __init__(self, settings: Ray, folder: Path, cpus: float) -> None:
        """cpus: for which a cluster that is started has room. Raises ConfigError where none is to be reached."""
        self._settings, self._folder = settings, folder.absolute()
        _connect(settings, cpus)
        self.gpus = int(ray.cluster_resources().get("GPU", 0))
        self._at_once = 0  # servers for which there is room from the beginning

    def keeper(self, devices: int, strategy: Any) -> Any:
        """One that takes `devices` GPUs, where there are any."""
        resources = self.resources(devices)
        options: dict[str, Any] = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
        made: Any = ray.remote(Keeper)
        return made.options(**options, scheduling_strategy=strategy, max_restarts=0, max_concurrency=2).remote(_where)

    def resources(self, devices: int) -> dict[str, float]:
        """Of a process that takes `devices` GPUs, where there are any."""
        return {"CPU": self._settings.cpus, **({"GPU": float(devices)} if self.gpus else {})}

    def describe(self) -> str:
        """What the run has joined, on a line."""
        head, alive = ray.get_runtime_context().gcs_address, sum(node["Alive"] for node in ray.nodes())
        there = _listed(ray.cluster_resources())
        return f"cluster: Ray {ray.__version__} at {head}; machines: {alive}, with {there}"

    def check_room(self, ranks: int, servers: int, devices: int, again: bool) -> None:
        """Raise ConfigError where the machines that are there cannot hold so many. devices: GPUs of each server.

        A run that goes on `again` does with the servers that there is room for; others join when there is.
        """
        there, each = ray.cluster_resources(), self.resources(devices)
        left = {name: there.get(name, 0) - ranks * amount for name, amount in self.resources(1).items()}
        self._at_once = max(0, min([servers, *(int(left[name] / amount) for name, amount in each.items() if amount)]))
        least = min(1, servers) if again else servers
        if self._at_once < least and not self._settings.wait_s:
            asked = {name: ranks * amount + servers * each[name] for name, amount in self.resources(1).items()}
            raise self.no_room(f"{ranks} to train and {servers} to sample need {_listed(asked)}")

    def no_room(self, why: str) -> ConfigError:
        """What is asked, what there is, and what can be done."""
        there, free = ray.cluster_resources(), ray.available_resources()
        return ConfigError(
            f"cluster=ray: {why}, and there are {_listed(there)}, {_listed(free)} of them free: set devices.train.num, "
            "devices.rollout.num or cluster.cpus lower, or cluster.wait_s=600 where machines come when they are needed"
        )

    def ranks(self, devices: Sequence[int], folder: Path) -> RayRanks:
        """Start one for each of `devices`."""
        return RayRanks(self, len(devices), folder.absolute())

    def server(self, words: Sequence[str], variables: Mapping[str, str], devices: int, log: Path) -> RayServer:
        """See `Elsewhere`."""
        self._at_once -= 1
        return RayServer(self, words, variables, devices, log.absolute(), late=self._at_once < 0)

    def placed(self, keepers: Sequence[Any], what: str) -> list[Facts]:
        """Of the machines where they are. Raises ConfigError where there is no room, or it is not fit."""
        limit_s = max(PLACED_S, self._settings.wait_s)
        try:
            facts = ray.get([one.facts.remote(str(self._folder)) for one in keepers], timeout=limit_s)
        except GetTimeoutError:
            raise self.no_room(f"there was no room for {what} in {limit_s:g} s") from None
        except RayError as error:
            raise ConfigError(f"cluster=ray: {what} could not begin: {_line(error)}") from error
        return [each.checked(self._folder) for each in facts]


class RayRanks:
    """Ranks that Ray has placed; as `launch.Processes`."""

    def __init__(self, cluster: RayCluster, count: int, folder: Path) -> None:
        from torch.distributed import TCPStore  # noqa: PLC0415  # pyright: ignore[reportPrivateImportUsage]

        self._group = placement_group([cluster.resources(1)] * count, strategy="PACK")
        self._keepers = [
            cluster.keeper(1, PlacementGroupSchedulingStrategy(self._group, number)) for number in range(count)
        ]
        self.started: list[_RayRank] = []
        try:
            cluster.placed(self._keepers, f"{count} to train")
            here = ray.util.get_node_ip_address()
            self._store = TCPStore(here, 0, is_master=True, wait_for_workers=False)  # where they meet
            common = {"MASTER_ADDR": here, "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(count)}
            common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0"}  # of the GPUs that Ray shows it
            common[KEY] = secrets.token_hex(32)
            key = secrets.token_bytes(32)
            door = ray.get(self._keepers[0].door.remote(key))
            for rank, keeper in enumerate(self._keepers):
                words, log = ["mtgrpo.cluster.rank", str(folder)], str(folder / f"rank_{rank}.log")
                code = keeper.run.remote(words, {**common, "RANK": str(rank)}, log, 0 if rank else 2)
                self.started.append(_RayRank(code))
            self.sockets = [_connected(door, key) for _ in range(2)]
        except BaseException:
            self.end()
            raise

    def end(self, after_s: float = 0.0) -> None:
        """See `launch.Processes.end`."""
        if self.started and after_s:
            ray.wait([one.code for one in self.started], num_returns=len(self.started), timeout=after_s)
        ending = [keeper.end.remote() for keeper in self._keepers]
        ray.wait(ending, num_returns=len(ending), timeout=4 * GRACE_S)
        for keeper in self._keepers:
            ray.kill(keeper)
        remove_placement_group(self._group)


class _RayRank:
    """A rank, as far as its end is concerned."""

    def __init__(self, code: Any) -> None:
        self.code = code

    def poll(self) -> int | None:
        """Its exit code, once it has ended; as killed where its machine is lost."""
        if not ray.wait([self.code], timeout=0)[0]:
            return None
        try:
            return ray.get(self.code)
        except RayError:
            return -signal.SIGKILL


def _connected(address: Any, key: bytes) -> socket.socket:
    with Client(address, authkey=key) as connection:
        send_at_once(connection.fileno())
        return socket.socket(fileno=os.dup(connection.fileno()))


@dataclass(eq=False)
class RayServer(ServerProcess):
    """A server that Ray has placed, anew after each loss."""

    cluster: RayCluster
    words: Sequence[str]
    variables: Mapping[str, str]
    devices: int
    log: Path
    late: bool  # there is no room for it yet
    _node = ""
    _keeper = _code = cast("Any", None)
    _begun = False  # whether it was placed, or was to be, before

    async def start(self) -> str:
        """See `ServerProcess.start`. From the second time on it waits for room as long as it takes."""
        await self.stop()
        begun, self._begun = self._begun, True
        if self.late and not begun:
            raise LostError("there is no room for it yet; it joins where a machine does")
        self._keeper = keeper = self.cluster.keeper(self.devices, "SPREAD")
        try:
            if begun:
                facts = (await keeper.facts.remote(str(self.log.parent))).checked(self.log.parent)
            else:
                (facts,) = await asyncio.to_thread(self.cluster.placed, [keeper], "one to sample")
            port = await keeper.port.remote()
        except RayActorError as error:
            raise LostError(f"its machine was lost: {_line(error)}") from error
        self._node = facts.node
        words = ["mtgrpo", "launch", *self.words, "--host", facts.address, "--port", str(port)]
        self._code = keeper.run.remote(words, self.variables, str(self.log))
        return f"http://{facts.address}:{port}"

    def is_leaving(self) -> bool:
        return self._node in ray._private.state.state.get_draining_nodes()  # pyright: ignore  as Ray's own trainer asks

    @property
    def ended(self) -> str:
        if self._code is None or not ray.wait([self._code], timeout=0)[0]:
            return ""
        try:
            code = ray.get(self._code)
        except RayError as error:
            raise LostError(f"its machine was lost: {_line(error)}") from error
        return f"it ended with exit code {code}; the end of {self.log}:\n{read_end(self.log, SAID)}"

    async def stop(self) -> None:
        keeper, self._keeper, self._code = self._keeper, None, None
        if keeper is not None:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(keeper.end.remote(), 4 * GRACE_S)
            ray.kill(keeper)


@asynccontextmanager
async def open_cluster(settings: Ray, folder: Path, processes: int) -> AsyncGenerator[RayCluster]:
    """The cluster that is meant, until the run ends. Raises ConfigError where it is not to be reached.

    processes: of the run, for which one that is started has room.
    """
    cluster = RayCluster(settings, folder, processes * settings.cpus)
    try:
        yield cluster
    finally:
        ray.shutdown()


async def follow(address: str, name: str, command: str, environment: dict[str, Any]) -> tuple[str, str]:
    """Submit a job, and print what it prints until it has ended: its status, and what Ray says of it.

    environment: Ray's `runtime_env`. Raises ConfigError where Ray refuses it.
    """
    try:
        client = JobSubmissionClient(address)
        client.submit_job(entrypoint=command, submission_id=name, runtime_env=environment)
        async for text in client.tail_job_logs(name):
            print(text, end="", flush=True)
        while not (status := client.get_job_status(name)).is_terminal():
            await asyncio.sleep(1)
        return status.value, _line(client.get_job_info(name).message).partition(", last available logs")[0]
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"--address={address}: {_line(error)}") from error


def _where() -> tuple[str, str]:
    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


def _connect(settings: Ray, cpus: float) -> None:
    """Join the cluster that is meant, or start one with room for `cpus`. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        try:
            if address != "local":
                ray.init(address=address, **options)
                return
        except ConnectionError:
            if settings.address:
                raise
        if "RAY_AUTH_MODE" not in os.environ:  # else Ray would keep its own below the home folder
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        ray.init(address="local", num_cpus=max(cores(), int(-(-cpus // 1))), **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise ConfigError(f"cluster.address={settings.address}: {_line(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)


def _listed(resources: Mapping[str, float]) -> str:
    names = {"CPU": "cores", "GPU": "GPUs"}
    return " and ".join(f"{resources.get(name, 0):g} {named}" for name, named in names.items() if name in resources)


def _line(error: BaseException | str | None) -> str:
    return " ".join(str(error).split())[:SHOWN]
