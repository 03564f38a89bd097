"""The local engine: `engine.py` answers conversations; the others are its scheduler, KV cache, decoder and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtgrpo.engines import Engine
from mtgrpo.errors import require

if TYPE_CHECKING:
    from mtgrpo.engines.local.engine import LocalEngine
    from mtgrpo.weights.source import WeightSource

DEFAULT_FRACTION = 0.3


@dataclass
class Local(Engine):
    """Decode in this process (CPU or one GPU)."""

    memory_fraction: float | None = None  # of all memory, at most, for the KV cache; null: what a GPU has left, or 0.3
    keep_stale_cache: bool = False  # open conversations keep that of older weights; else it is reset at every update

    attends: ClassVar[bool] = True
    has_windows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self, memory_fraction="> 0 and < 1")

    @property
    def fraction(self) -> float:
        """Of all memory; what null amounts to on a GPU is planned before a run begins."""
        return self.memory_fraction or DEFAULT_FRACTION

    @property
    def exact(self) -> bool:
        return not self.keep_stale_cache

    def start(
        self, source: WeightSource, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> LocalEngine:
        """An engine over the trainer's own weights, which must be in this process.

        Raises ConfigError for models that keep more than a KV cache, or whose attention cannot be replaced, for
        contexts that the model computes in another way, and for a budget that does not hold one of them.
        """
        from mtgrpo.engines.local.engine import start_engine  # noqa: PLC0415  settings alone import no library

        return start_engine(self, source, deterministic, longest_context)
