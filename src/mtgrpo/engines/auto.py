"""The engine for a model of this size on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtgrpo.engines import Engine, RunningEngine
from mtgrpo.engines.local import Local
from mtgrpo.engines.server import PYTHON, Server

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mtgrpo.model.settings import ModelSettings

LARGE = 500_000_000  # weights from which on a server's kernels are worth a second process


@dataclass
class Auto(Engine):
    """Local for models below half a billion weights, or where there is no vLLM; else server. A note says which."""

    python: str = PYTHON  # of the environment that has vLLM

    def chosen(self, settings: ModelSettings) -> tuple[Engine, str]:
        """See `Engine.chosen`."""
        from mtgrpo.model.skeleton import Skeleton  # noqa: PLC0415  settings alone import no library

        engine, why = self._by_size(Skeleton(settings, "cpu").model)
        _, more = engine.chosen(settings)
        return engine, f"{why}; {more}" if more else why

    def _by_size(self, model: PreTrainedModel) -> tuple[Engine, str]:
        weights = sum(weight.numel() for weight in model.parameters())
        size = f"the model has {weights / 1e9:.2f} billion weights"
        if weights < LARGE:
            return Local(), f"engine=auto: local, for {size}, fewer than {LARGE / 1e9:g}"
        if not Path(self.python).expanduser().exists():
            return Local(), f"engine=auto: local, for there is no engine.python={self.python}, though {size}"
        return Server(python=self.python), f"engine=auto: server, for {size}, and vLLM is there"

    def start(
        self, model: PreTrainedModel, deterministic: bool, longest_context: int, folder: Path | None = None
    ) -> RunningEngine:
        """That of the engine for a model of this size; see `Engine.start`."""
        return self._by_size(model)[0].start(model, deterministic, longest_context, folder)
