"""How new weights reach servers that have a copy of their own, and the proof that they hold them.

One file = one way. Each writes what servers read, once for all of them, and then tells each server to take it over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from mtgrpo.errors import EngineError
from mtgrpo.model.load import computes_in
from mtgrpo.model.rounding import reference

PROVEN = 64  # tokens of a context that both sides compute
TOP = 20  # tokens of the vocabulary that are compared after each
HOT = 2.0  # temperature at which one more token is sampled: its log-probability must be that of the same distribution
# nats; smaller differences between two implementations are accepted whatever the model's own rounding is
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-4}


class ProofError(EngineError):
    """A server does not hold the trainer's weights."""


class Server(Protocol):
    """What a push needs of a server."""

    async def reload(self, folder: Path) -> None:
        """Read all weights anew from the files in `folder`, and drop what was computed with others."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Sample with adapter `name`, which is in `folder`, from here on."""
        ...


class Push(ABC):
    """One way to bring weights to servers."""

    served: str  # the model that a server is started with

    @abstractmethod
    def write(self, model: PreTrainedModel, version: int) -> int:
        """Write what is new; returns its bytes. Runs in a thread, while nothing is trained."""

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
    def of(model: PreTrainedModel, version: int, context: Sequence[int]) -> Proof:
        """By the present weights, over `context`."""
        expected = reference(model, context)
        bound = max(TOLERANCE[computes_in(model)], expected.bound)
        return Proof(version, list(context), expected.logprobs.float().cpu(), bound)

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

    def write(self, model: PreTrainedModel, version: int) -> int:
        return 0

    async def load(self, server: Server) -> None:
        return
