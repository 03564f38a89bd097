"""Any causal language model by name or path, or a small one from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from mtgrpo.extension import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.logprobs import head_logits

logging.disable_progress_bar()  # it would write through the console's own


class DType(Enum):
    """What the forward computes in. Weights are fp32 (fp64 for float64); bfloat16 means autocast, with an fp32 head."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


@dataclass
class ModelSettings:
    """Which model is trained. `tiny`, `tiny-2m` and `tiny-30m` are Qwen3-shaped models from scratch."""

    name: str = "tiny"  # or a folder, or a name on the Hugging Face hub
    dtype: DType = DType.float32  # what the forward computes in; weights stay fp32


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer that belongs to model `name`; loads no weights. Raises ConfigError when there is none."""
    if name in tiny.SHAPES:
        return tiny.load_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found(name, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"model.name={name}: its tokenizer is {type(tokenizer).__name__}, a fast one is needed")
    return tokenizer


def load_model(settings: ModelSettings, seed: int) -> PreTrainedModel:
    """The model in evaluation mode (no dropout), on the GPU where there is one.

    A from-scratch model's weights are a function of `seed`. Raises ConfigError when the model cannot be found.
    """
    weights = torch.float64 if settings.dtype is DType.float64 else torch.float32
    if settings.name in tiny.SHAPES:
        model: PreTrainedModel = tiny.build_model(tiny.SHAPES[settings.name], seed)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(settings.name, dtype=weights)
        except (OSError, ValueError) as error:
            raise ConfigError(_not_found(settings.name, error)) from error
    model.eval()
    model.to(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # pyright: ignore[reportCallIssue, reportArgumentType]
    if settings.dtype is DType.float64:
        _compute_in_double(model)
    if settings.dtype is DType.bfloat16:
        body = model.base_model
        body.forward = MethodType(_bfloat16_forward, body)  # bound, so that a copy of the model runs its own weights
    _check_head(model, settings.name)
    return model


def _not_found(name: str, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    known = ", ".join(tiny.SHAPES)
    return f"model.name={name} cannot be loaded ({reason}); give a folder, a name on the Hugging Face hub, or {known}"


@torch.no_grad()
def _check_head(model: PreTrainedModel, name: str) -> None:
    """Body and head by themselves must give the model's logits: some families cap or scale them afterwards."""
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    parts = head_logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    whole = model(input_ids=ids, use_cache=False).logits.to(parts)
    if not torch.allclose(parts, whole, rtol=1e-3, atol=1e-3):
        difference = (parts - whole).abs().max().item()
        raise ConfigError(
            f"model.name={name} ({type(model).__name__}) changes its logits after the head, by up to {difference:.3g}; "
            "such models are not supported"
        )


def _bfloat16_forward(body: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(body.device.type, torch.bfloat16):
        return type(body).forward(body, *args, **kwargs)


def _compute_in_double(model: PreTrainedModel) -> None:
    """fp64 throughout: transformers' RMS norms compute in fp32 whatever their input, so they are replaced."""
    model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, _double_norm(child))


def _double_norm(norm: Any) -> nn.RMSNorm:
    replacement = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=torch.float64)
    replacement.weight = norm.weight
    return replacement


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that transformers, vLLM and `model.name=FOLDER` can load: safetensors, no pickle."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
