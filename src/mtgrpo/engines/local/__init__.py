"""The local engine: `engine.py` answers conversations; the others are its scheduler, KV cache, decoder and sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtgrpo.engines import Demand, Engine, Item, Phase

if TYPE_CHECKING:
    import torch

    from mtgrpo.engines.local.engine import LocalEngine
    from mtgrpo.weights.source import WeightSource

DEFAULT_FRACTION = 0.3


@dataclass
class Local(Engine, memory_fraction="> 0 and < 1"):
    """Decode in this process (CPU or one GPU)."""

    memory_fraction: float | None = None  # of all memory, at most, for the KV cache; null: what a GPU has left, or 0.3
    compiled: bool = True  # by kernels: on a GPU Triton's, on a CPU in float32 those that a C++ compiler makes
    keep_stale_cache: bool = False  # open conversations keep that of older weights; else it is reset at every update

    attends: ClassVar[bool] = True
    has_windows: ClassVar[bool] = False

    @property
    def cache_share(self) -> float:
        """Of all memory; what null amounts to on a GPU is planned before a run begins."""
        return self.memory_fraction or DEFAULT_FRACTION

    @property
    def most_devices(self) -> int:
        return 1

    @property
    def exact(self) -> bool:
        return not self.keep_stale_cache

    def check_room(self, device: torch.device, token_bytes: int, longest: int) -> None:
        from mtgrpo.engines.local.kv_cache import check_room, memory_bytes  # noqa: PLC0415

        check_room(self.cache_share, memory_bytes(device), token_bytes, longest)

    def plan_memory(self, demand: Demand) -> tuple[list[Item], Engine]:
        """See `Engine.plan_memory`: a copy of the weights, what a step of decoding makes, and the KV cache."""
        from mtgrpo.engines.local.decoder import copy_bytes  # noqa: PLC0415  settings alone import no library
        from mtgrpo.engines.local.kv_cache import BLOCK_SIZE, check_room, whole_blocks  # noqa: PLC0415

        cuda, vocabulary = demand.device_type == "cuda", int(demand.model.config.get_text_config().vocab_size)
        rows = [
            Item("engine's copy of weights", copy_bytes(demand.model, demand.device_type), demand.phases),
            Item("logits of a decoding step", 3 * 4 * demand.conversations * vocabulary, (Phase.sampling,)),
        ]
        conversation = demand.token_bytes * whole_blocks(demand.longest)
        room = int(self.cache_share * demand.device_bytes)
        if self.memory_fraction is None and cuda and demand.phases == (Phase.sampling,):  # the rest, for one at least
            left = int(demand.left_bytes - sum(row.bytes for row in rows))
            room = max(min(left, demand.conversations * conversation), conversation + demand.token_bytes * BLOCK_SIZE)
        elif cuda and demand.token_bytes:
            check_room(self.cache_share, demand.device_bytes, demand.token_bytes, demand.longest)
        else:  # where memory is taken when it is first used
            room = min(room, demand.conversations * conversation)
        tokens = f", {room // demand.token_bytes:,} tokens" if demand.token_bytes else ""
        settled = replace(self, memory_fraction=room / demand.device_bytes) if room else self
        return [*rows, Item(f"KV cache{tokens}", room, demand.phases)], settled

    def start(
        self, source: WeightSource, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> LocalEngine:
        """An engine over the trainer's own weights, or over a copy where they are in another process.

        Raises ConfigError for models that keep more than a KV cache, or whose attention cannot be replaced, for
        contexts that the model computes in another way, and for a budget that does not hold one of them.
        """
        from mtgrpo.engines.local.engine import start_engine  # noqa: PLC0415  settings alone import no library

        return start_engine(self, source, deterministic, longest_context)
