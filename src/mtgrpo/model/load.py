"""Any causal language model by name or path, or a small one from scratch."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.quantization_config import QuantizationMethod

from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.attention import choose_attention
from mtgrpo.model.checkpointing import checkpoint_layers, decoder_layers
from mtgrpo.model.cpu_kernels import use_cpu_kernels
from mtgrpo.model.logprobs import RoundedHead, head_logits
from mtgrpo.model.lora import add_adapter, find_adapter, has_adapter, load_adapter, save_adapter
from mtgrpo.model.settings import VALUE_HEAD, DType, Head, ModelSettings, Quantization
from mtgrpo.model.tokenizer import place, refuse_model
from mtgrpo.model.value import add_value_head, split_value_head

AUTOCAST = {DType.bfloat16: torch.bfloat16, DType.float16: torch.float16}

logging.disable_progress_bar()  # it would write through the console's own


def load_model(settings: ModelSettings, seed: int) -> PreTrainedModel:
    """The model in evaluation mode (no dropout), on the GPU where there is one. What requires grad is to be trained.

    The weights of a from-scratch model and of new adapters are a function of `seed`. Raises ConfigError when the model
    cannot be found or adapted.
    """
    if settings.name in tiny.SHAPES:
        model: PreTrainedModel = tiny.build_model(tiny.SHAPES[settings.name], seed)
    else:
        model = _load_pretrained(settings, seed)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.name={settings.name}: its head is not a matrix (an adapter may not touch the head), but "
            f"{type(head).__name__}; such models are not supported"
        )
    round_head(head, settings, device_of_process().type)
    if settings.value_head:
        add_value_head(model, weights_dtype(settings), Path(settings.name))
    if model.base_model is model:
        raise ConfigError(
            f"model.name={settings.name}: {type(model).__name__} has no body apart from its head; "
            "such models are not supported, choose another"
        )
    model.eval()
    device = device_of_process()
    compute_in(model, resolved(settings.dtype, device.type))
    round_frozen(model)  # first, for the device may have no room for what they were
    model.to(device=device)  # pyright: ignore[reportCallIssue, reportArgumentType]
    choose_attention(model, settings.attention)  # runs the model, in fp32 at least
    _round_quantized(model)
    use_cpu_kernels(model)
    if settings.checkpointing:
        checkpoint_layers(model)
    _check_head(model, settings)
    return model


def device_of_process() -> torch.device:
    """The GPU of this process where there is one: number LOCAL_RANK, which launchers set, else the present one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK") or torch.cuda.current_device())
    if number >= torch.cuda.device_count():
        raise ConfigError(f"LOCAL_RANK={number}: this machine has {torch.cuda.device_count()} GPUs; start one for each")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)  # where kernels are launched that are told no device
    return device


def resolved(dtype: DType, device_type: str) -> DType:
    """What `auto` means on a device of this type."""
    if dtype is not DType.auto:
        return dtype
    if device_type == "cpu":
        return DType.float32
    able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(False)  # False: emulated is too slow
    return DType.bfloat16 if able else DType.float16


def round_head(head: nn.Linear, settings: ModelSettings, device_type: str) -> None:
    """Let `head` round its factors as `model.head` says on a device of this type."""
    narrow = device_type == "cuda" and resolved(settings.dtype, device_type) in (DType.bfloat16, DType.float16)
    precision = (Head.tf32 if narrow else Head.fp32) if settings.head is Head.auto else settings.head
    if precision is not Head.fp32:
        head.__class__ = RoundedHead
        cast(RoundedHead, head).precision = precision


def compute_in(model: PreTrainedModel, dtype: DType) -> None:
    """Make the model's forward compute in `dtype`; its weights become fp64 for float64 and stay what they are else."""
    body = model.base_model  # the methods are bound, so that a copy of the model runs its own weights
    if dtype is DType.float64:
        model.double()
        model.set_experts_implementation("eager")  # the others know no fp64
        for module in (body, *body.children(), *decoder_layers(model)):  # layers may be computed again by themselves
            module.forward = MethodType(_float64_forward, module)
    if dtype in AUTOCAST:
        body.forward = MethodType(partial(_rounded_forward, AUTOCAST[dtype]), body)


def computes_in(model: PreTrainedModel) -> torch.dtype:
    """What the forward computes in."""
    forward: Any = vars(model.base_model).get("forward")
    return forward.__func__.args[0] if forward and model.dtype is torch.float32 else model.dtype


def round_frozen(model: PreTrainedModel) -> None:
    """Keep the frozen linear layers of a body that computes in 16 bits in these, which changes no result."""
    dtype = computes_in(model)
    for layer in model.base_model.modules() if dtype in AUTOCAST.values() else []:
        if type(layer) is nn.Linear and not any(weight.requires_grad for weight in layer.parameters()):
            layer.to(dtype)


def _round_quantized(model: PreTrainedModel) -> None:
    """Let layers of bitsandbytes compute in 16 bits where the body does."""
    dtype = computes_in(model)
    for layer in cast(Any, model.base_model).modules() if dtype in AUTOCAST.values() else []:
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = dtype


def weights_dtype(settings: ModelSettings) -> torch.dtype:
    """What weights that are trained are kept in."""
    return torch.float64 if settings.dtype is DType.float64 else torch.float32


def find_base(settings: ModelSettings) -> tuple[str, str, LoraConfig | None]:
    """Where the model lies, where its base does, which is itself but for an adapter, and the adapter that it is."""
    name = place(settings.name)
    with refuse_model(name):
        adapter = find_adapter(name)
    return name, str(adapter.base_model_name_or_path) if adapter else name, adapter


def refuse_quantized(settings: ModelSettings, config: PretrainedConfig, adapted: bool, frozen: bool = False) -> None:
    """Raise ConfigError where weights are saved in fewer bits, so that they cannot be trained themselves.

    adapted: what is trained lies beside them; frozen: they were loaded, and are not all trained. Of MXFP4 that alone
    tells, for where nothing computes in it transformers makes 16 bits of it.
    """
    held: Any = getattr(config, "quantization_config", None) or {}
    method = held.get("quant_method", "") if isinstance(held, dict) else held.quant_method
    method = str(getattr(method, "value", method))
    beside = method == QuantizationMethod.BITS_AND_BYTES.value
    if method and not (beside and adapted) and (frozen or method != QuantizationMethod.MXFP4.value):
        cure = ", or train adapters beside them: model.lora.rank=16" if beside else ""
        raise ConfigError(f"model.name={settings.name}: its weights are quantised ({method}); give it in 16 bits{cure}")


def _load_pretrained(settings: ModelSettings, seed: int) -> PreTrainedModel:
    """The model that `settings.name` says, with its own adapter, a new one or none."""
    name, base, adapter = find_base(settings)
    if Path(base).is_dir():
        base = str(Path(base).resolve())  # an adapter's folder will name it, and may be read from anywhere
    quantized = _quantized(settings)
    if settings.quantization is not Quantization.none and not (adapter or settings.lora.rank):
        raise ConfigError(
            f"model.quantization={settings.quantization.value}: such layers are not trained; set model.lora.rank=16"
        )
    with refuse_model(name, base if adapter else ""):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base, dtype=weights_dtype(settings), output_loading_info=True, trust_remote_code=False, **quantized
        )
    model: PreTrainedModel = loaded[0]
    # Of bitsandbytes: what passes without gradient lay out anew has a wrong gradient.
    for layer in cast(Any, model).modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ConfigError(f"model.name={name}: {base} lacks the weights {missing[0]}; they would be drawn at random")
    if adapter:
        load_adapter(model, adapter, name, settings.lora)
    elif settings.lora.rank:
        add_adapter(model, settings.lora, seed)
    frozen = not has_adapter(model) and any(not weight.requires_grad for weight in model.parameters())
    refuse_quantized(settings, model.config, has_adapter(model), frozen)
    return model


def _quantized(settings: ModelSettings) -> dict[str, Any]:
    """What transformers has to be told of quantization."""
    if settings.quantization is Quantization.none:
        return {}
    settings.check_machine()
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return {"quantization_config": how, "device_map": {"": device_of_process()}}


@torch.no_grad()
def _check_head(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Body and head by themselves must give the model's logits: some families cap or scale them afterwards."""
    ids, name = torch.tensor([[1, 2, 3]], device=model.device), settings.name
    dtype = resolved(settings.dtype, model.device.type).value
    try:
        parts = head_logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    except RuntimeError as error:
        raise ConfigError(
            f"model.name={name}: {type(model).__name__} cannot compute in {dtype} "
            f"({str(error).partition(chr(10))[0]}); choose another model.dtype"
        ) from error
    whole = model(input_ids=ids, use_cache=False).logits.to(parts)
    if not torch.allclose(parts, whole, rtol=1e-3, atol=1e-3):
        difference = (parts - whole).abs().max().item()
        raise ConfigError(
            f"model.name={name} ({type(model).__name__}) changes its logits after the head, by up to {difference:.3g}; "
            "such models are not supported"
        )


def _rounded_forward(dtype: torch.dtype, body: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(body.device.type, dtype, cache_enabled=False):  # each weight is used once
        return type(body).forward(body, *args, **kwargs)


def _float64_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    with _Float64():
        return type(module).forward(module, *args, **kwargs)


class _Float64(TorchFunctionMode):
    """Within, fp64 is computed where a model says fp32, as norms, routing and recurrences do whatever their weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `save_weights` writes: all weights, or what is trained of a model with adapters."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    adapted = has_adapter(model)
    weights = model.state_dict(keep_vars=True)  # a parameter knows how it is sharded, and its copy does not
    return {name: weight for name, weight in weights.items() if not adapted or name in trained}


def save_weights(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `weights`, which may be a copy of the model's, with its configuration."""
    of_model, of_head = split_value_head(weights)
    if has_adapter(model):
        save_adapter(model, folder, of_model)
    else:
        model.save_pretrained(folder, state_dict=of_model)
        _write_index(folder)
    if of_head:
        save_file(of_head, folder / VALUE_HEAD)


def _write_index(folder: Path) -> None:
    """Say which file holds the weights: vLLM would read every .safetensors file of the folder, not only the model's."""
    weights, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if weights.is_file():  # else it is in several files, and transformers wrote the index
        with safe_open(weights, "pt") as file:
            names = sorted(file.keys())
        content = {"metadata": {"total_size": weights.stat().st_size}, "weight_map": dict.fromkeys(names, weights.name)}
        index.write_text(json.dumps(content, indent=2) + "\n")
