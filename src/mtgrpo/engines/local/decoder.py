"""One forward pass over new tokens, prefill and decode alike; the caller keeps the KV cache and computes attention.

Every model whose attention can be replaced goes through its own modules. Those with the layers of Llama (Qwen2, Qwen3,
Mistral) go through the same products in fewer and faster operations: q, k and v in one, gate and up in one, weights
laid out for the few rows of a decoding step. That takes a copy of the weights after each update; the engine compares it
with the model's own forward pass each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers import AttentionInterface, PreTrainedModel

from mtgrpo.engines.local.paged_attention import KernelPlan
from mtgrpo.model.attention import of_one_size
from mtgrpo.model.cpu_kernels import multiply, pack, packs
from mtgrpo.model.load import computes_in
from mtgrpo.model.logprobs import head_logits, head_of
from mtgrpo.model.lora import merged
from mtgrpo.model.traits import EXTRAS, LONG, attending_by, flat_states, ordinary_tokens

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(number of the call, query [tokens, heads, size], key and value [tokens, key heads, size], scale) -> like query

Calls are counted through one forward pass: some models call the attention of a layer more than once.
"""

DELEGATED = "delegated"  # the attention of transformers models while they decode
QUERIED = 8  # tokens
# the same of queries, root mean square
SAME_QUERIES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
RECENT_TOKENS = 16  # tokens whose attention is measured: the last of the context, from which the policy would go on


class Forward:
    """The forward pass of `model` over a flat sequence of tokens of many conversations."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.fused = _Fused(model) if _like_llama(model) else None  # the fast path, where the model takes it
        if self.fused and not self._same_queries(self.fused):
            self.fused = None  # alike by name alone

    @torch.no_grad()
    def logprobs(self, context: Tensor) -> Tensor:
        """Of the next token at every position of `context` [n], which nothing precedes: [n, vocabulary]."""
        positions = torch.arange(len(context), device=context.device)
        return self.logits(self(context, positions, causal_attention)).log_softmax(-1)

    @torch.no_grad()
    def _same_queries(self, fused: _Fused) -> bool:
        """Whether those of `fused` are the model's own at its last positions: some models scale them from one on."""
        config, device = self._model.config, self._model.device
        last = int(getattr(config, "max_position_embeddings", None) or LONG)
        ids, positions = ordinary_tokens(config, QUERIED).to(device), torch.arange(last - QUERIED, last, device=device)
        expected, fused_queries = (_queries(forward, ids, positions) for forward in (self._through_modules, fused))
        if fused_queries.shape != expected.shape:  # the model attends more often
            return False
        return bool((fused_queries - expected).norm() <= SAME_QUERIES[computes_in(self._model)] * expected.norm())

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary] in fp32 (fp64 for fp64 models)."""
        return self.fused.head(hidden) if self.fused else head_logits(self._model, hidden)

    @torch.inference_mode()
    def attention_scores(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        """The share of attention that tokens [start, end) of each span get from the last `RECENT_TOKENS` tokens.

        Mean over these tokens, over layers and heads; the shares of spans that cover the context once add up to 1.
        Takes one forward pass over all `tokens`, whatever is cached of them. Raises ValueError for spans outside them.
        """
        for start, end in spans:
            if not 0 <= start <= end <= len(tokens):
                raise ValueError(f"span [{start}, {end}) does not lie in the {len(tokens)} tokens of the context")
        layers: list[Tensor] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            recent, heads = query[-RECENT_TOKENS:].float(), query.shape[1] // key.shape[1]
            scores = torch.einsum("qhd,khd->hqk", recent, key.float().repeat_interleave(heads, dim=1)) * scale
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(len(tokens) - len(recent) + 1)
            layers.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((0, 1)))
            return causal_attention(layer, query, key, value, scale)

        device = self._model.device
        self(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), attend)
        share = torch.stack(layers).mean(0).double()
        return [share[start:end].sum().item() for start, end in spans]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions [tokens] int64 -> final hidden states [tokens, hidden]."""
        return (self.fused or self._through_modules)(ids, positions, attend)

    def _through_modules(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The same by the model's own forward."""
        calls = count()

        def attend_next(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            return attend(next(calls), query, key, value, scale)

        with attending_by(self._model, DELEGATED):
            return flat_states(self._model, ids, positions, attend=attend_next)


def _queries(forward: Callable[[Tensor, Tensor, Attend], Tensor], ids: Tensor, positions: Tensor) -> Tensor:
    """What the attention calls of one forward pass get, scaled."""
    queries: list[Tensor] = []

    def attend(call: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        queries.append(query * scale)
        return causal_attention(call, query, key, value, scale)

    forward(ids, positions, attend)
    return torch.stack(queries)


def causal_attention(_layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of one sequence that has no past."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query.to(value.dtype), key.to(value.dtype), value))
    output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


def _delegate(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, scaling: float | None = None, attend: Callable[[Tensor, Tensor, Tensor, float], Tensor], **settings: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: query [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    if unsupported := [name for name in EXTRAS if settings.get(name) is not None]:
        raise ValueError(f"the engine's attention knows no {unsupported}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in of_one_size(query, key, value))
    return attend(q, k, v, scale)[None, :, :, : value.shape[-1]], None


AttentionInterface.register(DELEGATED, _delegate)


def copy_bytes(model: PreTrainedModel, device_type: str) -> int:
    """Of the copy of the weights that the fast path takes; 0 for models that go through their own modules."""
    if not _like_llama(model):
        return 0
    layers = cast(nn.ModuleList, model.base_model.layers).named_modules()
    products = [part for name, part in layers if isinstance(part, nn.Linear) and not re.search(r"lora_[AB]\.", name)]
    weights = sum(product.weight.numel() for product in products if product.weight.is_floating_point())
    packed_head = head_of(model).weight.nbytes if device_type == "cpu" else 0
    return weights * computes_in(model).itemsize + packed_head


def _like_llama(model: PreTrainedModel) -> bool:
    """Whether the model consists of the parts that the fused path computes; what they compute is compared later."""
    body, names = model.base_model, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if not all(hasattr(body, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return False
    parts = [dict(layer.named_children()) for layer in cast(nn.ModuleList, body.layers)]
    norms = [module for part in parts for name, module in part.items() if name.endswith("layernorm")]
    if not all(hasattr(norm, "weight") and _eps(norm) for norm in norms):
        return False
    return all(
        part.keys() == names
        and {"q_proj", "k_proj", "v_proj", "o_proj"} <= dict(part["self_attn"].named_children()).keys()
        and {"gate_proj", "up_proj", "down_proj"} <= dict(part["mlp"].named_children()).keys()
        for part in parts
    )


class _Fused:
    """A model with the layers of Llama. Its input and the residual stream are of the model's dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body: Any = model.base_model
        self._dtype = computes_in(model)
        config: Any = model.config
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = [_Layer(layer, self._dtype, self._heads, self._groups) for layer in self._body.layers]
        self.head = _Product([head_of(model)], model.dtype)
        self._products = [self.head, *(product for layer in self._layers for product in layer.products)]
        self.copy_weights()

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Bring the products up to date; norms and embedding are the model's own."""
        for product in self._products:
            product.copy_weights()
        for layer in self._layers:
            layer.stack_norms()

    def release(self) -> None:
        """Drop the copies; without them every layer is computed as it is."""
        for product in self._products:
            product.release()

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x: Tensor = self._body.embed_tokens(ids)
        if isinstance(attend, KernelPlan):
            return self._by_kernels(x.float(), positions, attend)
        cos, sin = (table[0, :, None] for table in self._body.rotary_emb(x[None], positions[None]))
        half, heads = self._size // 2, self._heads + self._groups
        sin = sin[..., :half].contiguous()
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(_norm(x, layer.before_attention)).unflatten(-1, (heads + self._groups, self._size))
            qk, value = qkv[:, :heads].to(x.dtype), qkv[:, heads:]
            if layer.head_norm is not None:
                qk = rms_norm(qk, (self._size,), None, layer.head_eps).mul_(layer.head_norm)
            turned = qk * cos
            turned[..., :half].addcmul_(qk[..., half:], sin, value=-1)
            turned[..., half:].addcmul_(qk[..., :half], sin)
            attended = attend(number, turned[:, : self._heads], turned[:, self._heads :], value, layer.scale)
            x = x + layer.out(attended.flatten(1))
            gate, up = layer.gate_up(_norm(x, layer.before_mlp)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate).mul_(up))
        return _norm(x, self._body.norm)

    def _by_kernels(self, x: Tensor, positions: Tensor, plan: KernelPlan) -> Tensor:
        """The same, what is between the products by compiled kernels."""
        rotation = [table[0].float().contiguous() for table in self._body.rotary_emb(x[None], positions[None])]
        parts, more = [self._heads, self._groups, self._groups], None
        for number, layer in enumerate(self._layers):
            before = layer.before_attention
            normed = plan.add_norm(x, more, before.weight, _eps(before), self._dtype)
            qkv = layer.qkv(normed).unflatten(-1, (sum(parts), self._size)).split(parts, 1)
            attended = plan.attend(number, qkv, layer.scale, rotation, layer.head_norm, layer.head_eps)
            more = layer.out(attended.flatten(1))
            normed = plan.add_norm(x, more, layer.before_mlp.weight, _eps(layer.before_mlp), self._dtype)
            more = layer.down(plan.silu_multiply(layer.gate_up(normed)))
        return plan.add_norm(x, more, self._body.norm.weight, _eps(self._body.norm), x.dtype)


class _Layer:
    """The parts of one layer."""

    def __init__(self, layer: Any, dtype: torch.dtype, heads: int, groups: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Product([attention.q_proj, attention.k_proj, attention.v_proj], dtype)
        self.out = _Product([attention.o_proj], dtype)
        self.gate_up = _Product([mlp.gate_proj, mlp.up_proj], dtype)
        self.down = _Product([mlp.down_proj], dtype)
        self.products = (self.qkv, self.out, self.gate_up, self.down)
        self.before_attention, self.before_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.scale = float(attention.scaling)
        normed = hasattr(attention, "q_norm")
        self._norms: list[Any] = [attention.q_norm] * heads + [attention.k_norm] * groups if normed else []
        self.head_eps = _eps(self._norms[0]) if normed else 0.0
        self.head_norm: Tensor | None = None

    def stack_norms(self) -> None:
        """The weights have changed."""
        if self._norms:
            self.head_norm = torch.stack([norm.weight for norm in self._norms])  # [query and key heads, size]


def _eps(norm: Any) -> float:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 0.0)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, (x.shape[-1],), norm.weight, _eps(norm))


class _Product:
    """Linear layers of one input, as one matrix product with their adapters merged; other layers each as it is."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._packed = False

    def copy_weights(self) -> None:
        """The weights have changed."""
        parts = [merged(layer) for layer in self._layers]
        plain = [part for part in parts if part is not None]
        biases = [bias for _, bias in plain if bias is not None]
        if len(plain) < len(parts) or len(biases) not in (0, len(parts)):
            return
        weights = [weight for weight, _ in plain]
        self._weight = (torch.cat(weights) if len(weights) > 1 else weights[0].detach()).to(self._dtype)
        self._bias = torch.cat(biases).to(self._dtype) if biases else None
        self._packed = packs(self._weight)
        if self._packed:
            self._weight = pack(self._weight)

    def release(self) -> None:
        """Drop the copy until the next one is made."""
        self._weight = self._bias = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight is not None:
            product = multiply if self._packed else linear
            return product(x.to(self._dtype), self._weight, self._bias)
        with torch.autocast(x.device.type, self._dtype, enabled=self._dtype.itemsize == 2):
            return torch.cat([layer(x) for layer in self._layers], dim=-1)
