"""The policy that a KL penalty compares with: frozen, refreshed now and then, or a moving average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
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


class ReferencePolicy:
    """A copy of the weights of `model` that are trained, by name. It has no model: the policy's runs with these.

    Weights that are not trained are not copied: with LoRA it is the adapters alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights: dict[str, Tensor] = {
            name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad
        }

    @torch.no_grad()
    def move(self, model: PreTrainedModel, settings: ReferenceSettings, step: int) -> None:
        """Move towards `model` after training step number `step` (from 1), as `settings` say."""
        refreshed = bool(settings.update_every) and step % settings.update_every == 0
        share = 1.0 if refreshed else settings.ema
        if share:
            policy = dict(model.named_parameters())
            for name, weight in self.weights.items():
                weight.lerp_(policy[name], share)
