"""How new weights reach servers that have a copy of their own, and the proof that they hold them.

Each way writes what servers read, once for all of them, and then has each server take it over: files, an adapter, or
(`weights/transfer.py`) what lies in the memory of the trainer's GPU.
"""

from __future__ import annotations

import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.weights.source import WeightSource

PROVEN = 64  # tokens of a context that both sides compute
TOP = 20  # tokens of the vocabulary that are compared after each
HOT = 2.0  # temperature at which one more token is sampled: its log-probability must be that of the same distribution
# nats; smaller differences between two implementations are accepted whatever the model's own rounding is
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-4}


class ProofError(EngineError):
    """A server does not hold the trainer's weights."""


class LostError(EngineError):
    """A server answers no more, or says that it is broken: others may answer in its place."""


class Server(ABC):
    """What a push needs of a server."""

    @abstractmethod
    async def reload(self, folder: Path) -> None:
        """Read all weights anew from the files in `folder`."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: Path) -> None:
        """Sample with adapter `name`, which is in `folder`, from here on."""

    @abstractmethod
    async def ask(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = 600.0, **params: str | int
    ) -> Any:
        """The JSON that it answers to a request of its own interface. Raises EngineError where it refuses."""


class Push(ABC):
    """One way to bring weights to servers."""

    served: str  # the model that a server is started with
    words: Sequence[str] = ()  # more for the command line of a server that is started
    variables: Mapping[str, str] = {}  # more for its environment

    @property
    def current(self) -> bool:
        """Whether what was written last can still be loaded; else the next version can be."""
        return True

    @abstractmethod
    def write(self, source: WeightSource) -> int:
        """Write what is new; returns its bytes. Runs in a thread, while nothing is trained."""

    async def meet(self, server: Server) -> None:
        """What both sides must know of one another, before the first `load` after each start of `server`."""
        return

    @abstractmethod
    async def load(self, server: Server) -> None:
        """Let `server` take over what was written last."""


@dataclass(frozen=True)
class Proof:
    """What the trainer's own forward pass says of a context, to be compared with what servers say."""

    version: int
    tokens: list[int]
    logprobs: torch.Tensor  # [positions, vocabulary], of the next token
    bound: float  # nats, the largest distance that is accepted

    @staticmethod
    def of(source: WeightSource, context: Sequence[int]) -> Proof:
        """By the present weights, over `context`."""
        expected = source.logprobs(context)
        bound = max(TOLERANCE[source.dtype], expected.bound)
        return Proof(source.version, list(context), expected.logprobs.float().cpu(), bound)

    def distance(self, found: Sequence[Mapping[int, float]]) -> float:
        """Root mean square of the differences in nats, each weighted by its token's probability.

        found: for each token after the first, log-probabilities of that token and of the likeliest ones in its place;
        at last that of a token that was sampled at temperature `HOT`.
        """
        squares = total = 0.0
        expecting = [*self.logprobs[:-1], (self.logprobs[-1] / HOT).log_softmax(-1)]
        if len(found) != len(expecting):
            return math.nan
        for row, listed in zip(expecting, found, strict=True):
            ids = torch.tensor(list(listed))
            expected = row[ids]
            weight = expected.exp()
            squares += (weight * (torch.tensor(list(listed.values())) - expected).square()).sum().item()
            total += weight.sum().item()
        return (squares / total) ** 0.5 if total else math.nan

    def check(self, found: Sequence[Mapping[int, float]], server: str) -> float:
        """The distance in nats. Raises ProofError where it is more than rounding explains."""
        apart = self.distance(found)
        if not apart <= self.bound:
            raise ProofError(
                f"{server} does not hold the trainer's weights: after update {self.version} its log-probabilities over "
                f"{len(self.tokens)} tokens differ from the trainer's by {apart:.2g} nats, and {self.bound:.2g} are "
                "accepted; what was pushed was not taken over, or it serves another model, computes in another dtype, "
                "or gives other log-probabilities than it samples with (vLLM: --logprobs-mode processed_logprobs)"
            )
        return apart


class Nothing(Push):
    """Nothing is pushed: servers must hold the weights already, which the proof finds out."""

    served = ""

    def write(self, source: WeightSource) -> int:
        return 0

    async def load(self, server: Server) -> None:
        return


class Files(Push):
    """All weights: `folder`/served is a model as servers load it. A file appears there whole or not at all."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder / "served"
        self.served = str(self._folder)
        self._dtype = dtype

    def write(self, source: WeightSource) -> int:
        """The weights in the dtype that servers compute in, the head among them where it is tied too."""
        partial = self._folder.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        written = source.save(partial, self._dtype)
        self._folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, self._folder / path.name)
        return written

    async def load(self, server: Server) -> None:
        await server.reload(self._folder)


class Adapter(Push):
    """The LoRA adapter alone: `folder`/policy-VERSION, as peft writes it; servers have the base."""

    def __init__(self, folder: Path, source: WeightSource) -> None:
        """Raises ConfigError where nothing is adapted, or no base is there to be served."""
        config = source.lora
        base = str(config.base_model_name_or_path or "") if config else ""
        if not config or not base:
            raise ConfigError("engine.sync=adapter: the model has no adapter of a saved base; set model.lora.rank=16")
        self.served = base
        self.rank = config.r
        self._folder = folder
        self._name = ""

    def write(self, source: WeightSource) -> int:
        """The adapter; the one before it is removed, and the one before that was let go of by then."""
        if self._name:
            shutil.rmtree(self._folder / self._name, ignore_errors=True)
        self._name = f"policy-{source.version}"
        return source.save(self._folder / self._name)

    async def load(self, server: Server) -> None:
        await server.load_adapter(self._name, self._folder / self._name)
