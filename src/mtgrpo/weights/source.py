"""The trained weights as engines, pushes and checkpoints see them: numbers and arrays, wherever the model is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME

from mtgrpo.model.attention import cuts_trees
from mtgrpo.model.load import computes_in, save_weights, saved_weights
from mtgrpo.model.lora import has_adapter
from mtgrpo.model.rounding import Reference, reference
from mtgrpo.model.sharding import elements, is_sharded, whole
from mtgrpo.model.traits import Traits, traits
from mtgrpo.model.value import split_value_head


class ModelWeights:
    """The weights of a model that is in this process; what its methods say holds for every source.

    Present ones, under the names of other libraries; of a model with adapters, the adapters alone.
    """

    version: int  # training steps that the weights have seen
    model_name: str  # its class
    config: PreTrainedConfig
    dtype: torch.dtype  # of the forward pass
    lora: LoraConfig | None  # of the adapters, where they alone are trained
    size: int  # weights in all, the frozen ones among them
    traits: Traits  # what an engine must know of the model's attention
    cuts_trees: bool  # whether a tree of contexts may be trained in parts that are smaller than its longest context

    def __init__(
        self,
        model: PreTrainedModel,
        version: int = 0,
        changes: Callable[[], int] = lambda: 0,
        forward: Callable[[Sequence[int]], Reference] | None = None,
        writes: bool = True,
    ) -> None:
        """forward: computes a context where `model` cannot by itself. writes: whether this rank writes files."""
        self.model, self.version, self._changes = model, version, changes
        self._forward, self._writes = forward or partial(reference, model), writes
        self.model_name, self.config, self.dtype = type(model).__name__, model.config, computes_in(model)
        self.lora = cast(Any, next(iter(model.peft_config.values()))) if has_adapter(model) else None
        self.size = sum(map(elements, model.parameters()))
        self.traits, self.cuts_trees = traits(model), cuts_trees(model)

    @property
    def changes(self) -> int:
        """How often the optimiser has changed the weights; any number of times within a training step."""
        return self._changes()

    def here(self) -> ModelWeights:
        """The model itself; of a source in another process a copy that is loaded now, and need not be up to date."""
        return self

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """One at a time, in `dtype`, on the trainer's device: as the weights are at that moment.

        None: all that the model has, as it has it and under its own names, for a copy of it.
        """
        weights = saved_weights(self.model)
        if dtype is not None:
            weights = split_value_head(weights)[0]
        one_by_one = dtype is None or any(map(is_sharded, weights.values()))
        for some in [{name: weight} for name, weight in weights.items()] if one_by_one else [weights]:
            full = {name: whole(weight) for name, weight in some.items()}
            for name, weight in (full if dtype is None else revert_weight_conversion(self.model, full)).items():
                yield name, weight.detach().to(dtype or weight.dtype)

    def logprobs(self, context: Sequence[int]) -> Reference:
        """What the model's own forward pass says after each of the tokens of `context`."""
        with torch.cuda.device_of(next(self.model.parameters())):  # a thread of its own begins with the first GPU
            return self._forward(context)

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> int:
        """Write `folder` as other libraries read it; returns the bytes of the weights. None: in the weights' own dtype.

        With a dtype it is for servers: the head is a matrix of its own, also where it is tied to the embeddings.
        """
        weights: dict[str, Tensor] = {}
        for name, weight in saved_weights(self.model).items():
            full = whole(weight)  # of a sharded one at a time: all ranks gather it, and one keeps it
            if self._writes:
                weights[name] = full.to("cpu", dtype)
        if not self._writes:
            return 0
        if dtype is not None:
            head = next(n for n, part in self.model.named_modules() if part is self.model.get_output_embeddings())
            weights[f"{head}.weight"] = weights[f"{head}.weight"].clone()
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self.model, folder, weights)
        if dtype is not None:
            self._untie_config(folder)
        return sum(weight.nbytes for weight in weights.values())

    def save_config(self, folder: Path) -> None:
        """Write the configuration alone, for servers."""
        if not self._writes:
            return
        self.model.config.save_pretrained(folder)
        self._untie_config(folder)

    def _untie_config(self, folder: Path) -> None:
        """Say in the configuration in `folder` that the head has weights of its own.

        vLLM 0.32 leaves a head that is tied to the embeddings at its old values when it takes new weights, so that the
        head is always pushed as a matrix of its own.
        """
        config = json.loads((folder / CONFIG_NAME).read_text())
        config |= {"architectures": [self.model_name], "tie_word_embeddings": False}
        (folder / CONFIG_NAME).write_text(json.dumps(config))


WeightSource = ModelWeights  # or what answers as it does, of weights in other processes
