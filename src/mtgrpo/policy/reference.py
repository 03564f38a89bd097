"""The policy that a KL penalty compares with: frozen, refreshed now and then, or a moving average."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.model.sharding import part_like
from mtgrpo.policy.settings import ReferenceSettings


class ReferencePolicy:
    """A copy of the weights of `model` that are trained, by name. It has no model: the policy's runs with these.

    Weights that are not trained are not copied: with LoRA it is the adapters alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights: dict[str, Tensor] = {
            name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad
        }
        self.moves = 0

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go back to `weights`, which were saved."""
        for name, weight in weights.items():
            self.weights[name].copy_(part_like(weight, self.weights[name]))

    @torch.no_grad()
    def move(self, model: PreTrainedModel, settings: ReferenceSettings, step: int) -> None:
        """Move towards `model` after training step number `step` (from 1), as `settings` say."""
        if share := settings.share(step):
            self.moves += 1
            policy = dict(model.named_parameters())
            for name, weight in self.weights.items():
                weight.lerp_(policy[name], share)
