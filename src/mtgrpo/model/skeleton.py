"""A model without its weights: what training it takes is counted before anything is loaded.

Fake tensors have shapes and no contents, so the model's own modules run forward and backward, and every tensor that
they make is counted as long as it lives. Attention and head are laid out by what is in a batch, and so have stand-ins
here, which make and keep tensors of the same sizes.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mtgrpo.errors import UnreachableError
from mtgrpo.model import tiny
from mtgrpo.model.attention import check_attention, of_one_size
from mtgrpo.model.checkpointing import checkpoint_layers, decoder_layers
from mtgrpo.model.cpu_kernels import use_cpu_kernels
from mtgrpo.model.load import (
    compute_in,
    computes_in,
    find_base,
    refuse_quantized,
    resolved,
    round_frozen,
    weights_dtype,
)
from mtgrpo.model.logprobs import KEPT_BYTES, TILE_BYTES, head_of
from mtgrpo.model.lora import ADAPTER, add_adapter
from mtgrpo.model.settings import ModelSettings, Quantization
from mtgrpo.model.tokenizer import refuse_model
from mtgrpo.model.traits import attending_by, flat_states
from mtgrpo.model.value import add_value_head

_COUNTED = "counted"  # the attention that stands in
_LOOKED_AT_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)


class Skeleton:
    """The model that `settings` name, as `load_model` would load it on a device of this type, but without weights.

    Raises ConfigError when there is no such model, or none that can be trained.
    """

    def __init__(self, settings: ModelSettings, device_type: str) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device_type, self._cpu = device_type, device_type == "cpu"
        with torch.device("meta"):
            self.model = _architecture(settings)
        if settings.value_head:
            add_value_head(self.model, self.model.dtype, Path())
        check_attention(self.model)
        self.model.eval()
        self.model.set_experts_implementation("eager")  # the others ask real tensors for their dtype
        compute_in(self.model, resolved(settings.dtype, device_type))
        round_frozen(self.model)
        with self._mode:
            _to_cpu(self.model)
        if self._cpu:
            use_cpu_kernels(self.model)
        if settings.checkpointing:
            checkpoint_layers(self.model)
        self._caches: list[int] = []  # numbers that each attention call caches for a token

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that are trained; their bytes are `nbytes` each."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @cached_property
    def kv_cache_bytes(self) -> int:
        """The bytes of one token's keys and values in all layers."""
        self._caches.clear()
        with self._mode, self._attending(), torch.no_grad():
            ids = torch.zeros(2, dtype=torch.long)
            try:
                flat_states(self.model, ids, ids)
            except _LOOKED_AT_CONTENTS:  # in the first layer, after its attention
                self._caches *= len(decoder_layers(self.model))
        return sum(self._caches) * computes_in(self.model).itemsize

    def training_bytes(self, tokens: int) -> int:
        """The most that is held at once while a micro-batch of `tokens` goes forward and backward, all of them read.

        Weights and their gradients are not counted, but what the backward pass makes of these before it adds them up.
        0 for a model whose layers look at the contents of tensors, as some mixtures of experts do: nothing is known.
        """
        with self._mode, self._attending():
            for weight in self.trained:
                weight.grad = torch.empty_like(weight)
            gradients = [weight.grad for weight in self.trained if weight.grad is not None]
            with _Counting([*self.model.parameters(), *gradients]) as counting:
                try:
                    self._score(tokens).sum().backward()
                except _LOOKED_AT_CONTENTS:
                    return 0
        return counting.most

    def scoring_bytes(self, tokens: int) -> int:
        """As `training_bytes`, of a forward pass alone, with its tiles of logits."""
        with self._mode, self._attending(), torch.no_grad(), _Counting(self.model.parameters()) as counting:
            try:
                self._score(tokens)
            except _LOOKED_AT_CONTENTS:
                return 0
        return counting.most

    def head_bytes(self, tokens: int) -> int:
        """The bytes of `training_bytes` that are tiles of logits."""
        with self._mode:
            hidden = torch.empty(tokens, 0, dtype=torch.promote_types(self.model.dtype, torch.float32))
            return sum(_tile_bytes(hidden, head_of(self.model).weight, self._device_type))

    def _attending(self) -> AbstractContextManager[None]:
        """Within, also in the backward pass, which computes layers again."""
        AttentionInterface.register(_COUNTED, self._attend)
        return attending_by(self.model, _COUNTED)

    def _score(self, tokens: int) -> Tensor:
        ids = torch.zeros(tokens, dtype=torch.long)
        hidden = flat_states(self.model, ids, ids).index_select(0, ids)
        weight = head_of(self.model).weight
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        return _Head.apply(hidden.to(dtype), weight.to(dtype), self._device_type)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: query [1, heads, tokens, size] -> [1, tokens, heads, size]."""
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.float32 if self._cpu else torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        size = value.shape[-1]
        query, key, value = of_one_size(query, key, value)
        self._caches.append(2 * key.shape[1] * key.shape[-1])
        if self._cpu:  # where each head of the queries has gradients of its own for keys and values
            query = query.unflatten(1, (key.shape[1], -1))
            key, value = (tensor[:, :, None].expand(-1, -1, query.shape[2], -1, -1) for tensor in (key, value))
        output: Tensor = _Attention.apply(query, key, value)
        output = output.flatten(1, 2) if self._cpu else output
        return output[..., :size].transpose(1, 2), None


def known_shape(name: str) -> dict[str, Any]:
    """The shape that `shapes.yaml` has of a model of the hub, for where that is out of reach; {} = none."""
    shapes = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
    return next((shapes[known] for known in shapes if "/" in known and f"{name}-".startswith(f"{known}-")), {})


def _architecture(settings: ModelSettings) -> PreTrainedModel:
    if settings.name in tiny.SHAPES:
        return tiny.build_model(tiny.SHAPES[settings.name], 0)
    base, adapter = settings.name, None
    try:
        name, base, adapter = find_base(settings)
        with refuse_model(name, base if adapter else ""):
            config = AutoConfig.from_pretrained(base, trust_remote_code=False)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=weights_dtype(settings))
        refuse_quantized(settings, config, bool(adapter or settings.lora.rank))
    except UnreachableError:
        if not (shape := known_shape(base)):
            raise
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=weights_dtype(settings))
    for layer in model.base_model.modules() if settings.quantization is not Quantization.none else []:
        if type(layer) is nn.Linear:
            layer.__class__ = _Quantized
            layer.weight = nn.Parameter(torch.empty(layer.weight.numel() * 33 // 64, dtype=torch.uint8), False)
    if adapter:
        model.add_adapter(adapter, ADAPTER)
    elif settings.lora.rank:
        add_adapter(model, settings.lora, 0)
    return model


def _to_cpu(model: nn.Module) -> None:
    """Put a tensor on the CPU, fake in the present mode, in the place of each weight and buffer; shared stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, old in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if old not in made:
                new = torch.empty(old.shape, dtype=old.dtype)
                made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(module, name, made[old])


class _Attention(torch.autograd.Function):
    """What flash attention makes and keeps: queries, keys, values, output, one sum for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Quantized(nn.Linear):
    """Four bits a weight, scales included a little more; the weights are made in bfloat16 wherever they are needed."""

    def forward(self, input: Tensor) -> Tensor:
        return _Dequantized.apply(input, self.in_features, self.out_features)


class _Dequantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, out: int) -> Tensor:
        ctx.size, ctx.out = size, out
        copies = x.new_empty(out, size, dtype=torch.bfloat16), x.new_empty(x.shape, dtype=torch.bfloat16)
        output = x.new_empty(*x.shape[:-1], out)
        del copies
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        copy = grad.new_empty(ctx.out, ctx.size, dtype=torch.bfloat16)
        of_x = grad.new_empty(*grad.shape[:-1], ctx.size)
        del copy
        return of_x, None, None


class _Head(torch.autograd.Function):
    """What the head in tiles makes and keeps; see `logprobs.py`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, device_type: str) -> Tensor:
        sizes = _tile_bytes(hidden, weight, device_type)
        tiles, kept = (hidden.new_empty(size // hidden.itemsize) for size in sizes)
        ctx.save_for_backward(hidden, weight, kept)
        ctx.tiles = sizes[0]
        del tiles
        return hidden.new_empty(len(hidden))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, _ = ctx.saved_tensors
        tiles = hidden.new_empty(ctx.tiles // hidden.itemsize)
        both = zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        gradients = tuple(torch.empty_like(tensor) if needed else None for tensor, needed in both)
        del tiles
        return *gradients, None


def _tile_bytes(hidden: Tensor, weight: Tensor, device_type: str) -> tuple[int, int]:
    """The bytes of the tiles that are worked on, and of those that are kept."""
    logits = len(hidden) * len(weight) * hidden.itemsize
    return 2 * min(TILE_BYTES[device_type], logits), min(KEPT_BYTES, logits)


class _Counting(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within and still live; those that are `known` are not counted."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._living = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._living:
                self._living.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, size: int) -> None:
        self.now -= size
