"""How new weights reach the servers, and the proof that they hold them.

Each way writes what servers read, once for all of them, and then has each server take it over: files, an adapter, or
(`transfer.py`) what lies in the memory of the trainer's GPU.
"""

from __future__ import annotations

import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mtgrpo.engines.server.replica import HOT, Replica
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.weights.source import WeightSource

PROVEN = 64  # tokens of a context that both sides compute
TOP = 20  # tokens of the vocabulary that are compared after each
# nats; smaller differences between two implementations are accepted whatever the model's own rounding is
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-4}


class ProofError(EngineError):
    """A server does not hold the trainer's weights."""


class Proof:
    """What the trainer's own forward pass says of a context by its present weights, to be compared with servers."""

    def __init__(self, source: WeightSource, context: Sequence[int]) -> None:
        reference = source.logprobs(context)
        self.version, self.tokens = source.version, list(context)
        self.bound = max(TOLERANCE[source.dtype], reference.bound)  # nats, the largest distance that is accepted
        *rows, last = reference.logprobs.float().cpu()
        self._expected = [*rows, (last / HOT).log_softmax(-1)]  # [vocabulary] after each token

    def check(self, found: Sequence[Mapping[int, float]], server: str) -> float:
        """The distance in nats of what `server` says, as `Replica.likeliest` gives it.

        It is the root mean square of the differences, each weighted by its token's probability. Raises ProofError
        where it is more than rounding explains.
        """
        squares = total = 0.0
        for row, listed in zip(self._expected, found, strict=False):
            expected = row[torch.tensor(list(listed))]
            weight = expected.exp()
            squares += (weight * (torch.tensor(list(listed.values())) - expected).square()).sum().item()
            total += weight.sum().item()
        apart = (squares / total) ** 0.5 if total and len(found) == len(self._expected) else math.nan
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

    def __init__(self, folder: Path, source: WeightSource) -> None:
        """`folder` is where both sides read and write."""
        self._folder = folder / "served"
        self.served = str(self._folder)  # the model that a server is started with
        self.dtype = torch.float32 if source.dtype is torch.float64 else source.dtype  # what servers compute in

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
        written = source.save(partial, self.dtype)
        self._folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, self._folder / path.name)
        return written

    async def load(self, server: Replica) -> None:
        await server.reload(self._folder)


class Adapter(Push):
    """The LoRA adapter alone: `folder`/policy-VERSION, as peft writes it; servers have the base."""

    def __init__(self, folder: Path, source: WeightSource) -> None:
        """Raises ConfigError where nothing is adapted, or no base is there to be served."""
        super().__init__(folder, source)
        if source.lora is None or not source.lora.base_model_name_or_path:
            raise ConfigError("engine.sync=adapter: the model has no adapter of a saved base; set model.lora.rank=16")
        self.served, self.rank = str(source.lora.base_model_name_or_path), source.lora.r

    def write(self, source: WeightSource) -> int:
        """The adapter; the one before it is removed, and the one before that was let go of by then."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._folder.with_name(f"policy-{source.version}")
        return source.save(self._folder)

    async def load(self, server: Replica) -> None:
        await server.load_adapter(self._folder.name, self._folder)
