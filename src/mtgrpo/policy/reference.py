"""The frozen policy that a KL penalty compares with."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is now, without gradients."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference
