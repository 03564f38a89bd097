"""Low-rank adapters (LoRA, arXiv:2106.09685): the base stays frozen; what is trained lies beside its linear layers.

A saved adapter is a folder as peft writes it, which transformers, peft and vLLM take; it names its base.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftConfig, TaskType, get_peft_model_state_dict
from peft.tuners.lora import Linear as AdaptedLinear
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, find_adapter_config_file

from mtgrpo.errors import ConfigError
from mtgrpo.model.cpu_kernels import OneDNNLinear
from mtgrpo.model.settings import LoRA

ADAPTER = "default"  # peft can hold several, by name; here there is one


def find_adapter(name: str) -> LoraConfig | None:
    """The adapter that folder or hub repository `name` holds, or None where it holds none.

    Raises ConfigError for adapters of another kind or without a base, OSError or ValueError where there is no `name`.
    """
    if find_adapter_config_file(name) is None:
        return None
    config = PeftConfig.from_pretrained(name)
    if not isinstance(config, LoraConfig) or config.use_dora:
        kind = "DORA" if isinstance(config, LoraConfig) else config.peft_type
        raise ConfigError(f"model.name={name} holds an adapter of type {kind}; only LoRA is supported")
    if not config.base_model_name_or_path:
        raise ConfigError(f"model.name={name}: {ADAPTER_CONFIG_NAME} has no base_model_name_or_path; write it there")
    return config


def add_adapter(model: PreTrainedModel, settings: LoRA, seed: int) -> None:
    """Freeze the model and put new adapters, a function of `seed`, beside its linear layers; they add nothing yet.

    Raises ConfigError for targets that match nothing.
    """
    targets = _targets(model, settings)
    linear = [part for part in model.base_model.modules() if isinstance(part, nn.Linear)]
    if settings.rank > (largest := max(max(part.in_features, part.out_features) for part in linear)):
        raise ConfigError(f"model.lora.rank={settings.rank} is above {largest}, the longest side of a matrix; try 16")
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, task_type=TaskType.CAUSAL_LM
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(config, ADAPTER)


def load_adapter(model: PreTrainedModel, config: LoraConfig, name: str, settings: LoRA) -> None:
    """Freeze the model, which is the base of the adapter in `name`, and go on training that adapter.

    Raises ConfigError when `settings` ask for another one, or when the adapter does not fit the base.
    """
    if settings.rank:
        ends = config.target_modules or []
        saved = (config.r, config.lora_alpha, ends if isinstance(ends, str) else sorted(ends))  # str: a pattern
        wanted = (settings.rank, settings.alpha, _targets(model, settings))
        if saved != wanted:
            raise ConfigError(
                f"model.name={name} holds an adapter with (rank, alpha, targets) = {saved}, "
                f"but model.lora is {wanted}; leave model.lora.rank at 0 to go on with the one that is there"
            )
    with torch.random.fork_rng(devices=[]):  # the adapter is first drawn, then read
        try:
            report = model.load_adapter(name, ADAPTER, is_trainable=True, ignore_mismatched_sizes=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"model.name={name}: the adapter cannot be read ({error}); use another") from error
    if strange := report.missing_keys | report.unexpected_keys | {key for key, *_ in report.mismatched_keys}:
        raise ConfigError(
            f"model.name={name}: the adapter does not fit its base {config.base_model_name_or_path}, which lacks "
            f"{min(strange)}, has more, or has another shape there; put back the model that was adapted"
        )
    kept = {tensor.data_ptr() for tensor in _saved(model, None).values()}
    trained = ((key, weight) for key, weight in model.named_parameters() if weight.requires_grad)
    if whole := [key for key, weight in trained if weight.data_ptr() not in kept]:
        raise ConfigError(
            f"model.name={name}: beside adapters it holds whole weights, {whole[0]}, which its checkpoints would lack: "
            "merge it into its base, or save it anew by peft with save_embedding_layers=False"
        )


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether adapters are what is trained."""
    return "peft_config" in vars(model)


def merged(layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the linear layer that `layer` amounts to, its adapter included; None where there is none."""
    if type(layer) is AdaptedLinear and not layer.lora_variant and not any(layer.lora_bias.values()):
        base = merged(layer.get_base_layer())
        return base and (base[0] + layer.get_delta_weight(ADAPTER), base[1])
    if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, OneDNNLinear):
        return layer.weight, layer.bias
    return None


def save_adapter(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter, by default the model's own `weights`, as peft does. The base is named, not copied.

    transformers' own `save_pretrained` would ask the hub about the base's vocabulary, at every checkpoint.
    """
    prefixed = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in _saved(model, weights).items()}
    save_file(prefixed, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    config = cast(LoraConfig, model.peft_config[ADAPTER])
    ordered = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    (folder / ADAPTER_CONFIG_NAME).write_text(json.dumps(ordered, indent=2, sort_keys=True) + "\n")


def _saved(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """What is the adapter's of `weights`, by default the model's, by the names that peft has for it."""
    return get_peft_model_state_dict(model, weights and dict(weights), save_embedding_layers=False)


def _targets(model: PreTrainedModel, settings: LoRA) -> list[str]:
    """The endings of module names that `settings` mean in this model, in order."""
    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    endings = sorted({name.rpartition(".")[2] for name in linear})
    unmatched = [end for end in settings.targets if not any(f".{name}".endswith(f".{end}") for name in linear)]
    if unmatched or not endings:
        raise ConfigError(
            f"model.lora.targets=[{','.join(settings.targets)}]: {' and '.join(unmatched) or 'this'} matches no linear "
            f"layer of {type(model).__name__}; there are {', '.join(endings) or 'none'}"
        )
    return sorted(set(settings.targets)) or endings
