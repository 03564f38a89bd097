"""All weights from the trainer's GPU to that of a vLLM server, by the interface of vLLM 0.32. Not run on a GPU yet.

    /init_weight_transfer_engine    once after each start of a server
    /start_weight_update            then /update_weights for each bucket, then /finish_weight_update

A bucket is weights as bytes, one behind the other. One bucket is in memory at a time, whatever the number of servers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.cuda import nccl
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mtgrpo.engines.server.replica import LostError
from mtgrpo.errors import EngineError
from mtgrpo.model.load import saved_weights
from mtgrpo.model.value import split_value_head
from mtgrpo.sync import Push, Server, untie_config

BUCKET_BYTES = 2**28  # of one bucket, unless a single weight is larger

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Which weights are in a bucket, in the order of their bytes."""

    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype

    @property
    def sizes(self) -> list[int]:
        """Bytes of each weight."""
        return [self.dtype.itemsize * torch.Size(shape).numel() for shape in self.shapes]

    @property
    def info(self) -> dict[str, Any]:
        """As vLLM is told of them."""
        kind = str(self.dtype).removeprefix("torch.")
        return {"names": self.names, "shapes": self.shapes, "dtype_names": [kind] * len(self.names)}


def buckets(weights: Mapping[str, torch.Tensor], dtype: torch.dtype, capacity: int) -> Iterator[Bucket]:
    """Every weight once, in their order, in buckets of at most `capacity` bytes, which hold the largest weight."""
    bucket, filled = Bucket([], [], dtype), 0
    for name, weight in weights.items():
        size = dtype.itemsize * weight.numel()
        if filled + size > capacity:
            yield bucket
            bucket, filled = Bucket([], [], dtype), 0
        bucket.names.append(name)
        bucket.shapes.append(list(weight.shape))
        filled += size
    yield bucket


class Transfer(Push):
    """All weights, out of the tensors that are trained: what is loaded is what they are at that moment."""

    backend: ClassVar[str]  # vLLM's name for it

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """`folder`/served is a model without weights, for servers to start with. dtype: what they compute in."""
        self._folder = folder / "served"
        self.served = str(self._folder)
        self.words = ["--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": self.backend})]
        self._dtype = dtype
        self._weights: dict[str, torch.Tensor] = {}
        self._capacity = self._writes = 0
        self._turn = asyncio.Lock()

    def write(self, model: PreTrainedModel, version: int) -> int:
        """The configuration, the first time; the bytes are those that each server gets."""
        if not self._folder.exists():
            model.config.save_pretrained(self._folder)
            untie_config(model, self._folder)
        self._weights = revert_weight_conversion(model, split_value_head(saved_weights(model))[0])
        sizes = [self._dtype.itemsize * weight.numel() for weight in self._weights.values()]
        self._capacity, self._writes = max(BUCKET_BYTES, *sizes), self._count_writes()
        return sum(sizes)

    @property
    def current(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether nothing was trained since."""
        return self._writes == self._count_writes()

    def _count_writes(self) -> int:
        return sum(weight._version for weight in self._weights.values())  # pyright: ignore[reportPrivateUsage]

    async def load(self, server: Server) -> None:
        """One server at a time."""
        async with self._turn:
            device = next(iter(self._weights.values())).device
            space = torch.empty(self._capacity, dtype=torch.uint8, device=device)
            await server.ask("POST", "/start_weight_update")
            for bucket in buckets(self._weights, self._dtype, self._capacity):
                await self._send(server, bucket, await asyncio.to_thread(self._fill, space, bucket))
            await server.ask("POST", "/finish_weight_update")

    def _fill(self, space: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The part of `space` that the bytes of `bucket` are in."""
        parts = space[: sum(bucket.sizes)].split(bucket.sizes)
        for name, part in zip(bucket.names, parts, strict=True):
            part.view(self._dtype).copy_(self._weights[name].detach().reshape(-1))
        return space[: sum(bucket.sizes)]

    @abstractmethod
    async def _send(self, server: Server, bucket: Bucket, filled: torch.Tensor) -> None:
        """Return when `server` has the bytes of `bucket`, which are in `filled`."""


class IPC(Transfer):
    """By CUDA IPC: a server on the same GPU maps the memory of the bucket and copies it.

    vLLM takes the handle of that memory as a pickle alone, so its process unpickles what it is sent. That is for
    servers that listen on a socket in a folder of this user's, and never for one with a port.
    """

    backend = "ipc"
    variables: Mapping[str, str] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    async def meet(self, server: Server) -> None:
        await server.ask("POST", "/init_weight_transfer_engine", json={"init_info": {"packed": True}})

    async def load(self, server: Server) -> None:
        await super().load(server)
        torch.cuda.ipc_collect()  # the server has let go of the memory

    async def _send(self, server: Server, bucket: Bucket, filled: torch.Tensor) -> None:
        torch.cuda.synchronize(filled.device)
        gpu = str(torch.cuda.get_device_properties(filled.device).uuid)
        _, handle = reduce_tensor(filled)
        await server.ask("POST", "/update_weights", json={"update_info": self.shared(bucket, gpu, handle)})

    @staticmethod
    def shared(bucket: Bucket, gpu: str, handle: tuple[Any, ...]) -> dict[str, Any]:
        """What a server is told of `bucket`. handle: what `reduce_tensor` says of its memory; gpu: the UUID."""
        pickled = base64.b64encode(pickle.dumps({gpu: handle})).decode()
        return {**bucket.info, "tensor_sizes": bucket.sizes, "ipc_handles_pickled": pickled}


class NCCL(Transfer):
    """By NCCL: each server is in a group of its own with the trainer, and may be lost without harm to the others'.

    A server that is lost within a transfer ends the run: a broadcast that has begun cannot be taken back.
    """

    backend = "nccl"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder, dtype)
        self._groups: dict[Server, Any] = {}

    async def meet(self, server: Server) -> None:
        """Raises EngineError where NCCL finds no way between the GPUs."""
        ranks = 1 + (await server.ask("GET", "/get_world_size"))["world_size"]
        name, device = nccl.unique_id(), next(iter(self._weights.values())).device

        def join() -> Any:
            with torch.cuda.device(device):
                group = nccl.init_rank(ranks, name, 0)
                nccl.all_reduce([torch.zeros(1, device=device)], comms=[group])  # vLLM begins so too
                torch.cuda.current_stream().synchronize()
                return group

        asked = server.ask("POST", "/init_weight_transfer_engine", json={"init_info": self.group(name, ranks)})
        try:
            self._groups[server] = await _beside(asked, join)
        except RuntimeError as error:
            raise EngineError(f"NCCL does not reach a server, set engine.sync=files: {error}") from error

    def group(self, name: bytes, ranks: int) -> dict[str, Any]:
        """What a server is told of the group `name`, NCCL's unique id; the trainer is the first of the `ranks`."""
        rendezvous = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "rank_offset": 1, "world_size": ranks}
        return {**rendezvous, "packed": True, "packed_buffer_size_bytes": self._capacity}

    async def _send(self, server: Server, bucket: Bucket, filled: torch.Tensor) -> None:
        stream = torch.cuda.Stream(filled.device)
        stream.wait_stream(torch.cuda.current_stream(filled.device))

        def broadcast() -> None:
            nccl.broadcast([filled], streams=[stream], comms=[self._groups[server]])
            stream.synchronize()

        try:
            await _beside(server.ask("POST", "/update_weights", json={"update_info": bucket.info}), broadcast)
        except LostError as error:
            raise EngineError(f"a server was lost while weights were sent by NCCL: resume the run; {error}") from error


async def _beside(asked: Coroutine[Any, Any, Any], work: Callable[[], T]) -> T:
    """The result of `work`, which needs what is `asked` of a server to be done at the same time.

    It has a thread that nobody waits for: without its other side NCCL never returns.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    theirs, ours = asyncio.ensure_future(asked), asyncio.wrap_future(done)
    try:
        await asyncio.wait([theirs, ours], return_when=asyncio.FIRST_EXCEPTION)
        if theirs.done():
            theirs.result()
        return ours.result()
    finally:
        theirs.cancel()
