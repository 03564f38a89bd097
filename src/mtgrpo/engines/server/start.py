"""From settings to servers: where weights are exchanged, how they are pushed, and the command lines."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from mtgrpo.engines.server import Server, Sync
from mtgrpo.engines.server.engine import ServerEngine
from mtgrpo.engines.server.replica import Process, Replica
from mtgrpo.engines.server.vllm import VLLM, command, environment, interpreter
from mtgrpo.model.load import device_of_process
from mtgrpo.weights.push import Adapter, Files, Nothing, Push
from mtgrpo.weights.source import WeightSource
from mtgrpo.weights.transfer import IPC, NCCL

SHARED_MEMORY = Path("/dev/shm")
COPIES = 3  # of the weights that may lie there at once: the old ones, the new ones, and room


def start_engine(settings: Server, source: WeightSource, longest_context: int, folder: Path | None) -> ServerEngine:
    """See `Server.start`."""
    if not settings.url:
        settings = replace(settings, python=interpreter(settings.python))
    sync, _ = settings.way(source.lora is not None)
    exchange = _exchange(source, None if not settings.url else folder or Path.cwd())
    push = _push(sync, source, exchange)
    if settings.url:
        interface = settings.interface()
        replicas: list[Replica] = [interface(f"the server at {url}", url) for url in settings.url]
    else:
        replicas = started(settings, push, source, longest_context, exchange, folder or exchange)
    sleeps = device_of_process().type == "cuda" and settings.shares_gpu
    return ServerEngine(replicas, push, longest_context, settings.start_timeout_s, sleeps, exchange)


def started(
    settings: Server, push: Push, source: WeightSource, longest_context: int, exchange: Path, logs: Path
) -> list[Replica]:
    """Servers with processes that are not started yet, which listen on sockets in `exchange`."""
    dtype = str(_dtype(source)).removeprefix("torch.")
    rank, replicas = push.rank if isinstance(push, Adapter) else 0, list[Replica]()
    for number in range(settings.replicas):
        socket = exchange / f"server_{number}"
        place = ["--uds", str(socket), *push.words]
        words = [settings.python, *command(settings, push.served, dtype, longest_context, place, rank)]
        variables = {**environment(settings, number), **push.variables}
        process = Process(words, variables, logs / f"server_{number}.log", exchange, socket)
        replicas.append(VLLM(f"server {number}", "http://server", process))
    return replicas


def _dtype(source: WeightSource) -> torch.dtype:
    """What servers compute in."""
    return torch.float32 if source.dtype is torch.float64 else source.dtype


def _exchange(source: WeightSource, shared: Path | None) -> Path:
    """A new folder for weights: in memory where there is room; in `shared`, for servers elsewhere, always the same."""
    if shared is not None:
        place = shared.absolute() / "mtgrpo-exchange"
        shutil.rmtree(place, ignore_errors=True)  # a run that was killed has left it
        place.mkdir(parents=True)
        return place
    needed = COPIES * source.size * source.dtype.itemsize
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    return Path(tempfile.mkdtemp(prefix="mtgrpo-", dir=SHARED_MEMORY if in_memory else None))


def _push(sync: Sync, source: WeightSource, exchange: Path) -> Push:
    if sync in (Sync.none, Sync.adapter):
        return Nothing() if sync is Sync.none else Adapter(exchange, source)
    return {Sync.ipc: IPC, Sync.nccl: NCCL, Sync.files: Files}[sync](exchange, _dtype(source))
