"""Forest attention: every token sees its ancestors, in the attention of any softmax-attention transformers model.

    node q sees node k   <=>   k <= q < subtree_end[k]        (nodes in depth-first order)

Cut where it branches, a forest is a list of runs: chains of consecutive nodes. A run sees itself causally, and all that
is below it sees the whole of it. So on CPU the attention of a run [a, b) whose subtree ends at e is two dense calls:
rows [a, b) on columns [a, b), causal; rows [b, e) on columns [a, b), unmasked. No score is computed only to be masked.
What a row gathers from several calls is merged by log-sum-exp, which is exact, and so is the backward pass, since the
flash kernel's backward needs the merged output and log-sum-exp only. On a GPU it is FlexAttention with the same rule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available

from mtgrpo.errors import ConfigError
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.settings import NO_FLASH, AttentionKind
from mtgrpo.model.traits import EXTRAS, traits

BLOCK = 128  # FlexAttention's tile, in tokens
LEAST_SIZE = 16  # of a head, that FlexAttention computes on a GPU
CHAIN = 256  # rows of a causal call on CPU
WINDOW_ROWS = 512  # rows computed at once where a sliding window cuts the context

T = TypeVar("T")

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def eagerly(function: Callable[..., T], *arguments: object) -> T:
    """The result of `function`, which lays out tiles and pieces batch by batch: torch.compile is not to trace it."""
    if torch.compiler.is_compiling():
        function = cast(Callable[..., T], torch.compiler.disable(function))  # only here: it imports the compiler
    return function(*arguments)


def check_attention(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose attention nothing here computes."""
    if not model._supports_sdpa:  # pyright: ignore[reportPrivateUsage]  (has no public name)
        raise ConfigError(f"{type(model).__name__} has no scaled dot-product attention; such models are not supported")


def choose_attention(model: PreTrainedModel, wanted: AttentionKind) -> None:
    """Set the model's attention. Raises ConfigError when the model or the machine cannot do what is wanted."""
    check_attention(model)
    reason = traits(model).unsupported_reason
    if wanted is AttentionKind.auto:
        wanted = AttentionKind.sdpa if reason else AttentionKind.forest
    if wanted is AttentionKind.forest and reason:
        raise ConfigError(f"model.attention=forest: {reason}; set model.attention=auto")
    if wanted is AttentionKind.flash_attention_2 and not is_flash_attn_2_available():
        raise ConfigError(NO_FLASH)
    model.set_attn_implementation(wanted.value)


def uses_forest(model: PreTrainedModel) -> bool:
    """Whether the model computes forests; else it takes padded rows."""
    return _implementation(model) == AttentionKind.forest.value


def cuts_trees(model: PreTrainedModel) -> bool:
    """Whether a part of a tree can be computed before the rest: in a forest, by a model that attends once a layer."""
    return uses_forest(model) and traits(model).layers_attend_once


def describe_attention(model: PreTrainedModel) -> str:
    """One line for the user: the layout and the kernel."""
    if uses_forest(model):
        kernel = "FlexAttention" if model.device.type == "cuda" else "two flash calls for each run of the forest"
        return f"attention: token forest, every distinct token computed once ({kernel})"
    reason = traits(model).unsupported_reason
    because = f", because {reason}" if reason else ""
    return f"attention: padded rows, {_implementation(model)}{because}"


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]  (has no public name)


@dataclass(frozen=True)
class Piece:
    """One dense attention call: rows [start, end) see the columns, all of them, causally, or as `mask` says."""

    start: int
    end: int
    columns: slice | Tensor
    causal: bool = False
    mask: Tensor | None = None  # [rows, columns], 0 or -inf
    first: bool = True  # no earlier piece has these rows


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in a forest: made once per micro-batch, used by every layer.

    depth, subtree_end: [nodes] int64, in depth-first order, on the model's device. The first `given` nodes are a path
    whose keys and values `prefix` has: the others are the rows that attend. read: [n] int64, the rows whose final
    states are wanted; None = all. On CPU the last layer attends from these alone, as nobody reads the others.
    """

    depth: Tensor
    subtree_end: Tensor
    read: Tensor | None = None
    given: int = 0
    prefix: Prefix | None = None
    _cache: dict[Any, Any] = field(default_factory=dict[Any, Any], compare=False)

    def sees(self, window: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule, as FlexAttention's `mask_mod`, of rows and columns; window 0 = none."""
        depth, subtree_end = self.depth, self.subtree_end
        given = torch.tensor(self.given, device=depth.device)  # each number would be compiled anew

        def rule(_batch: Tensor, _head: Tensor, row: Tensor, k: Tensor) -> Tensor:
            q = row + given
            visible = (k <= q) & (q < subtree_end[k])
            return visible & (depth[q] - depth[k] < window) if window else visible

        return rule

    def pieces(self, window: int, dtype: torch.dtype, last: bool = False) -> list[Piece]:
        """The dense calls that make up the attention of a layer, perhaps the last one, on CPU."""
        if not window or int(self.depth.max()) < window:
            window = 0
        only = last and not window and self.read is not None
        key = window, dtype, only
        if key not in self._cache:
            if window:
                self._cache[key] = self._window_pieces(window, dtype)
            elif only or self.given:
                self._cache[key] = self._row_pieces(only)
            else:
                self._cache[key] = self._run_pieces()
        return self._cache[key]

    def _run_pieces(self) -> list[Piece]:
        ends = self.subtree_end
        continues = (self.depth[1:] == self.depth[:-1] + 1) & (ends[1:] == ends[:-1])
        starts = [0, *((~continues).nonzero()[:, 0] + 1).tolist()]
        runs = list(zip(starts, [*starts[1:], len(ends)], strict=True))
        causal = [piece for a, b in runs for piece in _causal(a, b)]
        below = ends[starts].tolist()
        above = [Piece(b, e, slice(a, b), first=False) for (a, b), e in zip(runs, below, strict=True) if e > b]
        return causal + above

    def _row_pieces(self, only_read: bool) -> list[Piece]:
        """The runs' pieces, without nodes before the first and after the last one in each that is a row, or is read."""
        wanted = torch.zeros(len(self.depth), dtype=torch.bool)
        wanted[self.given + self.read if only_read and self.read is not None else slice(self.given, None)] = True
        pieces: list[Piece] = []
        for piece in self._run_pieces():
            rows = wanted[piece.start : piece.end].nonzero()[:, 0].tolist()
            if not rows:
                continue
            start, end = piece.start + rows[0], piece.start + rows[-1] + 1
            columns = slice(start, end) if piece.causal else piece.columns
            pieces.append(replace(piece, start=start, end=end, columns=columns))
            if piece.causal and start > piece.start:
                pieces.append(Piece(start, end, slice(piece.start, start), first=False))
        return [replace(piece, start=piece.start - self.given, end=piece.end - self.given) for piece in pieces]

    def _window_pieces(self, window: int, dtype: torch.dtype) -> list[Piece]:
        nodes = torch.arange(len(self.depth))
        rule = self.sees(window)
        pieces: list[Piece] = []
        for start in range(self.given, len(nodes), WINDOW_ROWS):
            rows = nodes[start : start + WINDOW_ROWS, None]
            end = start + len(rows)
            near = self.depth[:end] > int(self.depth[start:end].min()) - window
            columns = ((self.subtree_end[:end] > start) & near).nonzero()[:, 0]
            visible = rule(rows, rows, rows - self.given, columns)
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
            pieces.append(Piece(start - self.given, end - self.given, columns, mask=mask))
        return pieces

    def block_mask(self, window: int) -> BlockMask:
        """FlexAttention's table of tiles: which are seen at all, which in full."""
        if window in self._cache:
            return self._cache[window]
        count, rows, ends = len(self.depth), self.depth[self.given :], self.subtree_end
        above = torch.arange(-(-len(rows) // BLOCK), device=rows.device)[:, None] * BLOCK + self.given  # first nodes of
        left = torch.arange(-(-count // BLOCK), device=rows.device) * BLOCK  # the tiles of rows, and of columns
        seen = (_tiles(ends, 0).amax(1) > above) & (left < (above + BLOCK).clamp(max=count))
        full = (left + BLOCK <= above + 1) & (_tiles(ends, count).amin(1) >= (above + BLOCK).clamp(max=count))
        if window:
            highest, lowest = ([_tiles(depth, pad) for depth in (rows, self.depth)] for pad in (-1, 2**31))
            seen &= lowest[0].amin(1)[:, None] - highest[1].amax(1) < window
            full &= highest[0].amax(1)[:, None] - lowest[1].amin(1) < window
        tables = [_tile_table(seen & ~full), _tile_table(full)]
        self._cache[window] = BlockMask.from_kv_blocks(
            *tables[0], *tables[1], BLOCK_SIZE=BLOCK, mask_mod=self.sees(window), seq_lengths=(len(rows), count)
        )
        return self._cache[window]


def _causal(start: int, end: int) -> list[Piece]:
    """A chain of nodes that see one another causally, halved until the kernel, which skips no tile, wastes little."""
    if end - start <= CHAIN:
        return [Piece(start, end, slice(start, end), causal=True)]
    middle = (start + end) // 2
    lower_left = Piece(middle, end, slice(start, middle), first=False)
    return [*_causal(start, middle), *_causal(middle, end), lower_left]


def _tiles(values: Tensor, beyond: int) -> Tensor:
    """[n] -> [tiles, BLOCK], with the number `beyond` after the last."""
    return nn.functional.pad(values, (0, -len(values) % BLOCK), value=beyond).view(-1, BLOCK)


def _tile_table(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[row tiles, column tiles] bool -> how many columns each row has, and which: the first that many are meant.

    Two of each at least, for what has one would be compiled by itself.
    """
    rows, columns = chosen.shape
    chosen = nn.functional.pad(chosen, (0, int(columns == 1), 0, int(rows == 1)))
    indices = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32)[None, None], indices.to(torch.int32)[None, None]


class _ForestAttention(torch.autograd.Function):
    """The pieces on CPU. Tensors are [key heads, query heads per key head, nodes, head size]; keys may be expanded.

    The rows of pieces are those of the query, the columns those of keys and values, which may be more.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], scale: float) -> Tensor:
        groups, heads, nodes, size = query.shape
        whole = _covers(pieces, nodes)
        output: Tensor = (query.new_empty if whole else query.new_zeros)(nodes, groups, heads, size).permute(1, 2, 0, 3)
        sums: Tensor = query.new_empty(groups, heads, nodes, dtype=torch.promote_types(query.dtype, torch.float32))
        if not whole:  # what a row has gathered before its first piece
            sums.fill_(-torch.inf)
        for p in pieces:
            rows, columns = slice(p.start, p.end), p.columns
            inputs = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            part, part_sum = _flash(*inputs, 0.0, p.causal, attn_mask=p.mask, scale=scale)
            if p.first:
                output[:, :, rows], sums[:, :, rows] = part, part_sum
            else:
                earlier = sums[:, :, rows]
                output[:, :, rows].lerp_(part, torch.sigmoid(part_sum - earlier)[..., None].to(part.dtype))
                torch.logaddexp(earlier, part_sum, out=earlier)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.pieces, ctx.scale = pieces, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, output, sums = ctx.saved_tensors
        written = key.shape[2] == query.shape[2] and _covers(ctx.pieces, query.shape[2])
        grads = [torch.empty_like(t) if written else torch.zeros_like(t) for t in (query, key, value)]
        for p in ctx.pieces:
            rows, columns = slice(p.start, p.end), p.columns
            parts = _flash_backward(
                grad[:, :, rows], query[:, :, rows], key[:, :, columns], value[:, :, columns], output[:, :, rows],
                sums[:, :, rows], 0.0, p.causal, attn_mask=p.mask, scale=ctx.scale,
            )  # fmt: skip
            for total, part, place in zip(grads, parts, (rows, columns, columns), strict=True):
                if p.causal and written:
                    total[:, :, place] = part
                elif isinstance(place, slice):
                    total[:, :, place] += part
                else:
                    total.index_add_(2, place, part)
        return grads[0], grads[1], grads[2], None, None


def _covers(pieces: list[Piece], nodes: int) -> bool:
    """Whether causal pieces have every row, and so every column, first: each is then written before it is added to."""
    return sum(p.end - p.start for p in pieces if p.causal) == nodes


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # from the second length on for any; Triton wants the other sizes as numbers


def attend_by_flex(query: Tensor, key: Tensor, value: Tensor, forest: Visibility, window: int, scale: float) -> Tensor:
    """FlexAttention over the forest: query [1, heads, rows, size], key and value [1, key heads, nodes, size].

    A scale other than the usual one goes into the query: the kernel takes none that is not known when it is compiled.
    Few rows go the way of many: torch has another kernel for them, which would be compiled too.
    """
    factor = scale * query.shape[-1] ** 0.5
    query, options = query if math.isclose(factor, 1.0) else query * factor, {"FORCE_USE_FLEX_ATTENTION": True}
    mask = forest.block_mask(window)
    return _compiled_flex_attention()(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)


def forest_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, forest: Visibility | None = None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: query [1, heads, nodes, size] -> [1, nodes, heads, size].

    `forest` comes with the keyword arguments of the model's forward; without it this is transformers' sdpa attention.
    """
    if forest is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    unsupported = [name for name in EXTRAS if kwargs.get(name) is not None]
    if unsupported or dropout:
        raise ValueError(f"forest attention knows no {unsupported or 'dropout'}: set model.attention=sdpa")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype("cuda") if query.is_cuda else torch.float32  # on a CPU faster than in 16 bits
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    size = value.shape[-1]
    query, key, value = of_one_size(query, key, value, least=LEAST_SIZE if query.is_cuda else 1)
    layer = getattr(module, "layer_idx", None)
    if forest.prefix is not None:
        key, value = eagerly(forest.prefix.extend, layer, key, value)
    window = sliding_window or 0
    if query.is_cuda:
        output = attend_by_flex(query, key, value, forest, window, scale)
    else:
        groups = key.shape[1]
        by_group = query[0].unflatten(0, (groups, -1))
        shared = [tensor[0][:, None].expand(-1, by_group.shape[1], -1, -1) for tensor in (key, value)]
        config = getattr(module, "config", None)
        last = layer is not None and config is not None and layer == config.num_hidden_layers - 1
        pieces = eagerly(forest.pieces, window, query.dtype, last)
        output = eagerly(_ForestAttention.apply, by_group, *shared, pieces, scale).flatten(0, 1)[None]
    return output[..., :size].transpose(1, 2), None


def of_one_size(*tensors: Tensor, least: int = 1) -> list[Tensor]:
    """Query, key and value with zeros after their heads, which give them one size and change no score or output."""
    size = max(least, *(tensor.shape[-1] for tensor in tensors))
    return [t if t.shape[-1] == size else nn.functional.pad(t, (0, size - t.shape[-1])) for t in tensors]


AttentionInterface.register(AttentionKind.forest.value, forest_attention)
AttentionMaskInterface.register(AttentionKind.forest.value, sdpa_mask)  # for calls without a forest
