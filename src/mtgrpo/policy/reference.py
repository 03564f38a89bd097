"""The policy that a KL penalty compares with: frozen, refreshed now and then, or a moving average."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mtgrpo.errors import ConfigError


@dataclass
class ReferenceSettings:
    """Which policy a KL penalty compares with. By default it is the one that reinforcement learning began with."""

    update_every: int = 0  # steps after which the reference becomes the policy of then; 0 = never
    ema: float = 0.0  # after each step the reference moves this share of the way towards the policy; 0 = it stays

    def __post_init__(self) -> None:
        if self.update_every < 0 or not 0 <= self.ema <= 1:
            raise ConfigError(
                "reference.update_every must be >= 0 and reference.ema in [0, 1], "
                f"got {self.update_every} and {self.ema}"
            )
        if self.update_every and self.ema:
            raise ConfigError(
                f"reference.update_every={self.update_every} and reference.ema={self.ema} are two ways to move the "
                "reference: set one of them to 0"
            )


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
