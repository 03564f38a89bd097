"""What one forward pass computes: new tokens of many conversations in one flat sequence, and what each of them sees.

A conversation with one new token, as most have while they decode, attends to each of its pages by itself; several new
tokens of one conversation attend at once to a copy of all its pages; and all conversations with a common prefix attend
to it together. What a token gathers from several such parts is merged later. So little is padded, and a prefix is read
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.engines.pages import PAGE, Pages, Pool, Prefix, Stored

GRID = 8  # the number of tokens is rounded up: every new shape costs the matrix products time
DENSE = 0.5  # a range of pages is read in place, without copying, if this share of it is wanted

_Numbers = NDArray[np.int64]


class Row(NamedTuple):
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
        self.pages, self.device, self.dtype = pages, device, dtype
        self._last: Plan | None = None

    def plan(self, rows: Sequence[Row]) -> Plan:
        """Lay out one forward pass; from here on the new tokens count as stored."""
        if self._last and _goes_on(self._last, rows):
            return self._advance(self._last, rows)
        narrow = [row for row in rows if len(row.tokens) == 1 and not isinstance(row.stored, Prefix)]
        wide = [row for row in rows if len(row.tokens) > 1 and not isinstance(row.stored, Prefix)]
        prefixes = [row for row in rows if isinstance(row.stored, Prefix)]
        for several in (wide, prefixes):
            several.sort(key=lambda row: (len(row.tokens).bit_length(), len(row.stored.pages)))
        flat = _Flat([*narrow, *wide, *prefixes])
        build = _Parts(self, flat, len(narrow))
        build.add_pages()
        build.add_rows(len(narrow), len(narrow) + len(wide))
        build.add_rows(len(narrow) + len(wide), len(rows))
        build.add_prefixes(len(narrow) + len(wide))

        padding = -flat.real % max(GRID, 2 ** (flat.real.bit_length() - 3))
        table = np.concatenate([build.table, build.table[:1].repeat(padding, axis=0)])
        absent = table < 0
        advances = len(narrow) == len(rows)
        place = {id(row): last for row, last in zip(flat.rows, flat.ends.tolist(), strict=True)}
        self._last = Plan(
            ids=self.put(np.pad(flat.ids, (0, padding))),
            positions=self.put(np.pad(flat.positions, (0, padding))),
            last=self.put(np.array([place[id(row)] for row in rows])),
            writes=self._writes(flat, flat.real - sum(len(row.tokens) for row in prefixes)),
            real=flat.real,
            parts=build.parts,
            table=self.put(np.where(absent, table[:, :1], table)),
            absent=self.put(absent) if absent.any() else None,
            stored=[row.stored for row in rows] if advances else [],
            lengths=flat.lengths.tolist(),
            ends=self.put(build.table[np.arange(len(narrow)), flat.page_counts[: len(narrow)] - 1]),
            filled=self.put((flat.lengths[: len(narrow)] - 1) % PAGE + 1),
        )
        return self._last

    def _writes(self, flat: _Flat, own: int) -> list[tuple[Pool, slice, Tensor]]:
        """Where keys go: the first `own` tokens are those of conversations, the others those of prefixes."""
        found: list[tuple[Pool, slice, Tensor]] = []
        for pool, tokens in ((self.pages.own, slice(0, own)), (self.pages.prefixes, slice(own, flat.real))):
            if tokens.start < tokens.stop:
                within = flat.within[tokens]
                page = flat.pages[flat.page_starts[flat.row[tokens]] + within // pool.length]
                block = page[:, None] * pool.heads + np.arange(pool.heads)
                found.append((pool, tokens, self.put((block * pool.length + within[:, None] % pool.length).ravel())))
        return found

    def _advance(self, plan: Plan, rows: Sequence[Row]) -> Plan:
        """The plan of the next step, in place."""
        for row in rows:
            row.stored.tokens.extend(row.tokens)
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


def _goes_on(plan: Plan, rows: Sequence[Row]) -> bool:
    """Whether `rows` are those of `plan`, one token further in the same pages."""
    return len(rows) == len(plan.stored) and all(
        row.stored is stored and len(row.tokens) == 1 and len(stored.tokens) == length and length % PAGE
        for row, stored, length in zip(rows, plan.stored, plan.lengths, strict=True)
    )


class _Flat:
    """The new tokens of rows in one sequence; makes them stored."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.counts = np.array([len(row.tokens) for row in rows])
        self.ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64)
        starts = np.array([row.stored.start for row in rows])
        for row in rows:
            row.stored.tokens.extend(row.tokens)
        self.lengths = np.array([len(row.stored.tokens) for row in rows])  # of all that is stored of each row
        self.page_counts = np.array([len(row.stored.pages) for row in rows])
        self.page_starts = self.page_counts.cumsum() - self.page_counts
        self.pages = np.fromiter(chain.from_iterable(row.stored.pages for row in rows), np.int64)
        self.real = len(self.ids)
        self.row = np.arange(len(rows)).repeat(self.counts)  # of each token
        self.ends = self.counts.cumsum() - 1  # the last token of each row
        self.within = np.arange(self.real) + (self.lengths - 1 - self.ends)[self.row]  # its place in what is stored
        self.positions = self.within + starts[self.row]


class _Parts:
    """Collects parts and, for every token, the numbers of its partial results: those of its own pages come first."""

    def __init__(self, planner: Planner, flat: _Flat, narrow: int) -> None:
        self.parts: list[Part] = []
        self._results = 0
        self._planner, self._pages, self._flat, self._narrow = planner, planner.pages, flat, narrow
        self._own = np.ones(len(flat.rows), np.int64)  # how many results the tokens of each row have of their own pages
        self._own[:narrow] = flat.page_counts[:narrow]
        shared = [len(row.stored.prefix.pages) if row.stored.prefix else 0 for row in flat.rows]
        self.table = np.full((flat.real, int((self._own + shared).max())), -1)

    def add_pages(self) -> None:
        """A part of all pages of the rows of one token, page by page."""
        flat, count = self._flat, self._narrow
        if count:
            sizes = flat.page_counts[:count]
            owner = np.arange(count).repeat(sizes)
            place = self._add_pages(
                self._pages.own, flat.pages[: len(owner)], sizes, flat.lengths[:count], owner[:, None]
            )
            self.table[owner, np.arange(len(owner)) - flat.page_starts[owner]] = place

    def add_rows(self, begin: int, end: int) -> None:
        """Parts of the rows [begin, end), which come by width and number of pages: those that are alike together."""
        counts, pages = self._flat.counts, self._flat.page_counts
        while begin < end:
            stop = begin + 1
            while (
                stop < end and counts[stop] <= 2 * counts[begin] and pages[begin] / 2 <= pages[stop] <= 2 * pages[begin]
            ):
                stop += 1
            self._add_rows(begin, stop)
            begin = stop

    def add_prefixes(self, end: int) -> None:
        """A part of the pages of all prefixes of the rows [0, end)."""
        flat = self._flat
        users: dict[int, list[int]] = {}  # tokens
        prefixes: dict[int, Prefix] = {}
        for row, count, last in zip(flat.rows[:end], flat.counts.tolist(), flat.ends.tolist(), strict=False):
            if prefix := row.stored.prefix:
                prefixes[id(prefix)] = prefix
                users.setdefault(id(prefix), []).extend(range(last + 1 - count, last + 1))
        if not users:
            return
        before, width = self._results, max(map(len, users.values()))
        query = np.array([tokens + tokens[:1] * (width - len(tokens)) for tokens in users.values()])
        sizes = np.array([len(prefix.pages) for prefix in prefixes.values()])
        pages = np.fromiter(chain.from_iterable(prefix.pages for prefix in prefixes.values()), np.int64)
        lengths = np.array([len(prefix.tokens) for prefix in prefixes.values()])
        place = self._add_pages(self._pages.prefixes, pages, sizes, lengths, query.repeat(sizes, axis=0))
        for tokens, places in zip(users.values(), np.split(place, sizes.cumsum()[:-1]), strict=True):
            columns = self._own[flat.row[tokens]][:, None] + np.arange(len(places))
            numbers = before + places * width + np.arange(len(tokens))[:, None]
            self.table[np.array(tokens)[:, None], columns] = numbers

    def _add_pages(self, pool: Pool, pages: _Numbers, sizes: _Numbers, lengths: _Numbers, query: _Numbers) -> _Numbers:
        """A part of `pages`, which belong to lists of `sizes` with `lengths` tokens. Returns where in it each page is.

        Each page is seen by its row of `query` [pages, queries].
        """
        filled = np.full(len(pages), pool.length)
        filled[sizes.cumsum() - 1] = (lengths - 1) % pool.length + 1
        low, high = int(pages.min()), int(pages.max()) + 1
        where: slice | Tensor = slice(low, high)
        place = pages - low
        if len(pages) >= DENSE * (high - low):
            spread, spread_filled = np.zeros((high - low, query.shape[1]), np.int64), np.zeros(high - low, np.int64)
            spread[place], spread_filled[place] = query, filled
            query, filled = spread, spread_filled
        else:
            where, place = self._planner.put(pages), np.arange(len(pages))
        # Conversations grow, and the plan with them; prefixes are read as far as the longest goes.
        length = pool.length if pool is self._pages.own else -(-int(filled.max()) // 16) * 16
        self._add(
            Part(
                pool,
                where,
                self._planner.put(query.ravel()),
                self._mask(np.arange(length) >= filled[:, None, None, None]),
            )
        )
        return place

    def _add_rows(self, begin: int, end: int) -> None:
        """A part of the rows [begin, end)."""
        flat = self._flat
        counts, pool = flat.counts[begin:end], self._pages.pool(flat.rows[begin].stored)
        pages = np.zeros((end - begin, flat.page_counts[begin:end].max()), np.int64)
        for i, row in enumerate(flat.rows[begin:end]):
            pages[i, : len(row.stored.pages)] = row.stored.pages
        column = np.arange(counts.max())
        first = flat.ends[begin:end] + 1 - counts
        real = column < counts[:, None]
        query = np.where(real, first[:, None] + column, first[:, None])
        place = np.where(real, (flat.lengths[begin:end] - counts)[:, None] + column, 0)  # among the row's own tokens
        self.table[query[real], 0] = self._results + real.ravel().nonzero()[0]
        hidden = np.arange(pages.shape[1] * pool.length) > place[:, None, :, None]
        self._add(Part(pool, self._planner.put(pages), self._planner.put(query.ravel()), self._mask(hidden)))

    def _add(self, part: Part) -> None:
        self.parts.append(part)
        self._results += len(part.query)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._planner.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        return mask.to(self._planner.device)
