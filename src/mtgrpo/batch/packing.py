"""Forest -> micro-batches under a token budget, spread over ranks.

Only what is needed is computed: the parents of the entries' nodes (their hidden states predict the entries) and their
ancestors. A tree is computed whole where the budget allows; a larger one is cut into pieces that repeat ancestors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from mtgrpo.batch.forest import Batch, Forest, Kept
from mtgrpo.errors import ConfigError


@dataclass(frozen=True)
class Cost:
    """The cost of computing, in FLOPs up to a common factor."""

    token: float  # per computed token
    pair: float  # per pair of a token and one it attends to, itself included
    read: float  # per hidden state that the head runs at


class Layout(Enum):
    """How a micro-batch is laid out."""

    forest = "forest"  # one row of nodes in depth-first order, which needs forest attention
    padded = "padded"  # one right-padded row per leaf, for any causal attention; shared prefixes are repeated


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and what is read from its hidden states. May be empty."""

    ids: Tensor  # [rows, width] int64; layout forest: one row, the nodes; padded: 0 beyond the end of a row
    position: Tensor  # [rows, width] int64
    forest: Forest | None  # the nodes; None = padded rows, causal
    parent: Tensor  # [targets] int64, row * width + column of the hidden state that predicts each target
    token: Tensor  # [targets] int64, the token that is predicted
    entries: Tensor  # [n] int64, the entries of the batch that are read here
    target: Tensor  # [n] int64, the target of each entry; entries of the same node that kept the same set share one
    cost: float
    kept: Kept | None = None  # [targets], what top-k, top-p or min-p kept; None = all


@dataclass(frozen=True)
class Packing:
    """The micro-batches of one rank, as many as any other has; some are empty where there is too little to share out.

    The counts are those of all ranks together.
    """

    micro_batches: list[MicroBatch]
    distinct: int  # nodes that have to be computed
    computed: int  # tokens in all micro-batches, repeated ancestors and padding included


def pack(
    batch: Batch,
    entries: Tensor,
    token_budget: int,
    cost: Cost,
    layout: Layout = Layout.forest,
    ranks: int = 1,
) -> list[Packing]:
    """Cover `entries` [n] int64 with micro-batches of at most `token_budget` tokens, each entry read exactly once.

    Returns what each rank computes.

    Raises ConfigError when a single path is longer than the budget.
    """
    if len(entries) == 0:
        return [Packing([], distinct=0, computed=0) for _ in range(ranks)]
    needed = _Needed.of(batch, entries)
    longest = int(needed.forest.depth.max()) + 1
    if longest > token_budget:
        raise ConfigError(
            f"a context of {longest} tokens does not fit batch.token_budget={token_budget}; "
            f"set it to at least {longest}"
        )
    if layout is Layout.forest:
        laid_out = _as_forests(needed, token_budget, cost, ranks)
    else:
        laid_out = _as_padded_rows(needed, token_budget, ranks)
    found = needed.read_from(laid_out, cost)
    by_rank = _spread([micro.cost for micro in found], [1] * len(found), ranks, len(found) // ranks)
    assert by_rank is not None, "their number is a multiple of ranks"
    computed = sum(micro.ids.numel() for micro in found)
    return [Packing([found[i] for i in members], len(needed.forest), computed) for members in by_rank]


@dataclass(frozen=True)
class _LaidOut:
    """The inputs of the micro-batches, and where each node is in them."""

    inputs: list[tuple[Tensor, Tensor, Forest | None]]  # ids, position and forest of each micro-batch
    home: Tensor  # [nodes], the micro-batch where the hidden state of each node is read
    index: Tensor  # [nodes], row * width + column there


@dataclass(frozen=True)
class _Needed:
    """The nodes that have to be computed, and what is read from them.

    A target is a sampled node with the set of tokens that was kept there; entries that agree in both share it.
    """

    forest: Forest
    parent: Tensor  # [targets], node of `forest`
    token: Tensor  # [targets]
    entries: Tensor  # [n]
    target: Tensor  # [n]
    kept: Kept | None  # [targets]

    @classmethod
    def of(cls, batch: Batch, entries: Tensor) -> _Needed:
        wanted, kept = batch.node[entries], batch.kept
        if kept is not None:
            wanted = wanted * kept.sets + kept.number[entries]
        sampled, target = wanted.unique(return_inverse=True)
        if kept is not None:
            kept, sampled = replace(kept, number=sampled % kept.sets), sampled // kept.sets
        parent = batch.forest.parent[sampled]
        nodes = batch.forest.with_ancestors(parent)
        return cls(
            forest=batch.forest.subset(nodes),
            parent=torch.searchsorted(nodes, parent),
            token=batch.forest.token[sampled],
            entries=entries,
            target=target,
            kept=kept,
        )

    def read_from(self, laid_out: _LaidOut, cost: Cost) -> list[MicroBatch]:
        """The micro-batches with the targets and entries that are read in each."""
        home = laid_out.home[self.parent]
        targets = _by_label(home, len(laid_out.inputs))
        places = _by_label(home[self.target], len(laid_out.inputs))
        micro_batches: list[MicroBatch] = []
        for (ids, position, forest), mine, place in zip(laid_out.inputs, targets, places, strict=True):
            pairs, reads = int((position + 1).sum()), len(self.parent[mine].unique())
            micro_batches.append(
                MicroBatch(
                    ids=ids,
                    position=position,
                    forest=forest,
                    parent=laid_out.index[self.parent[mine]],
                    token=self.token[mine],
                    entries=self.entries[place],
                    target=torch.searchsorted(mine, self.target[place]),
                    cost=cost.token * ids.numel() + cost.pair * pairs + cost.read * reads,
                    kept=None if self.kept is None else replace(self.kept, number=self.kept.number[mine]),
                )
            )
        return micro_batches


def _as_forests(needed: _Needed, token_budget: int, cost: Cost, ranks: int) -> _LaidOut:
    forest = needed.forest
    pieces = _Cutter(needed, token_budget, cost).pieces()
    costs, sizes = [piece.cost for piece in pieces], [piece.size for piece in pieces]
    fewest = max(-(-sum(sizes) // token_budget), sum(2 * size > token_budget for size in sizes))
    count = ranks * -(-fewest // ranks)
    while (groups := _spread(costs, sizes, count, token_budget)) is None:
        count += ranks
    home, index = torch.empty(2, len(forest), dtype=torch.long)
    inputs: list[tuple[Tensor, Tensor, Forest | None]] = []
    none = torch.empty(0, dtype=torch.long)  # so that there is something to join in an empty micro-batch
    for number, members in enumerate(groups):
        nodes = torch.cat([none, *(pieces[i].nodes(forest) for i in members)]).unique()
        own = torch.cat([none, *(torch.arange(pieces[i].start, pieces[i].stop) for i in members)])
        home[own] = number
        index[own] = torch.searchsorted(nodes, own)
        local = forest.subset(nodes)
        inputs.append((local.token[None], local.depth[None], local))
    return _LaidOut(inputs, home, index)


def _as_padded_rows(needed: _Needed, token_budget: int, ranks: int) -> _LaidOut:
    forest = needed.forest
    paths = sorted(forest.leaf_paths(), key=len, reverse=True)
    groups: list[list[Tensor]] = []
    start = 0
    while start < len(paths):
        stop = start + token_budget // len(paths[start])
        groups.append(paths[start:stop])
        start = stop
    while len(groups) % ranks:
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        half = -(-len(groups[largest]) // 2)  # of a single row: the row, and an empty micro-batch
        groups[largest : largest + 1] = [groups[largest][:half], groups[largest][half:]]
    home, index = torch.empty(2, len(forest), dtype=torch.long)
    inputs: list[tuple[Tensor, Tensor, Forest | None]] = []
    for number in reversed(range(len(groups))):  # backwards, so that the first row that holds a node is its home
        group = groups[number]
        width = len(group[0]) if group else 0
        ids = torch.zeros(len(group), width, dtype=torch.long)
        for row in reversed(range(len(group))):
            path = group[row]
            ids[row, : len(path)] = forest.token[path]
            home[path] = number
            index[path] = row * width + torch.arange(len(path))
        inputs.append((ids, torch.arange(width).expand(len(group), width), None))
    return _LaidOut(inputs[::-1], home, index)


@dataclass(frozen=True)
class _Piece:
    """A tree, or the paths to some neighbouring leaves of one.

    Every node is in the range of exactly one piece; the ancestors of the range are computed once more.
    """

    root: int
    start: int
    stop: int
    size: int  # tokens computed
    cost: float

    def nodes(self, forest: Forest) -> Tensor:
        """The range and its ancestors: the nodes before its stop whose subtrees reach beyond its start."""
        return self.root + (forest.subtree_end[self.root : self.stop] > self.start).nonzero()[:, 0]


class _Cutter:
    """Cuts the trees that are larger than the budget. Cuts fall behind leaves, so that no path is in two pieces."""

    def __init__(self, needed: _Needed, token_budget: int, cost: Cost) -> None:
        depth, ends = needed.forest.depth, needed.forest.leaf_ends()
        of_node = cost.token + cost.pair * (depth.double() + 1)
        of_node[needed.parent.unique()] += cost.read
        before = torch.cat([torch.zeros(1), of_node.cumsum(0)])  # [k] = cost of all nodes before node k
        self._budget = token_budget
        self._cost = cost
        self._roots: list[int] = (depth == 0).nonzero()[:, 0].tolist()
        self._depth: list[int] = depth.tolist()
        self._before: list[float] = before.tolist()
        self._ends: list[int] = ends.tolist()  # where a cut may fall
        self._before_ends: list[float] = before[ends].tolist()

    def pieces(self) -> list[_Piece]:
        """All trees, depth-first; those beyond the budget in as few pieces as possible, of similar cost."""
        pieces: list[_Piece] = []
        for root, stop in zip(self._roots, [*self._roots[1:], len(self._depth)], strict=True):
            tree = self._piece(root, root, stop)
            pieces += [tree] if tree.size <= self._budget else self._balanced(tree)
        return pieces

    def _balanced(self, tree: _Piece) -> list[_Piece]:
        """Bisection on the cost of the costliest piece, to 1 %; the number of pieces is what the budget forces."""
        best = self._cut(tree, cap=tree.cost)
        count, low, high = len(best), tree.cost / len(best), _costliest(best)
        while high - low > 0.01 * high:
            cap = (low + high) / 2
            cut = self._cut(tree, cap)
            if len(cut) <= count:
                best, high = min(best, cut, key=_costliest), cap
            else:
                low = cap
        return best

    def _cut(self, tree: _Piece, cap: float) -> list[_Piece]:
        """Each piece takes as many leaves as budget and cap allow, but at least one."""
        pieces: list[_Piece] = []
        start = tree.start
        while start < tree.stop:
            above = self._depth[start]
            fits = bisect_right(self._ends, start + self._budget - above)
            cheap = bisect_right(self._before_ends, self._before[start] + cap - self._cost_above(start))
            least = bisect_right(self._ends, start) + 1
            stop = min(self._ends[max(least, min(fits, cheap)) - 1], tree.stop)
            pieces.append(self._piece(tree.root, start, stop))
            start = stop
        return pieces

    def _piece(self, root: int, start: int, stop: int) -> _Piece:
        cost = self._before[stop] - self._before[start] + self._cost_above(start)
        return _Piece(root, start, stop, size=self._depth[start] + stop - start, cost=cost)

    def _cost_above(self, node: int) -> float:
        """The cost of computing the ancestors of a node once more; the head does not run there again."""
        above = self._depth[node]
        return self._cost.token * above + self._cost.pair * above * (above + 1) / 2


def _costliest(pieces: list[_Piece]) -> float:
    return max(piece.cost for piece in pieces)


def _spread(costs: Sequence[float], sizes: Sequence[int], bins: int, capacity: int) -> list[list[int]] | None:
    """Longest processing time first: from the costliest on, each goes to the cheapest bin that has room for its size.

    Returns the members of each bin; None when no bin has room for one of them.
    """
    load, room = np.zeros(bins), np.full(bins, capacity)
    members: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        best = int(np.where(room >= sizes[i], load, np.inf).argmin())
        if room[best] < sizes[i]:
            return None
        members[best].append(i)
        load[best] += costs[i]
        room[best] -= sizes[i]
    return members


def _by_label(label: Tensor, count: int) -> list[Tensor]:
    """The places of each label 0 .. count-1 in `label`, in order."""
    return list(label.argsort(stable=True).split(label.bincount(minlength=count).tolist()))
