"""Keys and values of all conversations, in pages, and attention over them.

A page holds `PAGE` consecutive tokens of one conversation, or of a prefix that several conversations share and that is
stored, and read, once for all of them. Conversations fill the pool from its start and prefixes from its end, so that
what is read in a step mostly lies together.

A conversation that decodes one token attends to each of its pages by itself; the parts are merged by log-sum-exp, which
is exact. So nothing is padded to the longest conversation. Several new tokens of one conversation attend at once to a
copy of all its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.model.load import computes_in

PAGE = 64  # tokens
FEW = 2  # queries of a page for which plain products are faster than the flash kernel on a CPU
GRID = 8  # the number of tokens in a step is rounded up to a multiple: new shapes cost the matrix products time
DENSE = 0.5  # a range of pages is read in place, without copying, if this share of it is wanted
FAR = 2**40  # the position of a place that holds no token: nobody sees it

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_Numbers = NDArray[np.int64]


@dataclass(eq=False)
class Stored:
    """Consecutive tokens whose keys and values lie in pages, after those of a prefix if there is one."""

    tokens: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    prefix: Prefix | None = None

    @property
    def start(self) -> int:
        """The position of the first token."""
        return len(self.prefix.wanted) if self.prefix else 0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass(eq=False)
class Prefix(Stored):
    """What several conversations begin with."""

    wanted: list[int] = field(default_factory=list[int])  # all its tokens; `tokens` are those that are there yet
    users: int = 0


@dataclass(frozen=True)
class Row:
    """New tokens that follow what is stored; `Pages.reserve` has made room for them."""

    stored: Stored
    tokens: Sequence[int]


@dataclass(frozen=True)
class _Part:
    """Pages of which each is seen by the same number of queries."""

    pages: slice | Tensor
    query: Tensor  # [pages, queries] flat numbers of tokens
    mask: Tensor  # [pages, 1, 1, PAGE], 0 or -inf


@dataclass(frozen=True)
class _Wide:
    """Rows of several new tokens, padded to one width."""

    query: Tensor  # [rows, width] flat numbers of tokens
    pages: Tensor  # [rows, pages of each]
    mask: Tensor  # [rows, 1, width, pages of each * PAGE], 0 or -inf
    real: Tensor  # numbers of the queries that are no padding, in [rows * width]


@dataclass(frozen=True)
class Plan:
    """What one forward pass computes: new tokens in one flat sequence, rows of one token first."""

    count: int  # of tokens; `ids` and `positions` are a little longer
    narrow: int  # of rows of one token
    ids: Tensor  # int64
    positions: Tensor  # int64
    last: Tensor  # [rows] flat number of each row's last token
    write: Tensor  # [tokens * heads] where keys and values go
    parts: list[_Part]
    table: Tensor  # [rows of one token, parts of each] numbers of partial results
    absent: Tensor | None  # the same shape: true where a row has fewer parts; None = nowhere
    wide: list[_Wide]
    stored: list[Stored]  # of the rows, if each has one token
    ends: Tensor  # of these, where the last page is in the first part
    filled: Tensor  # of these, how many tokens the last page holds


class Pages:
    """A pool of `count` pages for `model`. Memory is taken when a page is first used (on a GPU at once)."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        layers, self.heads, self.size = _shape(model)
        self._device, dtype = model.device, computes_in(model)
        shape = (count, self.heads, PAGE, self.size)
        self._keys = [_zeros(shape, dtype, self._device) for _ in range(layers)]
        self._values = [_zeros(shape, dtype, self._device) for _ in range(layers)]
        self.free = self.count = count
        self._returned: tuple[list[int], list[int]] = ([], [])  # heaps: of conversations, of prefixes (negated)
        self._frontier = [0, count - 1]  # the next page never used, from either end
        self._plan: Plan | None = None  # of the last step

    def missing(self, stored: Stored, tokens: int) -> int:
        """How many more pages `tokens` more tokens take."""
        return -(-(len(stored.tokens) + tokens) // PAGE) - len(stored.pages)

    def reserve(self, stored: Stored, tokens: int, shared: bool) -> None:
        """Make room for `tokens` more tokens; there must be enough free pages. `shared`: it is a prefix."""
        for _ in range(self.missing(stored, tokens)):
            if self._returned[shared]:
                page = abs(heappop(self._returned[shared]))
            elif self._frontier[0] <= self._frontier[1]:
                page = self._frontier[shared]
                self._frontier[shared] += -1 if shared else 1
            else:  # the pages of one kind are used up; the other kind has some to give
                page = abs(heappop(self._returned[not shared]))
            self.free -= 1
            stored.pages.append(page)

    def cut(self, stored: Stored, count: int) -> None:
        """Keep the first `count` tokens of `stored` (its prefix not counted), and give back the other pages."""
        self._plan = None
        del stored.tokens[count:]
        keep = -(-count // PAGE)
        for page in stored.pages[keep:]:
            shared = page > self._frontier[1]
            heappush(self._returned[shared], -page if shared else page)
        self.free += len(stored.pages) - keep
        del stored.pages[keep:]

    def plan(self, rows: Sequence[Row]) -> Plan:
        """Lay out one forward pass; from here on the new tokens count as stored."""
        if self._plan and self._goes_on(self._plan, rows):
            return self._advance(self._plan, rows)
        narrow = [row for row in rows if len(row.tokens) == 1]
        wide = sorted((row for row in rows if len(row.tokens) > 1), key=lambda row: len(row.tokens))
        place: dict[int, int] = {}
        ids: list[int] = []
        positions: list[_Numbers] = []
        write: list[_Numbers] = []
        for row in [*narrow, *wide]:
            stored, count = row.stored, len(row.tokens)
            new = np.arange(len(stored.tokens), len(stored.tokens) + count)
            positions.append(new + stored.start)
            write.append(np.array(stored.pages)[new // PAGE] * (self.heads * PAGE) + new % PAGE)
            ids.extend(row.tokens)
            stored.tokens.extend(row.tokens)
            place[id(row)] = len(ids) - 1
        at = np.concatenate(write)[:, None] + np.arange(self.heads) * PAGE
        count = len(ids)
        padding = -count % max(GRID, 2 ** (count.bit_length() - 3))
        positions.append(np.zeros(padding, np.int64))
        ids.extend([0] * padding)
        parts, table, ends = self._narrow([row.stored for row in narrow], padding)
        absent = table < 0
        self._plan = Plan(
            count=count,
            narrow=len(narrow),
            ids=self._put(np.array(ids)),
            positions=self._put(np.concatenate(positions)),
            last=self._put(np.array([place[id(row)] for row in rows])),
            write=self._put(at.ravel()),
            parts=parts,
            table=self._put(np.where(absent, table[:, :1], table)),
            absent=self._put(absent) if absent.any() else None,
            wide=self._wide([row.stored for row in wide], [len(row.tokens) for row in wide], len(narrow)),
            stored=[] if wide else [row.stored for row in rows],
            ends=self._put(ends),
            filled=self._put(np.array([(len(row.stored.tokens) - 1) % PAGE + 1 for row in narrow])),
        )
        return self._plan

    def _goes_on(self, plan: Plan, rows: Sequence[Row]) -> bool:
        """Whether `rows` are those of `plan`, one token further in the same pages."""
        return len(rows) == len(plan.stored) and all(
            row.stored is stored and len(row.tokens) == 1 and len(stored.tokens) % PAGE
            for row, stored in zip(rows, plan.stored, strict=True)
        )

    def _advance(self, plan: Plan, rows: Sequence[Row]) -> Plan:
        """The plan of the next step, in place."""
        for row in rows:
            row.stored.tokens.extend(row.tokens)
        plan.ids[: plan.count] = self._put(np.array([row.tokens[0] for row in rows]))
        plan.positions[: plan.count] += 1
        plan.write.add_(1)
        plan.parts[0].mask[plan.ends, 0, 0, plan.filled] = 0
        plan.filled.add_(1)
        return plan

    def _narrow(self, rows: Sequence[Stored], padding: int) -> tuple[list[_Part], _Numbers, _Numbers]:
        """For rows whose last token is new: parts, table (-1 = absent) and where in the first part each one's end is.

        Below them the table has rows for `padding`, which repeat the first.
        """
        if not rows:
            return [], np.empty((0, 1), np.int64), np.empty(0, np.int64)
        prefixes = list({id(row.prefix): row.prefix for row in rows if row.prefix}.values())
        number_of = {id(prefix): i for i, prefix in enumerate(prefixes)}
        users: list[list[int]] = [[] for _ in prefixes]
        for i, row in enumerate(rows):
            if row.prefix:
                users[number_of[id(row.prefix)]].append(i)

        counts = np.array([len(row.pages) for row in rows])
        owner = np.arange(len(rows)).repeat(counts)
        own, place = self._part(rows, owner[:, None])
        ends = place[counts.cumsum() - 1]
        width = max(len(row.pages) + (len(row.prefix.pages) if row.prefix else 0) for row in rows)
        table = np.full((len(rows), width), -1)
        table[owner, np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)] = place
        parts = [own]
        if prefixes:
            queries = max(map(len, users))
            padded = np.array([group + [group[0]] * (queries - len(group)) for group in users])
            sizes = np.array([len(prefix.pages) for prefix in prefixes])
            shared, place = self._part(prefixes, padded.repeat(sizes, axis=0))
            parts.append(shared)
            for group, places in zip(users, np.split(place, sizes.cumsum()[:-1]), strict=True):
                columns = counts[group][:, None] + np.arange(len(places))
                numbers = len(own.query) + places * queries + np.arange(len(group))[:, None]
                table[np.array(group)[:, None], columns] = numbers
        return parts, np.concatenate([table, table[:1].repeat(padding, axis=0)]), ends

    def _part(self, stored: Sequence[Stored], query: _Numbers) -> tuple[_Part, _Numbers]:
        """The pages of `stored`, each with its row of `query` [pages, queries]; and where each page is in the part."""
        pages = np.concatenate([np.array(s.pages) for s in stored])
        filled = np.full(len(pages), PAGE)
        ends = np.array([len(s.pages) for s in stored]).cumsum() - 1
        filled[ends] = (np.array([len(s.tokens) for s in stored]) - 1) % PAGE + 1
        low, high = int(pages.min()), int(pages.max()) + 1
        where: slice | Tensor = self._put(pages)
        number = np.arange(len(pages))
        if len(pages) >= DENSE * (high - low):
            where, number = slice(low, high), pages - low
            spread, spread_filled = np.zeros((high - low, query.shape[1]), np.int64), np.zeros(high - low, np.int64)
            spread[number], spread_filled[number] = query, filled
            query, filled = spread, spread_filled
        hidden = np.arange(PAGE) >= filled[:, None]
        return _Part(where, self._put(query), self._mask(hidden)[:, None, None]), number

    def _wide(self, rows: Sequence[Stored], widths: Sequence[int], first: int) -> list[_Wide]:
        """Batches of rows of similar width; the last `widths` tokens of each are new, in flat order from `first`."""
        found: list[_Wide] = []
        begin = 0
        while begin < len(rows):
            end = begin + 1
            while end < len(rows) and widths[end] <= 2 * widths[begin]:
                end += 1
            found.append(self._wide_batch(rows[begin:end], np.array(widths[begin:end]), first))
            first += sum(widths[begin:end])
            begin = end
        return found

    def _wide_batch(self, rows: Sequence[Stored], widths: _Numbers, first: int) -> _Wide:
        lists = [[*(row.prefix.pages if row.prefix else []), *row.pages] for row in rows]
        pages = np.zeros((len(rows), max(map(len, lists))), np.int64)
        position = np.full((len(rows), pages.shape[1] * PAGE), FAR)
        for i, (row, numbers) in enumerate(zip(rows, lists, strict=True)):
            pages[i, : len(numbers)] = numbers
            position[i, : row.start] = np.arange(row.start)
            own = (len(numbers) - len(row.pages)) * PAGE
            position[i, own : own + len(row.tokens)] = row.start + np.arange(len(row.tokens))
        column = np.arange(widths.max())
        real = column < widths[:, None]
        query = np.where(real, first + (widths.cumsum() - widths)[:, None] + column, first)
        ends = np.array([row.end for row in rows])[:, None]
        at = np.minimum(ends - widths[:, None] + column, ends - 1)
        hidden = self._mask(position[:, None, :] > at[:, :, None])
        return _Wide(self._put(query), self._put(pages), hidden[:, None], self._put(real.ravel().nonzero()[0]))

    def _put(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        return (
            torch.zeros(hidden.shape, dtype=self._keys[0].dtype)
            .masked_fill_(torch.from_numpy(hidden), -torch.inf)
            .to(self._device)
        )

    def attend(self, plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store the new keys and values [tokens, key heads, size]; attention of query [tokens, heads, size], alike."""
        keys, values = self._keys[layer], self._values[layer]
        keys.view(-1, self.size).index_copy_(0, plan.write, key[: plan.count].to(keys.dtype).reshape(-1, self.size))
        values.view(-1, self.size).index_copy_(0, plan.write, value[: plan.count].to(keys.dtype).reshape(-1, self.size))
        query = query.to(keys.dtype)
        merged = self._merged(plan, keys, values, query, scale) if plan.parts else query[:0]
        if not plan.wide:
            return merged
        wide = [self._batch(batch, keys, values, query, scale) for batch in plan.wide]
        return torch.cat([merged[: plan.narrow], *wide, query[plan.count :]])

    def _batch(self, wide: _Wide, keys: Tensor, values: Tensor, query: Tensor, scale: float) -> Tensor:
        """What the rows of one batch see, in flat order."""
        rows, width = wide.query.shape
        k, v = (t[wide.pages].transpose(1, 2).reshape(rows, self.heads, -1, self.size) for t in (keys, values))
        folded = _fold(query[wide.query], self.heads)
        output, _ = _attention(folded, k, v, wide.mask.repeat(1, 1, folded.shape[2] // width, 1), scale)
        return _unfold(output, width).flatten(0, 1)[wide.real]

    def _merged(self, plan: Plan, keys: Tensor, values: Tensor, query: Tensor, scale: float) -> Tensor:
        """What rows of one token gather from all their parts."""
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for part in plan.parts:
            folded = _fold(query[part.query], self.heads)
            output, log_sum = _attention(folded, keys[part.pages], values[part.pages], part.mask, scale)
            queries = part.query.shape[1]
            outputs.append(_unfold(output, queries).flatten(0, 1))
            sums.append(_unfold(log_sum[..., None], queries).flatten(0, 1))
        output, log_sum = torch.cat(outputs)[plan.table], torch.cat(sums)[plan.table]
        if plan.absent is not None:
            log_sum.masked_fill_(plan.absent[:, :, None, None], -torch.inf)
        return (output * log_sum.softmax(1).to(output.dtype)).sum(1)


def _fold(query: Tensor, groups: int) -> Tensor:
    """[n, queries, heads, size] -> [n, key heads, (heads of each) * queries, size]."""
    n, queries, heads, size = query.shape
    return query.view(n, queries, groups, heads // groups, size).permute(0, 2, 3, 1, 4).reshape(n, groups, -1, size)


def _unfold(output: Tensor, queries: int) -> Tensor:
    """[n, key heads, (heads of each) * queries, size] -> [n, queries, heads, size]."""
    n, _, _, size = output.shape
    return output.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).reshape(n, queries, -1, size)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All of one shape [n, heads, ..., size]: the output, and the log-sum-exp of the scores [n, heads, queries]."""
    if query.device.type == "cpu" and query.shape[2] > FEW:
        return _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(wide).mul_(scale).add_(mask)
    log_sum = scores.logsumexp(-1)
    return scores.sub_(log_sum[..., None]).exp_().to(value.dtype) @ value, log_sum


def page_bytes(model: PreTrainedModel) -> int:
    """What one page of all layers takes."""
    layers, heads, size = _shape(model)
    return 2 * layers * heads * PAGE * size * computes_in(model).itemsize


def _shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, heads and size of the keys, which are those of the values."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On CPU without touching the memory, which the system gives when it is first written (numpy asks for it so)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
