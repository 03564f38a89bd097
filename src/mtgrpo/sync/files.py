"""All weights as safetensors, in shared memory or on a file system that servers share; they read them again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from mtgrpo.errors import ConfigError
from mtgrpo.model.load import save_weights, saved_weights
from mtgrpo.model.lora import has_adapter
from mtgrpo.sync import Push, Server


class Files(Push):
    """Writes `folder`/served, a model as servers load it. A file appears there whole or not at all."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder / "served"
        self.served = str(self._folder)
        self._dtype = dtype

    def write(self, model: PreTrainedModel, version: int) -> int:
        """The weights in the dtype that servers compute in.

        A head that is tied to the embeddings is written out, as a matrix of its own: vLLM 0.32 leaves a tied one at
        its old values when it reads weights again.
        """
        if has_adapter(model):
            raise ConfigError("engine.sync=files pushes all weights, and adapters are trained: set engine.sync=adapter")
        head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
        weights = {name: weight.to("cpu", self._dtype) for name, weight in saved_weights(model).items()}
        weights[f"{head}.weight"] = weights[f"{head}.weight"].clone()
        partial = self._folder.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_weights(model, partial, weights)
        config = json.loads((partial / CONFIG_NAME).read_text())
        (partial / CONFIG_NAME).write_text(json.dumps({**config, "tie_word_embeddings": False}))
        self._folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, self._folder / path.name)
        return sum(weight.nbytes for weight in weights.values())

    async def load(self, server: Server) -> None:
        await server.reload(self._folder)
