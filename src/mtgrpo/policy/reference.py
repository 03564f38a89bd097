"""The frozen policy that a KL penalty compares with."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is now, without gradients. Weights that are not trained are shared, not copied."""
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    reference = copy.deepcopy(model, shared)
    reference.requires_grad_(False)
    return reference
