"""The value head: what return the policy expects at each of its tokens, from the same hidden states as the logits."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.model.logprobs import head_of
from mtgrpo.model.settings import VALUE_HEAD

_NAME = "value_head"


def add_value_head(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    """Register `model.value_head`, a linear layer from hidden states to one number: the one in `folder`, else zeros."""
    hidden = head_of(model).in_features
    head = cast(nn.Linear, nn.utils.skip_init(nn.Linear, hidden, 1, dtype=dtype))
    zeros = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}
    head.load_state_dict(load_file(folder / VALUE_HEAD) if (folder / VALUE_HEAD).is_file() else zeros)
    model.add_module(_NAME, head)


def has_value_head(model: PreTrainedModel) -> bool:
    """Whether the model has a value head."""
    return hasattr(model, _NAME)


def values(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The value at hidden states [n, hidden] -> [n], in fp32 (fp64 for fp64 models); needs `model.value_head=true`."""
    head = cast(nn.Linear, model.get_submodule(_NAME))
    return head(hidden.to(head.weight.dtype))[:, 0]


def split_value_head(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's weights as other libraries know them, and those of the value head."""
    prefix = f"{_NAME}."
    head = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}, head
