"""Who samples. An engine opens conversations; each conversation is a `Sample` that continues token sequences.

One file = one engine: a dataclass of settings whose `start` gives the running engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from mtgrpo.types import Attend, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mtgrpo.model.settings import ModelSettings


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one conversation; its random numbers are a function of this key, the turn and the position alone."""

    seed: int
    scope: str  # what it is for, e.g. "train/17" (the step) or "eval"
    task: str
    sample_index: int


class RunningEngine(Protocol):
    """What a run needs of an engine. All of it belongs to one event loop.

    An engine that shares its weights with the trainer reads them in the event loop's thread, where they are also
    trained, between the micro-batches. Any other engine has a copy, and the trainer runs in a thread of its own.
    """

    shares_weights: bool  # whether it samples from the very tensors that are trained
    notes: list[str]  # for the user, not shown yet
    sync_s: float  # seconds spent on taking over new weights, in all
    metrics: dict[str, float]  # of the engine itself, as they are now

    @property
    def version(self) -> int:
        """Weight updates that the behaviour policy has seen, as `load_weights` last got it."""
        ...

    @property
    def requests(self) -> list[str]:
        """The requests in flight, each as a line for people."""
        ...

    @property
    def attend(self) -> Attend | None:
        """Measures attention; None: this engine cannot."""
        ...

    def conversation(self, key: Key) -> AbstractAsyncContextManager[Sample]:
        """Open one conversation; what it caches is released when the context ends."""
        ...

    async def load_weights(self, source: PreTrainedModel, version: int) -> None:
        """Sample from the present weights of `source` from here on, and call them `version`.

        Called after every weight update and after the warm start, and before the first conversation where the engine
        does not share its weights. Requests in flight go on with the new weights.
        """
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`; requests wait. Returns when no token is being computed any more."""
        ...

    async def resume(self) -> None:
        """Go on with what waits."""
        ...

    async def sleep(self) -> None:
        """Pause and give back the memory of the KV cache, for others to use; open conversations stay open."""
        ...

    async def wake(self) -> None:
        """Take the memory again and resume."""
        ...

    async def close(self) -> None:
        """End for good: give back all memory; requests in flight raise EngineError."""
        ...


@dataclass
class Engine(ABC):
    """Base of all engines' settings."""

    attends: ClassVar[bool] = False  # whether it measures attention, which some condensers ask for

    @property
    def exact(self) -> bool:
        """Whether its log-probabilities are the trainer's, but for rounding."""
        return False

    def check(self, sampling: Sampling) -> None:
        """Raise ConfigError for what it cannot sample with; by default that is nothing."""
        return

    def chosen(self, settings: ModelSettings) -> tuple[Engine, str]:
        """The engine that is meant for this model, by default itself, and why, for the user."""
        return self, ""

    @abstractmethod
    def start(
        self, model: PreTrainedModel, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> RunningEngine:
        """An engine that samples from `model`, in contexts of at most `longest_context` tokens, output included.

        `deterministic`: batch composition depends on the keys alone. `folder`: of the run, for the engine's own logs.
        An engine that does not share its weights has none before `load_weights`.
        """
