"""LoRA adapters alone: servers have the base, and get a small folder at each update."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from mtgrpo.errors import ConfigError
from mtgrpo.model.load import save_weights, saved_weights
from mtgrpo.model.lora import has_adapter
from mtgrpo.sync import Push, Server


class Adapter(Push):
    """Writes `folder`/policy-VERSION, as peft does; the name says which version a server samples with."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Raises ConfigError where nothing is adapted, or no base is there to be served."""
        config = cast(Any, next(iter(model.peft_config.values()))) if has_adapter(model) else None
        base = str(config.base_model_name_or_path or "") if config else ""
        if not base:
            raise ConfigError("engine.sync=adapter: the model has no adapter of a saved base; set model.lora.rank=16")
        self.served = base
        self.rank = int(cast(Any, config).r)
        self._folder = folder
        self._name = ""

    def write(self, model: PreTrainedModel, version: int) -> int:
        """The adapter; the one before it is removed, and the one before that was let go of by then."""
        if self._name:
            shutil.rmtree(self._folder / self._name, ignore_errors=True)
        self._name = f"policy-{version}"
        weights = saved_weights(model)
        (self._folder / self._name).mkdir(parents=True, exist_ok=True)
        save_weights(model, self._folder / self._name, weights)
        return sum(weight.nbytes for weight in weights.values())

    async def load(self, server: Server) -> None:
        await server.load_adapter(self._name, self._folder / self._name)
