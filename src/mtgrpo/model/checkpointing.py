"""Activation checkpointing: of every layer only the input is kept, and the backward pass computes the layer again.

transformers' own (`gradient_checkpointing_enable`) does nothing here: it asks for training mode, and models are in
evaluation mode, so that nothing is dropped out.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mtgrpo.errors import ConfigError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the body, in order; what is inside one is not listed apart."""
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.base_model.modules():  # a module comes before what is inside it
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    return layers


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let every layer be computed again in the backward pass. Passes without gradient stay as they are.

    Hooks of a layer run again with it, so that what they set is what it was. Raises ConfigError for a model without
    layers that transformers marks as such.
    """
    if not (layers := decoder_layers(model)):
        raise ConfigError(
            f"model.checkpointing=true: {type(model).__name__} has no layers that can be computed again one by one; "
            "set model.checkpointing=false and batch.token_budget lower"
        )
    for layer in layers:
        if not isinstance(layer, _Checkpointed):
            layer.__class__ = subclass("Checkpointed", _Checkpointed, type(layer))


def subclass(prefix: str, kernel: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """The class `kind` with the methods of `kernel` before its own."""
    return type(f"{prefix}{kind.__name__}", (kernel, kind), {"__module__": kind.__module__})


class _Checkpointed(nn.Module):
    """Stands before the class of a layer. It keeps no state of random numbers, for nothing in a layer draws any."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        layer = super().__call__
        if not torch.is_grad_enabled():
            return layer(*inputs, **named)
        return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, **named)
