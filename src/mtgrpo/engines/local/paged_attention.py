"""Attention over KV blocks: what one forward pass computes, and what each of its tokens sees.

New tokens of many conversations lie in one flat sequence. A conversation with one new token, as most have while they
decode, attends to each of its blocks by itself; several new tokens of one conversation attend at once to a copy of all
its blocks; and all conversations with a common prefix attend to it together. What a token gathers from several such
parts is merged by log-sum-exp, which is exact. So little is padded, and a prefix is read once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.engines.local.kv_cache import BLOCK_SIZE, BlockPool, BlockTable, KVCache, SharedPrefix

GRID = 8  # the number of tokens is rounded up: every new shape costs the matrix products time
DENSE = 0.5  # a range of blocks is read in place, without copying, if this share of it is wanted
FEW = 2  # queries of a block for which plain products are faster than the flash kernel on a CPU
SCORES = 2**25  # that plain products hold at once; of longer prefill some queries come after others

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_Numbers = NDArray[np.int64]


class Row(NamedTuple):
    """New tokens that follow what is in the KV cache, for which blocks have been reserved."""

    block_table: BlockTable
    tokens: Sequence[int]


@dataclass(frozen=True)
class BlockGroup:
    """Blocks, or rows of several blocks, each seen by the same number of queries."""

    pool: BlockPool
    blocks: slice | Tensor  # a slice or [n]: blocks; [n, blocks of each]: rows of blocks
    query: Tensor  # [n * queries] flat numbers of tokens
    mask: Tensor  # [n, 1, 1 or queries, places], 0 or -inf

    def read(self, buffer: Tensor) -> Tensor:
        """Keys or values [n, key heads, places, size]. Of single blocks only the places that the mask covers."""
        if isinstance(self.blocks, Tensor) and self.blocks.dim() == 2:
            return buffer[self.blocks].transpose(1, 2).flatten(2, 3)
        return buffer[self.blocks, :, : self.mask.shape[-1]]


@dataclass(frozen=True)
class BatchPlan:
    """One forward pass. The flat order: rows of one token, rows of several, prefixes, padding."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    last: Tensor  # [rows] flat number of each row's last token
    writes: list[tuple[BlockPool, slice, Tensor]]  # flat numbers of tokens, and [tokens * heads] where their keys go
    real: int  # how many tokens are no padding
    parts: list[BlockGroup]
    table: Tensor  # [tokens, parts of each] numbers of partial results, counted through all parts
    absent: Tensor | None  # the same shape: true where a token has fewer parts; None = nowhere
    block_table: list[BlockTable]  # of all rows, if each has one token: then the plan can be advanced
    lengths: list[int]  # of their tokens
    ends: Tensor  # of these: where the last block is in the first part
    filled: Tensor  # of these: how many tokens it holds


class KernelPlan(ABC):
    """One forward pass, of which kernels do all but the matrix products. Called, it is the attention of a layer."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    last: Tensor  # [rows] flat number of each row's last token

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write new keys and values [tokens, key heads, size]; the attention of `query` [tokens, heads, size]."""
        return self.attend(layer, [part.contiguous() for part in (query, key, value)], scale)

    @abstractmethod
    def attend(
        self, layer: int, parts: Sequence[Tensor], scale: float, rotation: Sequence[Tensor] = (),
        norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """The same of query, key and value that are to be normed and rotated before.

        rotation: cosine and sine [tokens, size]. norm: the weights [query and key heads, size] of their RMS norms.
        """

    @abstractmethod
    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x [tokens, width] in fp32 += more, in place; returns x / rms(x) * weight in `dtype`."""

    @abstractmethod
    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * width] -> silu of the first half times the second, [tokens, width]."""


class BatchPlanner:
    """Makes plans; where only one more token follows in every row, from the last one."""

    library = None  # of compiled kernels

    def __init__(self, blocks: KVCache, device: torch.device, dtype: torch.dtype) -> None:
        self.blocks, self.device, self.dtype = blocks, device, dtype
        self._last: BatchPlan | None = None

    def plan(self, rows: Sequence[Row]) -> BatchPlan:
        """Lay out one forward pass; from here on the new tokens count as cached."""
        last = self._last
        if last and follow_on(rows, last.block_table, last.lengths):
            return self._advance(last, rows)
        decoding = [row for row in rows if len(row.tokens) == 1 and not isinstance(row.block_table, SharedPrefix)]
        prefill = [row for row in rows if len(row.tokens) > 1 and not isinstance(row.block_table, SharedPrefix)]
        prefixes = [row for row in rows if isinstance(row.block_table, SharedPrefix)]
        for several in (prefill, prefixes):
            several.sort(key=lambda row: (len(row.tokens).bit_length(), len(row.block_table.blocks)))
        flat = FlatRows([*decoding, *prefill, *prefixes])
        build = _Parts(self, flat, len(decoding))
        build.add_blocks()
        build.add_rows(len(decoding), len(decoding) + len(prefill))
        build.add_rows(len(decoding) + len(prefill), len(rows))
        build.add_prefixes(len(decoding) + len(prefill))

        table = np.concatenate([build.table, build.table[:1].repeat(flat.padding, axis=0)])
        absent = table < 0
        advances = len(decoding) == len(rows)
        plan = BatchPlan(
            ids=self.put(np.pad(flat.ids, (0, flat.padding))),
            positions=self.put(np.pad(flat.positions, (0, flat.padding))),
            last=self.put(flat.last_of(rows)),
            writes=self._writes(flat, flat.real - sum(len(row.tokens) for row in prefixes)),
            real=flat.real,
            parts=build.parts,
            table=self.put(np.where(absent, table[:, :1], table)),
            absent=self.put(absent) if absent.any() else None,
            block_table=[row.block_table for row in rows] if advances else [],
            lengths=flat.lengths.tolist(),
            ends=self.put(build.table[np.arange(len(decoding)), flat.block_counts[: len(decoding)] - 1]),
            filled=self.put((flat.lengths[: len(decoding)] - 1) % BLOCK_SIZE + 1),
        )
        self._last = plan if advances else None
        return plan

    def _writes(self, flat: FlatRows, own: int) -> list[tuple[BlockPool, slice, Tensor]]:
        """Where keys go: the first `own` tokens are those of conversations, the others those of prefixes."""
        writes: list[tuple[BlockPool, slice, Tensor]] = []
        for pool, tokens in ((self.blocks.own, slice(0, own)), (self.blocks.prefixes, slice(own, flat.real))):
            if tokens.start < tokens.stop:
                within = flat.within[tokens]
                block = flat.blocks[flat.block_starts[flat.row[tokens]] + within // pool.length]
                block = block[:, None] * pool.heads + np.arange(pool.heads)
                writes.append((pool, tokens, self.put((block * pool.length + within[:, None] % pool.length).ravel())))
        return writes

    def _advance(self, plan: BatchPlan, rows: Sequence[Row]) -> BatchPlan:
        """The plan of the next step, in place."""
        for row in rows:
            row.block_table.tokens.extend(row.tokens)
        plan.ids[: plan.real] = self.put(np.array([row.tokens[0] for row in rows]))
        plan.positions[: plan.real] += 1
        plan.writes[0][2].add_(1)
        plan.parts[0].mask[plan.ends, 0, 0, plan.filled] = 0
        plan.filled.add_(1)
        plan.lengths[:] = [length + 1 for length in plan.lengths]
        return plan

    def put(self, numbers: NDArray[np.generic]) -> Tensor:
        """On the model's device."""
        return torch.from_numpy(numbers).to(self.device)


def follow_on(rows: Sequence[Row], block_tables: list[BlockTable], lengths: list[int]) -> bool:
    """Whether `rows` are one more token each of the conversations of the last plan, in the same blocks."""
    return (
        len(rows) == len(block_tables)
        and [row.block_table for row in rows] == block_tables
        and all([len(row.tokens) == 1 for row in rows])
        and [len(block_table.tokens) for block_table in block_tables] == lengths
        and all([length % BLOCK_SIZE for length in lengths])
    )


class FlatRows:
    """The new tokens of rows in one sequence; from here on they count as cached."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.counts = np.array([len(row.tokens) for row in rows])
        self.ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64)
        starts = np.array([row.block_table.start for row in rows])
        for row in rows:
            row.block_table.tokens.extend(row.tokens)
        self.lengths = np.array([len(row.block_table.tokens) for row in rows])  # of all that is cached of each row
        self.block_counts = np.array([len(row.block_table.blocks) for row in rows])
        self.block_starts = self.block_counts.cumsum() - self.block_counts
        self.blocks = np.fromiter(chain.from_iterable(row.block_table.blocks for row in rows), np.int64)
        self.real = len(self.ids)
        self.row = np.arange(len(rows)).repeat(self.counts)  # of each token
        self.ends = self.counts.cumsum() - 1  # the last token of each row
        self.within = np.arange(self.real) + (self.lengths - 1 - self.ends)[self.row]  # its place in what is cached
        self.positions = self.within + starts[self.row]
        self.padding = -self.real % max(GRID, 2 ** (self.real.bit_length() - 3))

    def last_of(self, rows: Sequence[Row]) -> _Numbers:
        """The flat number of the last token of each of `rows`, which may come in another order."""
        place = {id(row): last for row, last in zip(self.rows, self.ends.tolist(), strict=True)}
        return np.array([place[id(row)] for row in rows])


class _Parts:
    """Collects parts and, for every token, the numbers of its partial results: those of its own blocks come first."""

    def __init__(self, planner: BatchPlanner, flat: FlatRows, decoding: int) -> None:
        self.parts: list[BlockGroup] = []
        self._results = 0
        self._planner, self._kv_cache, self._flat, self._decoding = planner, planner.blocks, flat, decoding
        self._own = np.ones(len(flat.rows), np.int64)  # results that the tokens of each row have of their own blocks
        self._own[:decoding] = flat.block_counts[:decoding]
        shared = [len(row.block_table.prefix.blocks) if row.block_table.prefix else 0 for row in flat.rows]
        self.table = np.full((flat.real, int((self._own + shared).max())), -1)

    def add_blocks(self) -> None:
        """A part of all blocks of the rows of one token, block by block."""
        flat, count = self._flat, self._decoding
        if count:
            sizes = flat.block_counts[:count]
            owner = np.arange(count).repeat(sizes)
            blocks, lengths = flat.blocks[: len(owner)], flat.lengths[:count]
            place = self._add_blocks(self._kv_cache.own, blocks, sizes, lengths, owner[:, None])
            self.table[owner, np.arange(len(owner)) - flat.block_starts[owner]] = place

    def add_rows(self, begin: int, end: int) -> None:
        """Parts of the rows [begin, end), which come by width and number of blocks: those that are alike together."""
        counts, blocks = self._flat.counts, self._flat.block_counts
        while begin < end:
            wide = counts[begin + 1 : end] > 2 * counts[begin]
            long = np.maximum(blocks[begin + 1 : end] / blocks[begin], blocks[begin] / blocks[begin + 1 : end]) > 2
            alike = int(np.append(wide | long, True).argmax()) + 1
            self._add_rows(begin, begin + alike)
            begin += alike

    def add_prefixes(self, end: int) -> None:
        """A part of the blocks of all prefixes of the rows [0, end)."""
        flat = self._flat
        users: dict[SharedPrefix, list[int]] = {}  # tokens
        for row, count, last in zip(flat.rows[:end], flat.counts.tolist(), flat.ends.tolist(), strict=False):
            if prefix := row.block_table.prefix:
                users.setdefault(prefix, []).extend(range(last + 1 - count, last + 1))
        if not users:
            return
        before, width = self._results, max(map(len, users.values()))
        query = np.array([tokens + tokens[:1] * (width - len(tokens)) for tokens in users.values()])
        sizes = np.array([len(prefix.blocks) for prefix in users])
        blocks = np.fromiter(chain.from_iterable(prefix.blocks for prefix in users), np.int64)
        lengths = np.array([len(prefix.tokens) for prefix in users])
        place = self._add_blocks(self._kv_cache.prefixes, blocks, sizes, lengths, query.repeat(sizes, axis=0))
        for tokens, places in zip(users.values(), np.split(place, sizes.cumsum()[:-1]), strict=True):
            columns = self._own[flat.row[tokens]][:, None] + np.arange(len(places))
            numbers = before + places * width + np.arange(len(tokens))[:, None]
            self.table[np.array(tokens)[:, None], columns] = numbers

    def _add_blocks(
        self, pool: BlockPool, blocks: _Numbers, sizes: _Numbers, lengths: _Numbers, query: _Numbers
    ) -> _Numbers:
        """A part of `blocks`, which belong to lists of `sizes` with `lengths` tokens. Returns the place of each.

        Each block is seen by its row of `query` [blocks, queries].
        """
        filled = np.full(len(blocks), pool.length)
        filled[sizes.cumsum() - 1] = (lengths - 1) % pool.length + 1
        low, high = int(blocks.min()), int(blocks.max()) + 1
        where: slice | Tensor = slice(low, high)
        place = blocks - low
        if len(blocks) >= DENSE * (high - low):
            spread, spread_filled = np.zeros((high - low, query.shape[1]), np.int64), np.zeros(high - low, np.int64)
            spread[place], spread_filled[place] = query, filled
            query, filled = spread, spread_filled
        else:
            where, place = self._planner.put(blocks), np.arange(len(blocks))
        # Conversations grow, and the plan with them; prefixes are read as far as the longest goes.
        length = pool.length if pool is self._kv_cache.own else -(-int(filled.max()) // 16) * 16
        self._add(pool, where, query, self._mask(filled[:, None, None] - 1, length))
        return place

    def _add_rows(self, begin: int, end: int) -> None:
        """A part of the rows [begin, end)."""
        flat = self._flat
        counts, pool = flat.counts[begin:end], self._kv_cache.pool(flat.rows[begin].block_table)
        blocks = np.zeros((end - begin, flat.block_counts[begin:end].max()), np.int64)
        for i, row in enumerate(flat.rows[begin:end]):
            blocks[i, : len(row.block_table.blocks)] = row.block_table.blocks
        column = np.arange(counts.max())
        first = flat.ends[begin:end] + 1 - counts
        real = column < counts[:, None]
        query = np.where(real, first[:, None] + column, first[:, None])
        place = np.where(real, (flat.lengths[begin:end] - counts)[:, None] + column, 0)  # among the row's own tokens
        self.table[query[real], 0] = self._results + real.ravel().nonzero()[0]
        mask = self._mask(place[:, None], blocks.shape[1] * pool.length)
        self._add(pool, self._planner.put(blocks), query, mask)

    def _add(self, pool: BlockPool, blocks: slice | Tensor, query: _Numbers, mask: Tensor) -> None:
        self.parts.append(BlockGroup(pool, blocks, self._planner.put(query.ravel()), mask))
        self._results += query.size

    def _mask(self, last: _Numbers, places: int) -> Tensor:
        """Up to the place `last` of each query 0, and -inf beyond; made where the model is."""
        hidden = torch.arange(places, device=self._planner.device) > self._planner.put(last)[..., None]
        return torch.zeros_like(hidden, dtype=self._planner.dtype).masked_fill_(hidden, -torch.inf)


def attend(
    kv_cache: KVCache, plan: BatchPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Write the new keys and values [tokens, key heads, size] into their blocks; returns the attention of the query.

    Query and result are [tokens, heads, size].
    """
    for pool, tokens, where in plan.writes:
        for buffer, new in ((pool.keys[layer], key), (pool.values[layer], value)):
            buffer.view(-1, pool.size).index_copy_(0, where, new[tokens].to(buffer.dtype).reshape(-1, pool.size))
    query = query.to(kv_cache.own.keys[layer].dtype)
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for part in plan.parts:
        keys, values = part.read(part.pool.keys[layer]), part.read(part.pool.values[layer])
        queries = len(part.query) // len(keys)
        folded = _fold(query.index_select(0, part.query).unflatten(0, (-1, queries)), part.pool.heads)
        output, log_sum = _attention(folded, keys, values, part.mask, scale)
        outputs.append(_unfold(output))
        sums.append(_unfold(log_sum[..., None]))
    table, shape = plan.table.flatten(), plan.table.shape
    output = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, table).unflatten(0, shape)
    if shape[1] == 1:
        return output[:, 0]
    log_sum = (torch.cat(sums) if len(sums) > 1 else sums[0]).index_select(0, table).unflatten(0, shape)
    if plan.absent is not None:
        log_sum.masked_fill_(plan.absent[:, :, None, None], -torch.inf)
    return output.mul_(log_sum.softmax(1)).sum(1)


def _fold(query: Tensor, groups: int) -> Tensor:
    """[n, queries, heads, size] -> [n, key heads, heads of each, queries, size]."""
    return query.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _unfold(output: Tensor) -> Tensor:
    """[n, key heads, heads of each, queries, size] -> [n * queries, heads, size]."""
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, shaped as the query (see `_fold`), and the log-sum-exp of the scores, without its last dimension.

    key, value [n, key heads, places, size]; mask [n, 1, 1 or queries, places].
    """
    shape = heads, queries = query.shape[2:4]
    if query.device.type == "cpu" and heads * queries > FEW:
        mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads, 1)
        output, log_sum = _flash(query.flatten(2, 3), key, value, 0.0, False, attn_mask=mask, scale=scale)
        return output.unflatten(2, shape), log_sum.unflatten(2, shape)
    most = max(1, SCORES // (query[..., 0, 0].numel() * key.shape[2]))
    if queries > most:
        chunks = zip(query.split(most, 3), mask.expand(-1, -1, queries, -1).split(most, 2), strict=True)
        outputs, sums = zip(*(_attention(some, key, value, seen, scale) for some, seen in chunks), strict=True)
        return torch.cat(outputs, 3), torch.cat(sums, 3)
    scores = (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, shape)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale).add_(mask[:, :, None])
    share = scores.softmax(-1)
    log_sum = scores.amax(-1) - share.amax(-1).log()
    return (share.to(value.dtype).flatten(2, 3) @ value).unflatten(2, shape), log_sum
