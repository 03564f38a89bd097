"""What one forward pass computes: new tokens of many conversations in one flat sequence, and what each of them sees.

A conversation with one new token, as most have while they decode, attends to each of its pages by itself; several new
tokens of one conversation attend at once to a copy of all its pages; and all conversations with a common prefix attend
to it together. What a token gathers from several such parts is merged later. So nothing is padded to the longest
conversation, and a prefix is read once.
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

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """New tokens that follow what is stored, for which room has been made."""

    stored: Stored
    tokens: Sequence[int]


@dataclass(frozen=True)
class Part:
    """Pages, or rows of several pages, each seen by the same number of queries."""

    pool: Pool
    pages: slice | Tensor  # a slice or [n]: pages; [n, pages of each]: rows of pages
    query: Tensor  # [n * queries] flat numbers of tokens
    mask: Tensor  # [n, 1, 1 or queries, places], 0 or -inf

    def read(self, buffer: Tensor) -> Tensor:
        """Keys or values [n, key heads, places, size]. Of single pages only the places that the mask covers."""
        if isinstance(self.pages, Tensor) and self.pages.dim() == 2:
            return buffer[self.pages].transpose(1, 2).flatten(2, 3)
        return buffer[self.pages, :, : self.mask.shape[-1]]


@dataclass(frozen=True)
class Plan:
    """One forward pass. The flat order: rows of one token, rows of several, prefixes, padding."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    last: Tensor  # [rows] flat number of each row's last token
    writes: list[tuple[Pool, slice, Tensor]]  # flat numbers of tokens, and [tokens * heads] where their keys go
    real: int  # how many tokens are no padding
    parts: list[Part]
    table: Tensor  # [tokens, parts of each] numbers of partial results, counted through all parts
    absent: Tensor | None  # the same shape: true where a token has fewer parts; None = nowhere
    stored: list[Stored]  # of all rows, if each has one token: then the plan can be advanced
    lengths: list[int]  # of their tokens
    ends: Tensor  # of these: where the last page is in the first part
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
        build = _Parts(self._pages, self._device, self._dtype)
        build.add_pages([row.stored for row in narrow])
        build.add_rows(wide)
        build.add_rows(prefixes)
        build.add_prefixes([*narrow, *wide])
        width = max(map(len, build.found))
        table = np.array([numbers + [-1] * (width - len(numbers)) for numbers in build.found])
        table = np.concatenate([table, table[:1].repeat(padding, axis=0)])
        absent = table < 0
        advances = len(narrow) == len(rows)
        ends = [numbers[len(row.stored.pages) - 1] for row, numbers in zip(narrow, build.found, strict=False)]
        self._last = Plan(
            ids=self._put(np.pad(np.array(ids), (0, padding))),
            positions=self._put(np.pad(np.concatenate(positions), (0, padding))),
            last=self._put(np.array([place[id(row)] for row in rows])),
            writes=writes,
            real=real,
            parts=build.parts,
            table=self._put(np.where(absent, table[:, :1], table)),
            absent=self._put(absent) if absent.any() else None,
            stored=[row.stored for row in rows] if advances else [],
            lengths=[len(row.stored.tokens) for row in rows] if advances else [],
            ends=self._put(np.array(ends, dtype=np.int64)),
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

    def _put(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)


class _Parts:
    """Collects parts and, of every token in flat order, the numbers of its partial results."""

    def __init__(self, pages: Pages, device: torch.device, dtype: torch.dtype) -> None:
        self.parts: list[Part] = []
        self.found: list[list[int]] = []
        self._results = 0
        self._pages, self._device, self._dtype = pages, device, dtype

    def add_pages(self, rows: Sequence[Stored]) -> None:
        """Rows of one token: a part of all their pages, one by one."""
        if rows:
            sizes = [len(row.pages) for row in rows]
            place = self._add_pages(rows, np.arange(len(rows)).repeat(sizes)[:, None])
            self.found += [numbers.tolist() for numbers in np.split(place, np.cumsum(sizes)[:-1])]

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Rows of several tokens, which come by their width: parts of rows of similar width."""
        begin = 0
        while begin < len(rows):
            end = begin + 1
            while end < len(rows) and len(rows[end].tokens) <= 2 * len(rows[begin].tokens):
                end += 1
            self._add_rows([row.stored for row in rows[begin:end]], [len(row.tokens) for row in rows[begin:end]])
            begin = end

    def add_prefixes(self, rows: Sequence[Row]) -> None:
        """A part of the pages of all prefixes of `rows`, whose tokens are the first in flat order."""
        users: dict[int, list[int]] = {}
        prefixes: dict[int, Prefix] = {}
        first = 0
        for row in rows:
            if prefix := row.stored.prefix:
                prefixes[id(prefix)] = prefix
                users.setdefault(id(prefix), []).extend(range(first, first + len(row.tokens)))
            first += len(row.tokens)
        if not prefixes:
            return
        width, before = max(map(len, users.values())), self._results
        query = np.array([tokens + tokens[:1] * (width - len(tokens)) for tokens in users.values()])
        sizes = [len(prefix.pages) for prefix in prefixes.values()]
        place = self._add_pages(list(prefixes.values()), query.repeat(sizes, axis=0))
        for tokens, places in zip(users.values(), np.split(place, np.cumsum(sizes)[:-1]), strict=True):
            for number, token in enumerate(tokens):
                self.found[token] += (before + places * width + number).tolist()

    def _add_pages(self, stored: Sequence[Stored], query: _Numbers) -> _Numbers:
        """A part of all pages of `stored`, each with its row of `query` [pages, queries]; where each page is in it."""
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
        # Conversations grow, and the plan with them; a prefix is read as far as the longest goes.
        length = -(-int(filled.max()) // 16) * 16 if isinstance(stored[0], Prefix) else pool.length
        self._add(
            Part(pool, where, self._put(query.ravel()), self._mask(np.arange(length) >= filled[:, None, None, None]))
        )
        return place

    def _add_rows(self, rows: Sequence[Stored], widths: Sequence[int]) -> None:
        """A part of `rows` whose last `widths` tokens are new."""
        pool = self._pages.pool(rows[0])
        pages = np.zeros((len(rows), max(len(row.pages) for row in rows)), np.int64)
        width, first = max(widths), len(self.found)
        query = np.full((len(rows), width), first)
        at = np.zeros((len(rows), 1, width, 1), np.int64)  # the place of each query among the row's own tokens
        for i, (row, count) in enumerate(zip(rows, widths, strict=True)):
            pages[i, : len(row.pages)] = row.pages
            query[i, :count] = len(self.found) + np.arange(count)
            at[i, 0, :count, 0] = len(row.tokens) - count + np.arange(count)
            self.found += [[self._results + i * width + number] for number in range(count)]
        hidden = np.arange(pages.shape[1] * pool.length) > at
        self._add(Part(pool, self._put(pages), self._put(query.ravel()), self._mask(hidden)))

    def _add(self, part: Part) -> None:
        self.parts.append(part)
        self._results += len(part.query)

    def _put(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return mask.to(self._device)


def _goes_on(plan: Plan, rows: Sequence[Row]) -> bool:
    """Whether `rows` are those of `plan`, one token further in the same pages."""
    return len(rows) == len(plan.stored) and all(
        row.stored is stored and len(row.tokens) == 1 and len(stored.tokens) == length and length % PAGE
        for row, stored, length in zip(rows, plan.stored, plan.lengths, strict=True)
    )


def _filled(stored: Stored, pool: Pool) -> int:
    """How many tokens the last page holds."""
    return (len(stored.tokens) - 1) % pool.length + 1
