"""The policy that a KL penalty compares with: frozen, refreshed now and then, or a moving average."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from mtgrpo.policy.settings import ReferenceSettings


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is now, without gradients. Weights that are not trained are shared, not copied."""
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    reference = copy.deepcopy(model, shared)
    reference.requires_grad_(False)
    return reference


@torch.no_grad()
def move(reference: PreTrainedModel, model: PreTrainedModel, settings: ReferenceSettings, step: int) -> None:
    """Move the reference after training step number `step` (from 1), as `settings` say."""
    refreshed = bool(settings.update_every) and step % settings.update_every == 0
    share = 1.0 if refreshed else settings.ema
    if not share:
        return
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        if new.requires_grad:
            old.lerp_(new, share)
