"""The engine for a model of this size on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mtgrpo.engines import Engine, RunningEngine
from mtgrpo.engines.local import Local
from mtgrpo.engines.server import OWN, PYTHON, Server, Sync
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Program, Reach
from mtgrpo.runtime.files import find_near

if TYPE_CHECKING:
    from mtgrpo.model.settings import ModelSettings
    from mtgrpo.weights.source import WeightSource

LARGE = 500_000_000  # weights from which on a server's kernels are worth a second process


@dataclass
class Auto(Engine):
    """Local below half a billion weights, for quantized ones, or without vLLM; else server. A note says which."""

    reaches: ClassVar[Reach] = Reach.program

    python: Program = PYTHON  # of the environment that has vLLM

    def chosen(self, settings: ModelSettings) -> tuple[Engine, str]:
        """See `Engine.chosen`."""
        from mtgrpo.model.skeleton import Skeleton  # noqa: PLC0415  settings alone import no library

        model = Skeleton(settings, "cpu").model
        weights = sum(weight.numel() for weight in model.parameters())
        engine, why = self._by_size(weights, settings.quantization.value != "none")
        return engine, "; ".join(filter(None, (why, engine.chosen(settings)[1])))

    def _by_size(self, weights: int, quantized: bool) -> tuple[Engine, str]:
        size = f"the model has {weights / 1e9:.2f} billion weights"
        if weights < LARGE:
            return Local(), f"engine=auto: local, for {size}, fewer than {LARGE / 1e9:g}"
        if quantized:
            return Local(), f"engine=auto: local, for a server has no quantized base of adapters, though {size}"
        if not find_near(self.python).exists():
            return Local(), f"engine=auto: local, for there is no engine.python={self.python}, though {size}"
        return Server(python=self.python), f"engine=auto: server, for {size}, and vLLM is there"

    def start(
        self, source: WeightSource, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> RunningEngine:
        quantized = getattr(source.config, "quantization_config", None) is not None
        return self._by_size(source.size, quantized)[0].start(source, deterministic, longest_context, folder)


def served(engine: Engine, settings: ModelSettings) -> Server:
    """The same engine in processes of its own. Raises ConfigError where it cannot be, with `cluster` in mind."""
    if isinstance(engine, Server):
        if engine.sync in (Sync.ipc, Sync.nccl):
            raise ConfigError(f"engine.sync={engine.sync.value} with cluster=ray: weights go as files; leave it out")
        return engine
    if not isinstance(engine, Local):
        raise ConfigError(f"engine {type(engine).__name__} samples where the run is: set engine=local or server")
    if engine.keep_stale_cache or settings.quantization.value != "none":
        named = "engine.keep_stale_cache=true" if engine.keep_stale_cache else "model.quantization"
        raise ConfigError(f"{named} with cluster=ray: the engine is elsewhere, and does not know of it; leave it out")
    words = [f"--head={settings.head.name}", *(["--no-compiled"] if not engine.compiled else [])]
    return Server(kind=OWN, memory_fraction=engine.memory_fraction, arguments=words)
