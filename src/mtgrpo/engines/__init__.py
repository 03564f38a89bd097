"""Who samples. An engine opens conversations; each conversation is a `Sample` that continues token sequences.

One file = one engine: a dataclass of settings whose `start` gives the running engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtgrpo.errors import EngineError
from mtgrpo.parts import Part, Reach
from mtgrpo.types import Completion, Sample, Sampling, WeightPush

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from mtgrpo.model.settings import ModelSettings
    from mtgrpo.weights.source import WeightSource

Answer = Callable[[Sequence[int], Sampling, int], Awaitable[Completion]]  # (context, .., key of its random numbers)


def stream_key(*parts: int | str) -> int:
    """A 64-bit key for one stream of random numbers, e.g. of (seed, task, sample, turn)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one conversation; its random numbers are a function of this key, the turn and the position alone."""

    seed: int
    scope: str  # what it is for, e.g. "train/17" (the step) or "eval"
    task: str
    sample_index: int


class RunningEngine(ABC):
    """What a run needs of an engine. All of it belongs to one event loop. By default it has nothing to pause or close.

    An engine that shares its weights with the trainer reads them in the event loop's thread, where they are also
    trained, between the micro-batches. Any other engine has a copy, and the trainer runs in a thread of its own.
    """

    shares_weights: bool  # whether it samples from the very tensors that are trained

    def __init__(self, longest_context: int) -> None:
        """`longest_context`: tokens of a context, output included."""
        self.version = 0  # weight updates that the behaviour policy has seen, as `load_weights` last got it
        self.notes: list[str] = []  # for the user, not shown yet
        self.sync_s = self.waited_s = 0.0  # see `take_seconds`
        self.pushes: deque[WeightPush] = deque(maxlen=256)  # the last times that it took over new weights
        self.metrics: dict[str, float] = {}  # of the engine itself, as they are now
        self._longest = longest_context
        self._recent: Sequence[int] = ()  # the context that was last requested

    def take_seconds(self) -> tuple[float, float]:
        """Of taking over new weights; in which all conversations waited for the tools of some. Since the last time."""
        seconds, self.sync_s, self.waited_s = (self.sync_s, self.waited_s), 0.0, 0.0
        return seconds

    async def attend(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        """See `mtgrpo.types.Attend`; of engines whose settings say that they measure attention."""
        raise NotImplementedError

    @property
    def requests(self) -> list[str]:
        """The requests in flight, each as a line for people; by default they are not told."""
        return []

    @asynccontextmanager
    async def conversation(self, key: Key) -> AsyncGenerator[Sample]:
        """Open one conversation; what it caches is released when the context ends."""
        turns = count()
        with self._open(key) as answer:

            async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
                if not tokens:
                    raise EngineError("a turn was requested after an empty context: nothing predicts its first token")
                if len(tokens) + sampling.max_new_tokens > self._longest:
                    raise EngineError(
                        f"a turn of up to {sampling.max_new_tokens} tokens after {len(tokens)} was requested, but the "
                        f"engine was started for conversations of at most {self._longest}"
                    )
                self._recent = tokens
                stream = stream_key(key.seed, key.scope, key.task, key.sample_index, next(turns))
                try:
                    async with asyncio.timeout(sampling.timeout_s or None):
                        return await answer(tokens, sampling, stream)
                except TimeoutError as error:
                    raise TimeoutError(f"a turn took longer than sampling.timeout_s={sampling.timeout_s}") from error

            yield sample

    @abstractmethod
    def _open(self, key: Key) -> AbstractContextManager[Answer]:
        """What samples the turns of a new conversation; within, its KV cache is kept."""

    @abstractmethod
    async def load_weights(self, source: WeightSource) -> None:
        """Sample from the present weights of `source` from here on, and call them by its version.

        Called after every weight update and after the warm start, and before the first conversation where the engine
        does not share its weights. Requests in flight go on with the new weights.
        """

    async def sleep(self) -> None:
        """Sample nothing until `wake`; requests wait, open conversations stay open.

        Returns when no token is being computed any more and the memory of the KV cache is given back, for others.
        """
        return

    async def wake(self) -> None:
        """Take the memory again and go on with what waits."""
        return

    async def close(self) -> None:
        """End for good: give back all memory; requests in flight raise EngineError."""
        return


class Phase(Enum):
    """What a run does with its memory at a time."""

    sampling = "sampling"
    training = "training"  # a micro-batch goes forward and backward
    update = "update"  # the optimiser steps


@dataclass(frozen=True)
class Item:
    """One thing that takes memory, and when."""

    name: str
    bytes: int
    phases: tuple[Phase, ...] = tuple(Phase)


@dataclass(frozen=True)
class Demand:
    """What a run asks of its engine, for the plan of the device that it trains on."""

    model: PreTrainedModel  # without weights
    token_bytes: int  # of a token's keys and values in all layers; 0 = not known
    longest: int  # tokens of a context
    conversations: int  # open at once
    phases: tuple[Phase, ...]  # in which the engine holds what it has
    device_type: str  # "cuda" or "cpu"
    device_bytes: int
    left_bytes: float  # for the engine, while it samples
    process_bytes: int  # that a process takes by being there
    trains: bool = True  # whether the device trains too


@dataclass
class Engine(Part, ABC):
    """Base of all engines' settings."""

    attends: ClassVar[bool] = False  # whether it measures attention, which some condensers ask for
    has_windows: ClassVar[bool] = True  # whether it computes layers that see a part of the context alone
    reaches: ClassVar[Reach] = Reach.nothing  # by being chosen, with no further setting

    @property
    def most_devices(self) -> int | None:
        """GPUs of this machine on which it can sample; None: as many as there are, 0: it is elsewhere."""
        return None

    def placed(self, gpus: Sequence[int], shared: bool) -> Engine:
        """Itself, to sample on these GPUs; by default it does so in the process that starts it, wherever that is.

        shared: training takes place there too. gpus: () without a GPU. Raises ConfigError where it cannot.
        """
        return self

    @property
    def exact(self) -> bool:
        """Whether its log-probabilities are the trainer's, but for rounding."""
        return False

    def chosen(self, settings: ModelSettings) -> tuple[Engine, str]:
        """The engine that is meant for this model, by default itself, and why, for the user."""
        return self, ""

    @property
    def cache_share(self) -> float:
        """Of this process's memory, for the KV cache, as `engine.memory_fraction` says; 0 = it is elsewhere."""
        return 0.0

    def check_room(self, device: torch.device, token_bytes: int, longest: int) -> None:
        """Raise ConfigError where its KV cache on `device` would not hold a context of `longest` tokens."""
        return

    def plan_memory(self, demand: Demand) -> tuple[list[Item], Engine]:
        """What it takes of the device, by default nothing, and itself with what memory has a say in settled.

        Raises ConfigError where there is no room for one conversation.
        """
        return [], self

    @abstractmethod
    def start(
        self, source: WeightSource, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> RunningEngine:
        """An engine that samples from `source`, in contexts of at most `longest_context` tokens, output included.

        `deterministic`: batch composition depends on the keys alone. `folder`: of the run, for the engine's own logs.
        An engine that does not share its weights has none before `load_weights`.
        """
