"""From settings to servers: where weights are exchanged, how they are pushed, and the command lines."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mtgrpo.engines.server import Kind, Server, Sync
from mtgrpo.engines.server.engine import ServerEngine
from mtgrpo.engines.server.replica import Process, Replica
from mtgrpo.engines.server.sglang import SGLang
from mtgrpo.engines.server.transfer import IPC, NCCL
from mtgrpo.engines.server.vllm import VLLM, command, environment, interpreter
from mtgrpo.model.load import computes_in
from mtgrpo.model.lora import has_adapter
from mtgrpo.sync import Adapter, Files, Nothing, Push

SHARED_MEMORY = Path("/dev/shm")
COPIES = 3  # of the weights that may lie there at once: the old ones, the new ones, and room


def start_engine(settings: Server, model: PreTrainedModel, longest_context: int, folder: Path | None) -> ServerEngine:
    """See `Server.start`."""
    if not settings.url:
        settings = replace(settings, python=interpreter(settings.python))
    sync, _ = settings.way(has_adapter(model))
    exchange = _exchange(model, None if not settings.url else folder or Path.cwd())
    push = _push(sync, model, exchange)
    if settings.url:
        kind = VLLM if settings.kind is Kind.vllm else SGLang
        replicas: list[Replica] = [kind(f"the server at {url}", url) for url in settings.url]
    else:
        replicas = started(settings, push, model, longest_context, exchange, folder or exchange)
    sleeps = model.device.type == "cuda" and settings.shares_gpu
    return ServerEngine(replicas, push, longest_context, settings.start_timeout_s, sleeps, exchange)


def started(
    settings: Server, push: Push, model: PreTrainedModel, longest_context: int, exchange: Path, logs: Path
) -> list[Replica]:
    """Servers with processes that are not started yet, which listen on sockets in `exchange`."""
    dtype = str(_dtype(model)).removeprefix("torch.")
    rank, replicas = push.rank if isinstance(push, Adapter) else 0, list[Replica]()
    for number in range(settings.replicas):
        socket = exchange / f"server_{number}"
        place = ["--uds", str(socket), *push.words]
        words = [settings.python, *command(settings, push.served, dtype, longest_context, place, rank)]
        variables = {**environment(settings, number), **push.variables}
        process = Process(words, variables, logs / f"server_{number}.log", exchange, socket)
        replicas.append(VLLM(f"server {number}", "http://server", process))
    return replicas


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """What servers compute in."""
    return torch.float32 if model.dtype is torch.float64 else computes_in(model)


def _exchange(model: PreTrainedModel, shared: Path | None) -> Path:
    """A new folder for weights: in memory where there is room; in `shared`, for servers elsewhere, always the same."""
    if shared is not None:
        place = shared.absolute() / "mtgrpo-exchange"
        shutil.rmtree(place, ignore_errors=True)  # a run that was killed has left it
        place.mkdir(parents=True)
        return place
    needed = COPIES * sum(weight.nbytes for weight in model.parameters())
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    return Path(tempfile.mkdtemp(prefix="mtgrpo-", dir=SHARED_MEMORY if in_memory else None))


def _push(sync: Sync, model: PreTrainedModel, exchange: Path) -> Push:
    if sync is Sync.none:
        return Nothing()
    if sync is Sync.adapter:
        return Adapter(exchange, model)
    return {Sync.ipc: IPC, Sync.nccl: NCCL, Sync.files: Files}[sync](exchange, _dtype(model))
