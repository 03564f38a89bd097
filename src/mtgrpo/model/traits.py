"""What the attention of a model is like, found by running the model on a few tokens.

Configurations do not tell: families compute masks, scales and positions in ways of their own. So what each call of the
attention really gets is recorded, and a small branching forest is compared with plain forward passes. This costs a few
forward passes over some twenty tokens, once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from mtgrpo.errors import ConfigError

EXTRAS = ("softcap", "s_aux", "position_bias", "indices")  # what some models ask of their attention beside softmax
LONG = 2**17  # tokens, where a configuration names no last position
UNBOUNDED = 2**30  # tokens
APART = 1e-3  # of the size of states: rounding is less, what is wrong is more
# Two contexts that share their first tokens: node -> depth, end of its subtree.
SHARED = 8
DEPTH = [*range(8), *range(8, 14), *range(8, 14)]
SUBTREE_END = [20] * 8 + [14] * 6 + [20] * 6
CONTEXTS = [[*range(14)], [*range(8), *range(14, 20)]]

Rule = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask function: (batch, head, query, key) -> whether the query sees the key"""


@dataclass(frozen=True)
class Limit:
    """Up to how many tokens each context is computed as if it were alone."""

    tokens: int  # 0 = any number
    reason: str  # what happens beyond

    def check(self, tokens: int) -> None:
        """Raises ConfigError when contexts of so many tokens are beyond it."""
        if self.tokens and tokens > self.tokens:
            raise ConfigError(
                f"contexts of {tokens} tokens are more than can be computed exactly: {self.reason}; "
                f"set environment.max_context_length to at most {self.tokens}"
            )


@dataclass(frozen=True)
class Traits:
    """What trainer and engine must know of a model before they compute its attention themselves."""

    unsupported_reason: str  # why its attention cannot be replaced by another softmax attention; "" when it can
    caches: tuple[tuple[int, int], ...]  # of every attention call, in order: heads and size of keys and values
    layers_attend_once: bool  # whether every attention call has a layer number of its own
    limit: Limit  # of the trainer
    limit_without_windows: Limit  # of attention that lets every layer see the whole context


_examined: WeakKeyDictionary[PreTrainedModel, Traits] = WeakKeyDictionary()


def traits(model: PreTrainedModel) -> Traits:
    """The traits of `model`, which must be in evaluation mode; they are found once."""
    if model not in _examined:
        _examined[model] = _examine(model)
    return _examined[model]


@contextmanager
def attending_by(model: PreTrainedModel, implementation: str) -> Generator[None]:
    """Within, the model's attention is the one registered as `implementation`."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def flat_states(model: PreTrainedModel, ids: Tensor, positions: Tensor, **named: Any) -> Tensor:
    """Final states [tokens, hidden] of one flat sequence, whose attention is told by `named` who sees whom."""
    return model.base_model(**_flat(ids, positions), use_cache=False, **named).last_hidden_state[0]


def _flat(ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    unused = torch.zeros(1, 1, 1, 1, device=ids.device)  # of four dimensions: transformers then builds no mask itself
    return {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": unused}


def ordinary_tokens(config: PreTrainedConfig, count: int) -> Tensor:
    """A context of `count` tokens from all over the vocabulary, the first of which are often special."""
    vocabulary = int(config.get_text_config().vocab_size)
    numbers = torch.arange(count)
    return vocabulary // 20 + (numbers * 2_654_435_761 % 2**32) * (vocabulary - vocabulary // 20) // 2**32


@torch.no_grad()
def _examine(model: PreTrainedModel) -> Traits:
    name = type(model).__name__
    positions = int(getattr(model.config, "max_position_embeddings", None) or 0)
    ids = ordinary_tokens(model.config, len(DEPTH)).to(model.device)
    with attending_by(model, "sdpa"):
        try:
            expected = _hidden(model, input_ids=ids[torch.tensor(CONTEXTS)])
        except Exception as error:
            raise ConfigError(f"{name} cannot be run on text alone ({_line(error)}); choose another model") from error
        shared = expected[:, :SHARED]
        if not _same(shared[0], shared[1]):
            raise ConfigError(f"{name} computes tokens from those that follow them; such models are not supported")
        independent = _independent(model, ids, shared[0], positions or LONG)
    recorder = _Recorder()
    try:
        obstacle = _obstacle(model, ids, expected, recorder)
    except Exception as error:  # whatever a model does that nobody has foreseen
        obstacle = _line(error)
    sees = f"layers of {name} see no more than"
    only_servers = "and engine=local has no such windows (engine=server has)"
    windows = [Limit(window, f"{sees} {window} tokens, {only_servers}") for window in recorder.windows]
    limits = [
        Limit(positions, f"the configuration of {name} names {positions} positions"),
        Limit(independent, f"{name} changes the positions of all tokens in longer ones"),
        *(Limit(window, f"{sees} {window} tokens") for window in recorder.masked if not obstacle),
    ]
    return Traits(
        f"the attention of {name} cannot be replaced ({obstacle})" if obstacle else "",
        tuple(recorder.caches),
        None not in recorder.layers and len(set(recorder.layers)) == len(recorder.layers),
        _smallest(limits),
        _smallest([*limits, *windows]),
    )


def _smallest(limits: list[Limit]) -> Limit:
    return min((limit for limit in limits if limit.tokens), key=lambda limit: limit.tokens, default=Limit(0, ""))


def _obstacle(model: PreTrainedModel, ids: Tensor, expected: Tensor, recorder: _Recorder) -> str:
    """Replace the attention by `recorder`, over a forest; why that does not give the states that are `expected`."""
    mixers = {*(getattr(model.config, "layer_types", None) or [])}
    others = sorted(mixers - {"full_attention", "sliding_attention", "chunked_attention"})
    if others or model._is_stateful:  # pyright: ignore[reportPrivateUsage]
        return f"it has layers of another kind: {', '.join(others) or 'recurrent'}"
    if not model._supports_attention_backend:  # pyright: ignore[reportPrivateUsage]
        return "transformers has no interface for it"
    AttentionInterface.register(_RECORDED, recorder.attend)
    AttentionMaskInterface.register(_RECORDED, recorder.mask)
    with attending_by(model, _RECORDED):
        _hidden(model, input_ids=ids[None, :2])  # for the masks
        recorder.caches.clear()
        recorder.layers.clear()
        recorder.depth = torch.tensor(DEPTH, device=ids.device)
        states = _hidden(model, **_flat(ids, recorder.depth), forest=recorder.depth)
    if not recorder.unsupported_reason and not _same(states[0, torch.tensor(CONTEXTS)], expected):
        return "branches of a conversation that share their beginning come out otherwise than by themselves"
    return recorder.unsupported_reason


def _independent(model: PreTrainedModel, ids: Tensor, alone: Tensor, high: int) -> int:
    """Up to how many tokens the states of the first, `alone`, do not depend on how many there are; 0 = up to `high`."""

    def same(length: int) -> bool:
        """In a pass that ends at position `length` - 1."""
        positions = torch.tensor([[*range(SHARED), length - 1]], device=ids.device)
        everything = torch.ones_like(positions)  # else a gap would be taken for the end of a sequence
        states = _hidden(model, input_ids=ids[None, : SHARED + 1], position_ids=positions, attention_mask=everything)
        return _same(states[0, :-1], alone)

    try:
        if high <= SHARED + 1 or same(high):
            return 0
    except Exception:  # no position ids, or none that jump
        return 0
    longest = _longest(same, SHARED + 1, high)
    same(SHARED + 1)  # some models keep what a long pass has set
    return longest


def _longest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number below `high`, for which it does not hold, for which it does; it holds for `low`."""
    return bisect_left(range(high), True, low + 1, key=lambda number: not holds(number)) - 1


def _same(states: Tensor, expected: Tensor) -> bool:
    return bool((states - expected).norm() <= APART * expected.norm())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _hidden(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Final states, in the precision of what is trained: without autocast."""
    body: Any = model.base_model
    forward = body.forward if model.dtype is torch.float64 else partial(type(body).forward, body)
    with _Widened():
        return forward(use_cache=False, **inputs).last_hidden_state


class _Widened(TorchFunctionMode):
    """Within, frozen layers that are kept in 16 bits compute in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            args = [value.float() if isinstance(value, Tensor) and value.itemsize == 2 else value for value in args]
        return func(*args, **(kwargs or {}))


_RECORDED = "recorded"


@dataclass
class _Recorder:
    """Attention and masks as transformers computes them, and what it needs."""

    depth: Tensor | None = None  # [nodes], of the forest; None = there is none, the model's masks say who sees whom
    caches: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    layers: list[int | None] = field(default_factory=list[int | None])  # the number of the layer of every call
    windows: set[int] = field(default_factory=set[int])  # tokens that a layer sees, where it says so to its attention
    masked: set[int] = field(default_factory=set[int])  # the same where only its mask does
    unsupported_reason: str = ""
    _masks: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])  # and how far each reaches

    def mask(self, *, mask_function: Rule, **shape: Any) -> Tensor:
        """transformers' own mask."""
        shape["allow_is_causal_skip"] = False
        mask = sdpa_mask(mask_function=mask_function, **shape)
        assert mask is not None, "it was not to be left out"
        self._masks.append((mask, _reach(mask_function)))
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, forest: Tensor | None = None, **rest: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention as transformers calls it: query [1, heads, nodes, size] -> [1, nodes, heads, size]."""
        self.caches.append((key.shape[1], max(key.shape[-1], value.shape[-1])))
        self.layers.append(getattr(module, "layer_idx", None))
        if extras := [name for name in EXTRAS if rest.get(name) is not None]:
            self.unsupported_reason = f"it needs {', '.join(extras)}"
        if self.depth is None:
            self._note_windows(attention_mask, sliding_window)
        else:
            if forest is None:
                self.unsupported_reason = "its layers do not hand on the keyword arguments of a forward pass"
            elif attention_mask is not None and (attention_mask.numel() > 1 or attention_mask.any()):
                self.unsupported_reason = "it makes masks of its own"
            attention_mask = _sees(self.depth, sliding_window)
        grouped = key.shape[1] != query.shape[1]
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2), None

    def _note_windows(self, mask: Tensor | None, sliding_window: int | None) -> None:
        """Note the windows of one call; a mask that was changed on its way may be any of those that were made."""
        reaches = [reach for made, reach in self._masks if made is mask] or [reach for _, reach in self._masks]
        self.windows |= {sliding_window or 0} - {0}
        self.masked |= {*(reaches if mask is not None else [])} - {0, sliding_window}


def _sees(depth: Tensor, window: int | None) -> Tensor:
    """[nodes, nodes]: who sees whom in the forest."""
    node, end = torch.arange(len(depth), device=depth.device), torch.tensor(SUBTREE_END, device=depth.device)
    return (node <= node[:, None]) & (node[:, None] < end) & (depth[:, None] - depth < (window or len(depth)))


def _reach(rule: Rule) -> int:
    """The longest context in which the last token sees the first; 0 = any."""
    zero = torch.tensor(0)

    def visible(length: int) -> bool:
        return bool(rule(zero, zero, torch.tensor(length - 1), zero))

    return 0 if visible(UNBOUNDED) else _longest(visible, 1, UNBOUNDED)
