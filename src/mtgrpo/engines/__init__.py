"""Who samples. An engine opens conversations; each conversation is a `Sample` that continues token sequences.

One file = one engine: a dataclass of settings whose `start` gives the running engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from mtgrpo.types import Attend, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one conversation; its random numbers are a function of this key, the turn and the position alone."""

    seed: int
    scope: str  # what it is for, e.g. "train/17" (the step) or "eval"
    task: str
    sample_index: int


class RunningEngine(Protocol):
    """What a rollout needs of an engine. `version` counts the weight updates the policy has seen.

    An engine that reads the trainer's own weights does so in the event loop's thread, where they are also written.
    """

    version: int
    notes: list[str]  # what the user should know of it and has not been told yet
    sync_s: float  # seconds spent on taking over new weights, in all

    @property
    def attend(self) -> Attend | None:
        """Measures attention; None: this engine cannot."""
        ...

    def conversation(self, key: Key) -> AbstractAsyncContextManager[Sample]:
        """Open one conversation; what it caches is released when the context ends."""
        ...


@dataclass
class Engine(ABC):
    """Base of all engines' settings."""

    attends: ClassVar[bool] = False  # whether it measures attention, which some condensers ask for

    @property
    def exact(self) -> bool:
        """Whether its log-probabilities are the trainer's, but for rounding."""
        return False

    @abstractmethod
    def start(self, model: PreTrainedModel, deterministic: bool, longest_context: int) -> RunningEngine:
        """An engine that samples from `model`, in contexts of at most `longest_context` tokens, output included.

        `deterministic`: batch composition depends on the keys alone.
        """
