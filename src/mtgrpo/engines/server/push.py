"""How new weights reach the servers, and the proof that they hold them.

Each way writes what servers read, once for all of them, and then has each server take it over: files, an adapter, or
what lies in the memory of the trainer's GPU. That goes by the interface of vLLM 0.32, and was not run on a GPU yet:

    /init_weight_transfer_engine    once after each start of a server
    /start_weight_update            then /update_weights for each bucket, then /finish_weight_update

A bucket is weights as bytes, one behind the other. One bucket is in the memory of the GPU at a time, whatever the
number of servers; weights that several ranks train are all in the host's while they are sent.
"""

import asyncio
import base64
import json
import math
import os
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.reductions import reduce_tensor

from mtgrpo.engines.server.replica import HEAT, LostError, Replica
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import device_of_process
from mtgrpo.runtime.isolation import run_in_thread
from mtgrpo.runtime.workers import together
from mtgrpo.weights.source import WeightSource

PROOF_TOKENS = 64  # tokens of a context that both sides compute
TOP = 20  # tokens of the vocabulary that are compared after each
# nats; smaller differences between two implementations are accepted whatever the model's own rounding is
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-4}
BUCKET_BYTES = 2**28  # of one bucket, unless a single weight is larger


class ProofError(EngineError):
    """A server does not hold the trainer's weights."""


class Proof:
    """What the trainer's own forward pass says of a context by its present weights, to be compared with servers."""

    def __init__(self, source: WeightSource, context: Sequence[int]) -> None:
        reference = source.logprobs(context)
        self.version, self.tokens = source.version, list(context)
        self.bound = max(TOLERANCE[source.dtype], reference.bound)  # nats, the largest distance that is accepted
        *rows, last = reference.logprobs.float().cpu()
        self._expected = [*rows, (last / HEAT).log_softmax(-1)]  # [vocabulary] after each token

    def check(self, answers: Sequence[Mapping[int, float]], server: str) -> float:
        """The distance in nats of what `server` says, as `Replica.likeliest` gives it.

        It is the root mean square of the differences, each weighted by its token's probability. Raises ProofError
        where it is more than rounding explains.
        """
        squares = total = 0.0
        for row, listed in zip(self._expected, answers, strict=False):
            expected = row[torch.tensor(list(listed))]
            weight = expected.exp()
            squares += (weight * (torch.tensor(list(listed.values())) - expected).square()).sum().item()
            total += weight.sum().item()
        apart = (squares / total) ** 0.5 if total and len(answers) == len(self._expected) else math.nan
        if not apart <= self.bound:
            raise ProofError(
                f"{server} does not hold the trainer's weights: after update {self.version} its log-probabilities over "
                f"{len(self.tokens)} tokens differ from the trainer's by {apart:.2g} nats, and {self.bound:.2g} are "
                "accepted; what was pushed was not taken over, or it serves another model, computes in another dtype, "
                "or gives other log-probabilities than it samples with (vLLM: --logprobs-mode processed_logprobs)"
            )
        return apart


class Push(ABC):
    """One way to bring weights to servers."""

    words: Sequence[str] = ()  # more for the command line of a server that is started
    variables: Mapping[str, str] = {}  # more for its environment
    rank = 0  # of the adapters that it takes

    def __init__(self, folder: Path, source: WeightSource, exact: bool = False) -> None:
        """`folder` is where both sides read and write. exact: servers compute as the trainer does."""
        self._folder = folder / "served"
        self.served = str(self._folder)  # the model that a server is started with
        rounded = source.dtype is torch.float64 and not exact
        self.dtype = torch.float32 if rounded else source.dtype  # what servers compute in
        self._saved_in = None if exact else self.dtype  # None: as the weights are

    @property
    def current(self) -> bool:
        """Whether what was written last can still be loaded; else the next version can be."""
        return True

    @abstractmethod
    def write(self, source: WeightSource) -> int:
        """Write what is new; returns its bytes. Runs in a thread, while nothing is trained."""

    async def meet(self, server: Replica) -> None:
        """What both sides must know of one another, before the first `load` after each start of `server`."""
        return

    @abstractmethod
    async def load(self, server: Replica) -> None:
        """Let `server` take over what was written last."""


class Nothing(Push):
    """Nothing is pushed: servers must hold the weights already, which the proof finds out."""

    def write(self, source: WeightSource) -> int:
        return 0

    async def load(self, server: Replica) -> None:
        return


class Files(Push):
    """All weights: `folder`/served is a model as servers load it. A file appears there whole or not at all."""

    def write(self, source: WeightSource) -> int:
        """The weights in the dtype that servers compute in, the head among them where it is tied too."""
        partial = self._folder.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        written = source.save(partial, self._saved_in)
        self._folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, self._folder / path.name)
        return written

    async def load(self, server: Replica) -> None:
        await server.reload(self._folder)


class Adapter(Push):
    """The LoRA adapter alone: `folder`/policy-N, as peft writes it, the N-th; servers have the base."""

    def __init__(self, folder: Path, source: WeightSource, exact: bool = False) -> None:
        """Raises ConfigError where nothing is adapted, or no base is there to be served."""
        super().__init__(folder, source, exact)
        if source.lora is None or not source.lora.base_model_name_or_path:
            raise ConfigError("engine.sync=adapter: the model has no adapter of a saved base; set model.lora.rank=16")
        self.served = str(source.lora.base_model_name_or_path)
        self.rank = max([source.lora.r, *(source.lora.rank_pattern or {}).values()])
        self._written = 0  # a server takes no second one of a name, and a warm start ends at its version

    def write(self, source: WeightSource) -> int:
        """The adapter; the one before it is removed, and the one before that was let go of by then."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._written += 1
        self._folder = self._folder.with_name(f"policy-{self._written}")
        return source.save(self._folder)

    async def load(self, server: Replica) -> None:
        await server.load_adapter(self._folder.name, self._folder)


def buckets(sizes: Mapping[str, int], capacity: int) -> Iterator[list[str]]:
    """Every name once, in their order, by buckets of at most `capacity` bytes; none of the `sizes` is larger."""
    names, filled = list[str](), 0
    for name, size in sizes.items():
        if filled + size > capacity:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


class Transfer(Push):
    """All weights, out of the tensors that are trained: what is loaded is what they are at that moment.

    `folder`/served is a model without weights, for servers to start with.
    """

    backend: ClassVar[str]  # vLLM's name for it

    def __init__(self, folder: Path, source: WeightSource, exact: bool = False) -> None:
        super().__init__(folder, source, exact)
        self.words = ["--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": self.backend})]
        self._source, self._changes = source, 0  # what the weights had seen when they were written
        weights = {name: (list(weight.shape), weight.nbytes) for name, weight in source.tensors(self.dtype)}
        self._shapes = {name: shape for name, (shape, _) in weights.items()}
        self._sizes = {name: size for name, (_, size) in weights.items()}  # in bytes
        self._capacity = max(BUCKET_BYTES, *self._sizes.values())
        self._turn = asyncio.Lock()

    def write(self, source: WeightSource) -> int:
        """The configuration, the first time; the bytes are those that each server gets."""
        if not self._folder.exists():
            source.save_config(self._folder)
        self._source, self._changes = source, source.changes
        return sum(self._sizes.values())

    @property
    def current(self) -> bool:
        """Whether nothing was trained since."""
        return self._changes == self._source.changes

    async def load(self, server: Replica) -> None:
        """One server at a time."""
        kind = str(self.dtype).removeprefix("torch.")
        async with self._turn:
            space = torch.empty(self._capacity, dtype=torch.uint8, device=device_of_process())
            await server.ask("POST", "/start_weight_update")
            tensors = self._source.tensors(self.dtype)
            for names in buckets(self._sizes, self._capacity):
                info = {"names": names, "shapes": [self._shapes[name] for name in names]}
                info["dtype_names"] = [kind] * len(names)
                await self._send(server, info, await asyncio.to_thread(self._fill, space, names, tensors))
            await server.ask("POST", "/finish_weight_update")

    def _fill(self, space: Tensor, names: list[str], tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
        """The part of `space` that the bytes of the next of `tensors`, which are called `names`, are in."""
        sizes = [self._sizes[name] for name in names]
        filled = space[: sum(sizes)]
        for part in filled.split(sizes):
            _, weight = next(tensors)
            part.view(self.dtype).copy_(weight.reshape(-1))
        return filled

    @abstractmethod
    async def _send(self, server: Replica, info: dict[str, Any], filled: Tensor) -> None:
        """Return when `server` has the bytes of a bucket, which are in `filled`; info: what weights they are."""


class IPC(Transfer):
    """By CUDA IPC: a server on the same GPU maps the memory of the bucket and copies it.

    vLLM takes the handle of that memory as a pickle alone, so its process unpickles what it is sent. That is for
    servers that listen on a socket in a folder of this user's, and never for one with a port.
    """

    backend = "ipc"
    variables: Mapping[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    async def meet(self, server: Replica) -> None:
        await server.ask("POST", "/init_weight_transfer_engine", {"init_info": {"packed": True}})

    async def load(self, server: Replica) -> None:
        """See `Push.load`. Raises EngineError where the server cannot map the memory."""
        try:
            await super().load(server)
        except LostError:
            raise
        except (EngineError, RuntimeError) as error:
            raise EngineError(f"CUDA IPC does not reach a server, set engine.sync=files: {error}") from error
        torch.cuda.ipc_collect()  # the server has let go of the memory

    async def _send(self, server: Replica, info: dict[str, Any], filled: Tensor) -> None:
        await asyncio.to_thread(torch.cuda.synchronize, filled.device)
        _, handle = reduce_tensor(filled)
        handles = pickle.dumps({str(torch.cuda.get_device_properties(filled.device).uuid): handle})
        info["tensor_sizes"] = [self._sizes[name] for name in info["names"]]
        info["ipc_handles_pickled"] = base64.b64encode(handles).decode()
        await server.ask("POST", "/update_weights", {"update_info": info})


class NCCL(Transfer):
    """By NCCL: each server is in a group of its own with the trainer, and may be lost without harm to the others'.

    A server that is lost within a transfer ends the run: a broadcast that has begun cannot be taken back.
    """

    backend = "nccl"

    def __init__(self, folder: Path, source: WeightSource, exact: bool = False) -> None:
        super().__init__(folder, source, exact)
        self._groups: dict[Replica, Any] = {}

    async def meet(self, server: Replica) -> None:
        ranks, name = 1 + (await server.ask("GET", "/get_world_size"))["world_size"], nccl.unique_id()
        info = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "rank_offset": 1, "world_size": ranks}
        info |= {"packed": True, "packed_buffer_size_bytes": self._capacity}
        asked = server.ask("POST", "/init_weight_transfer_engine", {"init_info": info})
        self._groups[server] = await _beside(asked, lambda: self._join(name, ranks))

    def _join(self, name: bytes, ranks: int) -> Any:
        """The group that NCCL's unique id `name` is of; its first rank. EngineError where it does not come about."""
        try:
            with torch.cuda.device(device_of_process()):
                group = nccl.init_rank(ranks, name, 0)
                nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[group])  # vLLM begins so too
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise EngineError(f"NCCL does not reach a server, set engine.sync=files: {error}") from error
        return group

    async def _send(self, server: Replica, info: dict[str, Any], filled: Tensor) -> None:
        def broadcast() -> None:
            stream = torch.cuda.Stream(filled.device)
            stream.wait_stream(torch.cuda.current_stream(filled.device))
            nccl.broadcast([filled], streams=[stream], comms=[self._groups[server]])
            stream.synchronize()

        try:
            await _beside(server.ask("POST", "/update_weights", {"update_info": info}), broadcast)
        except LostError as error:
            raise EngineError(f"a server was lost while weights were sent by NCCL: resume the run; {error}") from error


async def _beside(asked: Coroutine[Any, Any, Any], work: Callable[[], Any]) -> Any:
    """What `work` gives, which returns once a server does what it is `asked`; where it does not, nobody waits on."""
    return (await together([asked, asyncio.wait_for(run_in_thread(work, bounded=False), None)]))[1]
