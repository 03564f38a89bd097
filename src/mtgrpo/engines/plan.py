"""What one forward pass computes: new tokens of many conversations in one flat sequence, and what each of them sees.

A conversation with one new token, as most have while they decode, attends to each of its pages by itself, and all
conversations with a common prefix attend to it together; these partial results are merged later. So nothing is padded
to the longest conversation. Several new tokens of one conversation attend at once to a copy of all its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.engines.pages import PAGE, Pages, Pool, Prefix, Stored

GRID = 8  # the number of tokens is rounded up: every new shape costs the matrix products time
DENSE = 0.5  # a range of pages is read in place, without copying, if this share of it is wanted
FAR = 2**40  # the position of a place that holds no token: nobody sees it

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """New tokens that follow what is stored, for which room has been made."""

    stored: Stored
    tokens: Sequence[int]


@dataclass(frozen=True)
class Part:
    """Pages of one pool, each seen by the same number of queries."""

    pool: Pool
    pages: slice | Tensor
    query: Tensor  # [pages * queries] flat numbers of tokens
    mask: Tensor  # [pages, 1, 1, length], 0 or -inf; beyond `length` the pages are empty

    @property
    def length(self) -> int:
        """How many places of each page are read."""
        return self.mask.shape[-1]


@dataclass(frozen=True)
class Batch:
    """Rows of several new tokens, padded to one width. They see the pages of a prefix, then their own."""

    query: Tensor  # [rows, width] flat numbers of tokens
    prefix_pages: Tensor  # [rows, pages], possibly none
    own_pages: Tensor  # [rows, pages], possibly none
    mask: Tensor  # [rows, 1, width, places in all these pages], 0 or -inf
    real: Tensor  # numbers of the queries that are no padding, in [rows * width]


@dataclass(frozen=True)
class Plan:
    """One forward pass. The flat order: rows of one token, rows of several, prefixes, padding."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    last: Tensor  # [rows] flat number of each row's last token
    writes: list[tuple[Pool, slice, Tensor]]  # flat numbers of tokens, and [tokens * heads] where their keys go
    narrow: int  # how many rows have one token
    real: int  # how many tokens are no padding
    parts: list[Part]
    table: Tensor  # [rows of one token, parts of each] numbers of partial results
    absent: Tensor | None  # the same shape: true where a row has fewer parts; None = nowhere
    batches: list[Batch]
    stored: list[Stored]  # of all rows, if the plan can be advanced
    lengths: list[int]  # of their tokens
    ends: Tensor  # of rows of one token: where the last page is in the first part
    filled: Tensor  # of these: how many tokens it holds


class Planner:
    """Makes plans; where only one more token follows in every row, from the last one."""

    def __init__(self, pages: Pages, device: torch.device, dtype: torch.dtype) -> None:
        self._pages, self._device, self._dtype = pages, device, dtype
        self._last: Plan | None = None

    def plan(self, rows: Sequence[Row]) -> Plan:
        """Lay out one forward pass; from here on the new tokens count as stored."""
        if self._last and _goes_on(self._last, rows):
            return self._advance(self._last, rows)
        narrow = [row for row in rows if len(row.tokens) == 1 and not isinstance(row.stored, Prefix)]
        wide = [row for row in rows if len(row.tokens) > 1 and not isinstance(row.stored, Prefix)]
        wide.sort(key=lambda row: len(row.tokens))
        prefixes = [row for row in rows if isinstance(row.stored, Prefix)]
        ordered = [*narrow, *wide, *prefixes]
        ids: list[int] = []
        positions: list[_Numbers] = []
        where: list[_Numbers] = []
        place: dict[int, int] = {}
        for row in ordered:
            stored, pool, count = row.stored, self._pages.pool(row.stored), len(row.tokens)
            new = np.arange(len(stored.tokens), len(stored.tokens) + count)
            page = np.array(stored.pages)[new // pool.length]
            where.append(
                (page[:, None] * pool.heads + np.arange(pool.heads)) * pool.length + new[:, None] % pool.length
            )
            positions.append(new + stored.start)
            ids.extend(row.tokens)
            stored.tokens.extend(row.tokens)
            place[id(row)] = len(ids) - 1
        real, own = len(ids), len(ids) - sum(len(row.tokens) for row in prefixes)
        padding = -real % max(GRID, 2 ** (real.bit_length() - 3))
        at = np.concatenate(where).ravel()
        heads = self._pages.own.heads
        writes = [(self._pages.own, slice(0, own), self._put(at[: own * heads]))] if own else []
        if prefixes:
            writes.append((self._pages.prefixes, slice(own, real), self._put(at[own * heads :])))
        parts, table, ends = self._narrow([row.stored for row in narrow], padding if len(narrow) == real else 0)
        absent = table < 0
        self._last = Plan(
            ids=self._put(np.pad(np.array(ids), (0, padding))),
            positions=self._put(np.pad(np.concatenate(positions), (0, padding))),
            last=self._put(np.array([place[id(row)] for row in rows])),
            writes=writes,
            narrow=len(narrow),
            real=real,
            parts=parts,
            table=self._put(np.where(absent, table[:, :1], table)),
            absent=self._put(absent) if absent.any() else None,
            batches=[*self._batches(wide, len(narrow)), *self._batches(prefixes, own)],
            stored=[row.stored for row in rows] if len(narrow) == real else [],
            lengths=[len(row.stored.tokens) for row in rows],
            ends=self._put(ends),
            filled=self._put(np.array([_filled(row.stored, self._pages.own) for row in narrow], dtype=np.int64)),
        )
        return self._last

    def _advance(self, plan: Plan, rows: Sequence[Row]) -> Plan:
        """The plan of the next step, in place."""
        for row in rows:
            row.stored.tokens.extend(row.tokens)
        plan.ids[: plan.real] = self._put(np.array([row.tokens[0] for row in rows]))
        plan.positions[: plan.real] += 1
        plan.writes[0][2].add_(1)
        plan.parts[0].mask[plan.ends, 0, 0, plan.filled] = 0
        plan.filled.add_(1)
        plan.lengths[:] = [length + 1 for length in plan.lengths]
        return plan

    def _narrow(self, rows: Sequence[Stored], padding: int) -> tuple[list[Part], _Numbers, _Numbers]:
        """For rows whose last token is new: parts, table (-1 = absent) and where in the first part each one's end is.

        Below them the table has rows for `padding`, which repeat the first.
        """
        if not rows:
            return [], np.empty((0, 1), np.int64), np.empty(0, np.int64)
        users: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.prefix:
                users.setdefault(id(row.prefix), []).append(i)
        prefixes = [row.prefix for row in (rows[group[0]] for group in users.values()) if row.prefix]

        counts = np.array([len(row.pages) for row in rows])
        owner = np.arange(len(rows)).repeat(counts)
        own, place = self._part(rows, owner[:, None])
        width = max(len(row.pages) + (len(row.prefix.pages) if row.prefix else 0) for row in rows)
        table = np.full((len(rows), width), -1)
        table[owner, np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)] = place
        ends = place[counts.cumsum() - 1]
        parts = [own]
        if prefixes:
            queries = max(map(len, users.values()))
            padded = np.array([group + [group[0]] * (queries - len(group)) for group in users.values()])
            sizes = np.array([len(prefix.pages) for prefix in prefixes])
            shared, place = self._part(prefixes, padded.repeat(sizes, axis=0))
            parts.append(shared)
            for group, places in zip(users.values(), np.split(place, sizes.cumsum()[:-1]), strict=True):
                columns = counts[group][:, None] + np.arange(len(places))
                numbers = len(own.query) + places * queries + np.arange(len(group))[:, None]
                table[np.array(group)[:, None], columns] = numbers
        return parts, np.concatenate([table, table[:1].repeat(padding, axis=0)]), ends

    def _part(self, stored: Sequence[Stored], query: _Numbers) -> tuple[Part, _Numbers]:
        """The pages of `stored`, each with its row of `query` [pages, queries]; and where each page is in the part."""
        pool = self._pages.pool(stored[0])
        pages = np.concatenate([np.array(s.pages) for s in stored])
        filled = np.full(len(pages), pool.length)
        filled[np.array([len(s.pages) for s in stored]).cumsum() - 1] = [_filled(s, pool) for s in stored]
        low, high = int(pages.min()), int(pages.max()) + 1
        where: slice | Tensor = slice(low, high)
        place = pages - low
        if len(pages) >= DENSE * (high - low):
            spread, spread_filled = np.zeros((high - low, query.shape[1]), np.int64), np.zeros(high - low, np.int64)
            spread[place], spread_filled[place] = query, filled
            query, filled = spread, spread_filled
        else:
            where, place = self._put(pages), np.arange(len(pages))
        length = min(pool.length, -(-int(filled.max()) // 16) * 16) if isinstance(stored[0], Prefix) else pool.length
        hidden = np.arange(length) >= filled[:, None]
        return Part(pool, where, self._put(query.ravel()), self._mask(hidden)[:, None, None]), place

    def _batches(self, rows: Sequence[Row], first: int) -> list[Batch]:
        """Rows of similar width together; they come by width, in flat order from `first`."""
        found: list[Batch] = []
        begin = 0
        while begin < len(rows):
            end = begin + 1
            while end < len(rows) and len(rows[end].tokens) <= 2 * len(rows[begin].tokens):
                end += 1
            group = rows[begin:end]
            found.append(self._batch([row.stored for row in group], np.array([len(r.tokens) for r in group]), first))
            first += sum(len(row.tokens) for row in group)
            begin = end
        return found

    def _batch(self, rows: Sequence[Stored], widths: _Numbers, first: int) -> Batch:
        """`rows` whose last `widths` tokens are new."""
        prefixes = [row if isinstance(row, Prefix) else row.prefix for row in rows]
        of_prefix = [prefix.pages if prefix else [] for prefix in prefixes]
        own = [[] if isinstance(row, Prefix) else row.pages for row in rows]
        tables = [_rectangle(of_prefix), _rectangle(own)]
        split = tables[0].shape[1] * self._pages.prefixes.length
        position = np.full((len(rows), split + tables[1].shape[1] * self._pages.own.length), FAR)
        for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
            count = len(prefix.tokens) if prefix else 0
            position[i, :count] = np.arange(count)
            if not isinstance(row, Prefix):
                position[i, split : split + len(row.tokens)] = row.start + np.arange(len(row.tokens))
        column = np.arange(widths.max())
        real = column < widths[:, None]
        query = np.where(real, first + (widths.cumsum() - widths)[:, None] + column, first)
        ends = np.array([row.end for row in rows])[:, None]
        at = np.minimum(ends - widths[:, None] + column, ends - 1)
        mask = self._mask(position[:, None, :] > at[:, :, None])[:, None]
        return Batch(
            self._put(query), self._put(tables[0]), self._put(tables[1]), mask, self._put(real.ravel().nonzero()[0])
        )

    def _put(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        return (
            torch.zeros(hidden.shape, dtype=self._dtype)
            .masked_fill_(torch.from_numpy(hidden), -torch.inf)
            .to(self._device)
        )


def _goes_on(plan: Plan, rows: Sequence[Row]) -> bool:
    """Whether `rows` are those of `plan`, one token further in the same pages."""
    return len(rows) == len(plan.stored) and all(
        row.stored is stored and len(row.tokens) == 1 and len(stored.tokens) == length and length % PAGE
        for row, stored, length in zip(rows, plan.stored, plan.lengths, strict=True)
    )


def _filled(stored: Stored, pool: Pool) -> int:
    """How many tokens the last page holds."""
    return (len(stored.tokens) - 1) % pool.length + 1


def _rectangle(lists: Sequence[Sequence[int]]) -> _Numbers:
    """Page numbers, filled up with page 0."""
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for i, numbers in enumerate(lists):
        table[i, : len(numbers)] = numbers
    return table
