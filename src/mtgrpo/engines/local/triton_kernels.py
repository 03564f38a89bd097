"""What a decoding step does between its matrix products, by Triton: five kernels a layer where torch launches fifty.

It decodes the steps in which every conversation computes one token; `paged_attention.py` those that also prefill.
Softmax is computed online (Milakov and Gimelshein 2018). Where there are few conversations each context is divided, and
its parts are merged by log-sum-exp (Flash-Decoding).
"""
# pyright: basic, reportIndexIssue=false, reportMissingImports=false
# Triton, which has no types and is not on every machine, compiles what is marked as a kernel.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mtgrpo.engines.local.decode_kernels import NoKernelsError
from mtgrpo.engines.local.kv_cache import KVCache, SharedPrefix
from mtgrpo.engines.local.paged_attention import BatchPlan, BatchPlanner, KernelPlan, Row

PLACES = tl.constexpr(32)  # of a context that are computed at once; blocks hold a multiple
COLUMNS = tl.constexpr(8)  # of the table: six, and as many bytes as Triton counts as aligned
LEAST_QUERIES = 16  # in a matrix product
PROGRAMS = 1024  # of one launch; with fewer contexts are divided
MOST_PARTS = 16
LEAST_PART = 32  # tokens
ACTIVATED = 1024  # numbers of one program


@dataclass(frozen=True)
class TritonPlan(KernelPlan):
    """One decoding step: one token of each row."""

    kv_cache: KVCache
    ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    last: Tensor  # [rows]
    table: Tensor  # [rows, 8] int32: where its blocks begin, their tokens, the same of its prefix, new token, position
    blocks: Tensor  # int32
    parts: int  # into which each context is divided

    def attend(
        self, layer: int, parts: Sequence[Tensor], scale: float, rotation: Sequence[Tensor] = (),
        norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `KernelPlan.attend`."""
        own, prefixes, (rows, heads, size) = self.kv_cache.own, self.kv_cache.prefixes, parts[0].shape
        keys, values, groups, wide = own.keys[layer], own.values[layer], own.heads, triton.next_power_of_2(size)
        parts = [part.to(keys.dtype) for part in parts]  # under autocast a model's own are rotated in fp32
        make = partial(torch.empty, device=keys.device)
        query = make(rows, heads, size, dtype=keys.dtype)
        cosine, sine = rotation or (query, query)
        _turn_and_write[rows, heads + 2 * groups](
            *parts, *(part.stride(0) for part in parts), cosine, sine, query if norm is None else norm, eps,
            query, keys, values, self.table, self.blocks,
            HEADS=heads, GROUPS=groups, SIZE=size, WIDE=max(wide // 2, 1), LENGTH=own.length,
            NORMS=norm is not None, TURNS=bool(rotation),
        )  # fmt: skip
        output, few = torch.empty_like(query), self.parts == 1
        partial_outputs = output if few else make(self.parts, rows, heads, size)
        log_sums = output if few else make(self.parts, rows, heads)
        each = heads // groups
        _attend[rows, groups, self.parts](
            query, keys, values, prefixes.keys[layer], prefixes.values[layer], self.table, self.blocks, scale,
            partial_outputs, log_sums, rows,
            HEADS=heads, GROUPS=groups, SIZE=size, WIDE=max(wide, LEAST_QUERIES), EACH=each,
            QUERIES=max(triton.next_power_of_2(each), LEAST_QUERIES), LENGTH=own.length,
            PREFIX_LENGTH=prefixes.length, PARTS=self.parts,
        )  # fmt: skip
        if not few:
            _merge[rows, heads](
                partial_outputs, log_sums, output, rows, HEADS=heads, SIZE=size, WIDE=wide, PARTS=self.parts
            )
        return output

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """See `KernelPlan.add_norm`."""
        rows, width = x.shape
        output, wide = torch.empty_like(x, dtype=dtype), triton.next_power_of_2(width)
        _add_norm[rows,](
            x, x if more is None else more, weight, eps, output, WIDTH=width, WIDE=wide, ADDS=more is not None
        )
        return output

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """See `KernelPlan.silu_multiply`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(rows, width)
        _silu_multiply[rows, triton.cdiv(width, ACTIVATED)](gate_up, output, WIDTH=width, WIDE=ACTIVATED)
        return output


class TritonPlanner:
    """Makes plans: by these kernels where each row has one token, else torch's."""

    library = None  # of compiled kernels, for sampling

    def __init__(self, kv_cache: KVCache, device: torch.device, dtype: torch.dtype) -> None:
        """Raises NoKernelsError where Triton cannot compile, and for heads that have no two halves."""
        if kv_cache.own.size % 2:
            raise NoKernelsError(f"heads of {kv_cache.own.size} numbers")
        self._kv_cache, self._device = kv_cache, device
        self._others = BatchPlanner(kv_cache, device, dtype)
        one = torch.ones(1, LEAST_QUERIES, device=device)
        try:
            _add_norm[1,](one, one, one[0], 1e-6, one, WIDTH=LEAST_QUERIES, WIDE=LEAST_QUERIES, ADDS=False)
        except Exception as error:  # whatever its compiler meets on a machine
            raise NoKernelsError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error

    def plan(self, rows: Sequence[Row]) -> BatchPlan | TritonPlan:
        """Lay out one forward pass; from here on the new tokens count as cached."""
        if any(len(row.tokens) > 1 or isinstance(row.block_table, SharedPrefix) for row in rows):
            return self._others.plan(rows)
        tables, blocks, begins = [row.block_table for row in rows], list[int](), dict[SharedPrefix, int]()
        numbers: list[tuple[int, ...]] = []
        for row, table in zip(rows, tables, strict=True):
            table.tokens.extend(row.tokens)
            begin, prefix = len(blocks), table.prefix
            blocks += table.blocks
            if prefix and prefix not in begins:
                begins[prefix] = len(blocks)
                blocks += prefix.blocks
            shared = (begins[prefix], len(prefix.tokens)) if prefix else (0, 0)
            numbers.append((begin, len(table.tokens), *shared, row.tokens[0], table.end - 1, 0, 0))
        flat = np.concatenate([np.array(numbers, np.int32).ravel(), np.array(blocks, np.int32)])
        put = torch.from_numpy(flat).to(self._device)  # at once: each copy takes the host as long as a kernel
        table = put[: 8 * len(rows)].view(len(rows), 8)
        longest = max(number[1] + number[3] for number in numbers)
        parts = min(PROGRAMS // (len(rows) * self._kv_cache.own.heads), longest // LEAST_PART, MOST_PARTS)
        return TritonPlan(
            self._kv_cache,
            ids=table[:, 4].long(),
            positions=table[:, 5].long(),
            last=torch.arange(len(rows), device=self._device),
            table=table,
            blocks=put[8 * len(rows) :],
            parts=1 << max(parts, 1).bit_length() - 1,  # a power of two: each number is compiled
        )


@triton.jit
def _add_norm(
    x, more, weight, eps, output,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDE)
    inside = at < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + at
    numbers = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + place, numbers, mask=inside)
    root = tl.sqrt(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + place, numbers / root * factor, mask=inside)


@triton.jit
def _silu_multiply(gate_up, output, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded, as the model's own is
    tl.store(output + row * WIDTH + at, active.to(tl.float32) * up.to(tl.float32), mask=inside)


@triton.jit
def _turn_and_write(
    queries, keys, values, query_stride, key_stride, value_stride,
    cosine, sine, norm, eps,
    turned, cached_keys, cached_values, table, blocks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, LENGTH: tl.constexpr,
    NORMS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the head of a query or key, in two halves, and write it, or a value, to its place."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    inside = at < SIZE // 2
    if head < HEADS:
        source = queries + row * query_stride + head * SIZE
    elif head < HEADS + GROUPS:
        source = keys + row * key_stride + (head - HEADS) * SIZE
    else:
        source = values + row * value_stride + (head - HEADS - GROUPS) * SIZE
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + SIZE // 2 + at, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + GROUPS:
        if NORMS:
            root = tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / SIZE + eps)
            first = first / root * tl.load(norm + head * SIZE + at, mask=inside, other=0.0).to(tl.float32)
            second = second / root * tl.load(norm + head * SIZE + SIZE // 2 + at, mask=inside, other=0.0).to(tl.float32)
        if TURNS:
            angle = row * SIZE + at
            low = first * tl.load(cosine + angle, mask=inside, other=0.0)
            low -= second * tl.load(sine + angle, mask=inside, other=0.0)
            high = second * tl.load(cosine + angle + SIZE // 2, mask=inside, other=0.0)
            second = high + first * tl.load(sine + angle + SIZE // 2, mask=inside, other=0.0)
            first = low
    place = tl.load(table + row * COLUMNS + 1) - 1
    block = tl.load(blocks + tl.load(table + row * COLUMNS) + place // LENGTH).to(tl.int64)
    if head < HEADS:
        target = turned + (row * HEADS + head) * SIZE
    elif head < HEADS + GROUPS:
        target = cached_keys + ((block * GROUPS + head - HEADS) * LENGTH + place % LENGTH) * SIZE
    else:
        target = cached_values + ((block * GROUPS + head - HEADS - GROUPS) * LENGTH + place % LENGTH) * SIZE
    tl.store(target + at, first, mask=inside)
    tl.store(target + SIZE // 2 + at, second, mask=inside)


@triton.jit
def _see(
    query, top, total, output, keys, values, blocks,
    begin, end, length, group, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Attend to the pieces [begin, end) of `length` tokens, which lie in `blocks` of LENGTH."""
    at, place = tl.arange(0, WIDE), tl.arange(0, PLACES)
    for piece in range(begin, end):
        token = piece * PLACES
        block = tl.load(blocks + token // LENGTH).to(tl.int64)
        where = ((block * GROUPS + group) * LENGTH + token % LENGTH + place)[:, None] * SIZE + at[None, :]
        seen = token + place < length
        inside = seen[:, None] & (at < SIZE)[None, :]
        key = tl.load(keys + where, mask=inside, other=0.0)
        value = tl.load(values + where, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        shrunk = tl.exp(top - highest)
        share = tl.exp(scores - highest[:, None])
        total = total * shrunk + tl.sum(share, 1)
        output = output * shrunk[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        top = highest
    return top, total, output


@triton.jit(do_not_specialize=["rows"])
def _attend(
    queries, keys, values, prefix_keys, prefix_values, table, blocks, scale,
    outputs, log_sums, rows, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, LENGTH: tl.constexpr, PREFIX_LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """What the queries of one group of heads of one row see in one part of its context."""
    row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at, member = tl.arange(0, WIDE), tl.arange(0, QUERIES)
    inside = (member < EACH)[:, None] & (at < SIZE)[None, :]
    place = (row * HEADS + group * EACH + member)[:, None] * SIZE + at[None, :]
    query = tl.load(queries + place, mask=inside, other=0.0)
    own_blocks, length = blocks + tl.load(table + row * COLUMNS), tl.load(table + row * COLUMNS + 1)
    shared_blocks, shared = blocks + tl.load(table + row * COLUMNS + 2), tl.load(table + row * COLUMNS + 3)
    prefix_pieces = tl.cdiv(shared, PLACES)
    pieces = prefix_pieces + tl.cdiv(length, PLACES)
    each = tl.cdiv(pieces, PARTS)
    begin, end = tl.minimum(part * each, pieces), tl.minimum(part * each + each, pieces)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, WIDE], tl.float32)
    top, total, output = _see(
        query, top, total, output, prefix_keys, prefix_values, shared_blocks, tl.minimum(begin, prefix_pieces),
        tl.minimum(end, prefix_pieces), shared, group, scale, GROUPS, SIZE, WIDE, PREFIX_LENGTH,
    )  # fmt: skip
    top, total, output = _see(
        query, top, total, output, keys, values, own_blocks, tl.maximum(begin - prefix_pieces, 0),
        tl.maximum(end - prefix_pieces, 0), length, group, scale, GROUPS, SIZE, WIDE, LENGTH,
    )  # fmt: skip
    output = output / tl.where(total > 0, total, 1.0)[:, None]
    if PARTS == 1:
        tl.store(outputs + place, output, mask=inside)
    else:
        tl.store(outputs + part * rows.to(tl.int64) * HEADS * SIZE + place, output, mask=inside)
        log_sum = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        at_head = (part * rows + row) * HEADS + group * EACH + member
        tl.store(log_sums + at_head, log_sum, mask=member < EACH)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    partial_outputs, log_sums, output, rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    at, part = tl.arange(0, WIDE), tl.arange(0, PARTS).to(tl.int64) * rows * HEADS
    log_sum = tl.load(log_sums + part + place)
    share = tl.exp(log_sum - tl.max(log_sum, 0))
    where, inside = ((part + place) * SIZE)[:, None] + at[None, :], (at < SIZE)[None, :]
    outputs = tl.load(partial_outputs + where, mask=inside, other=0.0)
    merged = tl.sum(outputs * share[:, None], 0) / tl.sum(share, 0)
    tl.store(output + place * SIZE + at, merged, mask=at < SIZE)
