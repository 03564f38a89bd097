"""Forest -> micro-batches under a token budget, spread over ranks.

Only what is needed is computed: the parents of the entries' nodes (their hidden states predict the entries) and their
ancestors. A tree is computed whole where the budget allows. Of a larger one with a short trunk, such as a system prompt
that all conversations share, each micro-batch has the trunk and some branches. Any other is walked depth first: a chain
of nodes where it must be cut, and below it micro-batches that get the chain's keys and values; see `visits`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mtgrpo.batch.forest import Batch, Forest, Kept
from mtgrpo.errors import ConfigError

MAX_TRUNK_SHARE = 1 / 32  # of the budget; a shorter trunk is computed in each micro-batch with a part of its tree
NONE = torch.empty(0, dtype=torch.long)


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
    parent: Tensor = NONE  # [targets] int64, row * width + column of the hidden state that predicts each target
    token: Tensor = NONE  # [targets] int64, the token that is predicted
    entries: Tensor = NONE  # [n] int64, the entries of the batch that are read here
    target: Tensor = NONE  # [n] int64, the target of each entry; those of one node that kept the same set share one
    cost: float = 0.0
    kept: Kept | None = None  # [targets], what top-k, top-p or min-p kept; None = all
    given: int = 0  # the first nodes, a path: earlier micro-batches have computed their keys and values
    opens: bool = False  # the other nodes are a chain below that path, which later micro-batches are given too
    held: bool = True  # such a chain's activations are within the budget with those below; else it is computed again

    @property
    def computed(self) -> int:
        """Its own tokens, which are not given."""
        return self.ids.numel() - self.given

    def unread(self, cost: Cost) -> MicroBatch:
        """The same nodes with nothing to be read from them."""
        kept = None if self.kept is None else replace(self.kept, number=NONE)
        rest = self.cost - cost.read * len(self.parent.unique())
        return replace(self, parent=NONE, token=NONE, entries=NONE, target=NONE, kept=kept, cost=rest)


def visits(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Each micro-batch as it comes (True), and each that opens a chain once more (False), after all that continue it.

    A gradient is taken at the last visit: that of a chain's keys and values is then complete.
    """
    opened: list[MicroBatch] = []
    for micro in micro_batches:
        while sum(chain.computed for chain in opened) > micro.given:
            yield opened.pop(), False
        yield micro, True
        if micro.opens:
            opened.append(micro)
    for chain in reversed(opened):
        yield chain, False


@dataclass(frozen=True)
class Packing:
    """The micro-batches of one rank, as many as any other has; some are empty where there is too little to share out.

    The counts are those of all ranks together.
    """

    micro_batches: list[MicroBatch]
    distinct: int  # nodes that have to be computed
    computed: int  # tokens in all micro-batches: padding, and what is computed again, included


def pack(
    batch: Batch,
    entries: Tensor,
    token_budget: int,
    cost: Cost,
    layout: Layout = Layout.forest,
    ranks: int = 1,
) -> list[Packing]:
    """Cover `entries` [n] int64 with micro-batches of at most `token_budget` tokens, each entry read exactly once.

    Returns what each rank computes. Raises ConfigError when a padded row is longer than the budget.
    """
    if len(entries) == 0:
        return [Packing([], distinct=0, computed=0) for _ in range(ranks)]
    # A target is a sampled node with the set of tokens that was kept there; entries that agree in both share it.
    sampled, kept = batch.node[entries], batch.kept
    if kept is not None:
        sampled = sampled * kept.sets + kept.number[entries]
    sampled, target = sampled.unique(return_inverse=True)
    if kept is not None:
        kept, sampled = replace(kept, number=sampled % kept.sets), sampled // kept.sets
    parent, token = batch.forest.parent[sampled], batch.forest.token[sampled]
    needed = batch.forest.with_ancestors(parent)
    forest, parent = batch.forest.subset(needed), torch.searchsorted(needed, parent)

    if layout is Layout.forest:
        node_costs = cost.token + cost.pair * (forest.depth.double() + 1)
        node_costs[parent.unique()] += cost.read
        inputs, home, index = _as_forests(forest, node_costs, token_budget, ranks)
    else:
        inputs, home, index = _as_padded_rows(forest, token_budget, ranks)
    home = home[parent]
    targets_read, entries_read = _by_label(home, len(inputs)), _by_label(home[target], len(inputs))
    micro_batches: list[MicroBatch] = []
    for micro, targets, places in zip(inputs, targets_read, entries_read, strict=True):
        pairs, reads = int((micro.position.flatten()[micro.given :] + 1).sum()), len(parent[targets].unique())
        micro_batches.append(
            replace(
                micro,
                parent=index[parent[targets]],
                token=token[targets],
                entries=entries[places],
                target=torch.searchsorted(targets, target[places]),
                cost=cost.token * micro.computed + cost.pair * pairs + cost.read * reads,
                kept=None if kept is None else replace(kept, number=kept.number[targets]),
            )
        )
    by_rank = _share_out(micro_batches, cost, ranks)
    computed = sum(micro.computed * (1 if micro.held else 2) for of_rank in by_rank for micro in of_rank)
    return [Packing(of_rank, len(forest), computed) for of_rank in by_rank]


def _share_out(micro_batches: list[MicroBatch], cost: Cost, ranks: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, of similar cost and equally many.

    A walk that several ranks share is cut between two micro-batches, and the open chains are computed by both.
    """
    units: list[list[MicroBatch]] = []
    share = max(sum(micro.cost for micro in micro_batches) / ranks, 1e-9)
    starts = [i for i, micro in enumerate(micro_batches) if not micro.given]  # of each walk, where nothing is given
    for start, stop in pairwise([*starts, len(micro_batches)]):
        walk = micro_batches[start:stop]
        before = [0.0, *accumulate(micro.cost for micro in walk)]
        for number in range(ranks):
            part = [i for i in range(len(walk)) if min(int(before[i] / share), ranks - 1) == number]
            if part:
                units.append([*(chain.unread(cost) for chain in open_before(walk, part[0])), *(walk[i] for i in part)])
    costs, sizes = [sum(micro.cost for micro in unit) for unit in units], [len(unit) for unit in units]
    capacity = -(-sum(sizes) // ranks)
    while (by_rank := _spread(costs, sizes, ranks, capacity)) is None:
        capacity += 1
    shared = [[micro for i in members for micro in units[i]] for members in by_rank]
    longest = max(map(len, shared))
    nothing = _empty(micro_batches[0])
    return [[*of_rank, *[nothing] * (longest - len(of_rank))] for of_rank in shared]


def open_before(walk: list[MicroBatch], place: int) -> list[MicroBatch]:
    """The chains that the micro-batch at `place` is given."""
    opened: list[MicroBatch] = []
    for micro, entered in visits(walk[: place + 1]):
        if micro is walk[place]:
            break
        if not entered:
            opened.pop()
        elif micro.opens:
            opened.append(micro)
    return opened


def _empty(like: MicroBatch) -> MicroBatch:
    """A micro-batch with nothing to compute, laid out like another."""
    forest = None if like.forest is None else like.forest.subset(NONE)
    return MicroBatch(NONE[None], NONE[None], forest, kept=like.unread(Cost(0, 0, 0)).kept)


_Places = tuple[list[MicroBatch], Tensor, Tensor]
"""Micro-batches in which nothing is read yet; [nodes] where each hidden state is read: micro-batch, row*width+column"""


def _as_forests(forest: Forest, node_costs: Tensor, token_budget: int, ranks: int) -> _Places:
    roots = [*(forest.depth == 0).nonzero()[:, 0].tolist(), len(forest)]
    trees = list(pairwise(roots))
    small = [(start, stop) for start, stop in trees if stop - start <= token_budget]
    groups = _group(small, node_costs, token_budget, ranks)
    home, index = torch.empty(2, len(forest), dtype=torch.long)
    inputs: list[MicroBatch] = []

    def add(path: Tensor, nodes: Tensor, opens: bool = False, held: bool = True) -> None:
        home[nodes], index[nodes] = len(inputs), len(path) + torch.arange(len(nodes))
        local = forest.subset(torch.cat([path, nodes]))
        ids, position = local.token[None], local.depth[None]
        inputs.append(MicroBatch(ids, position, local, given=len(path), opens=opens, held=held))

    for members in groups:
        add(NONE, torch.cat([NONE, *(torch.arange(*small[i]) for i in sorted(members))]))
    for root, stop in (tree for tree in trees if tree[1] - tree[0] > token_budget):
        trunk, branches = _branches(forest, root, stop)
        room = token_budget - len(trunk)
        if len(trunk) <= MAX_TRUNK_SHARE * token_budget and all(end - start <= room for start, end in branches):
            for members in _group(branches, node_costs, room, ranks):
                add(NONE, torch.cat([trunk, *(torch.arange(*branches[i]) for i in sorted(members))]))
            continue
        for start, end, opens, held in _parts(forest, root, stop, token_budget):
            path = root + (forest.subtree_end[root:start] > start).nonzero()[:, 0]
            add(path, torch.arange(start, end), opens, held)
    return inputs, home, index


def _branches(forest: Forest, root: int, stop: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """The nodes of a tree up to the first without exactly one child, and where what is below begins and ends."""
    first = root
    while first + 1 < stop and forest.subtree_end[first + 1] == stop:
        first += 1
    starts = (forest.depth[first + 1 : stop] == forest.depth[first] + 1).nonzero()[:, 0] + first + 1
    return torch.arange(root, first + 1), list(pairwise([*starts.tolist(), stop]))


def _group(trees: list[tuple[int, int]], costs: Tensor, token_budget: int, ranks: int) -> list[list[int]]:
    """Trees that are computed together: as few groups as the budget allows, as many for each rank, of similar cost."""
    sizes = [stop - start for start, stop in trees]
    of_tree = [float(costs[start:stop].sum()) for start, stop in trees]
    fewest = max(-(-sum(sizes) // token_budget), sum(2 * size > token_budget for size in sizes))
    count = ranks * -(-fewest // ranks)
    while (groups := _spread(of_tree, sizes, count, token_budget)) is None:
        count += ranks
    return groups


def _parts(forest: Forest, root: int, stop: int, token_budget: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Cut the tree [root, stop), which the budget does not hold, into micro-batches: start, stop, opens and held.

    The walk is depth first. The chains above the node `start` hold a part of the budget, and the rest is the room. If
    the next subtree fits into the room, as many subtrees as fit are one micro-batch. If it does not fit, the nodes up
    to its first branching, or as many of them as fit, are a chain, and the walk goes on below that chain.

    A chain is held only if the longest path below it fits too, so that the walk never gets stuck. Each held chain
    needs a copy of the keys and values of the path above it. The copies for chains below one another together may have
    the length of the tree's longest path; a chain that exceeds this length is not held.
    """
    continues = (forest.depth[1:] == forest.depth[:-1] + 1) & (forest.subtree_end[1:] == forest.subtree_end[:-1])
    branchings: list[int] = [*((~continues).nonzero()[:, 0] + 1).tolist(), len(forest)]  # one past each unbranched run
    ends: list[int] = forest.subtree_end.tolist()
    longest = int(forest.depth[root:stop].max()) + 1
    chains = [(stop, 0, 0)]  # that are open: the end of what is below, tokens held, tokens of the path copied
    start = root
    while start < stop:
        while chains[-1][0] <= start:
            chains.pop()
        room = token_budget - sum(held for _, held, _ in chains)
        end = start
        while end < chains[-1][0] and ends[end] - start <= room:
            end = ends[end]
        if end > start:
            yield start, end, False, True
        else:
            path = int(forest.depth[start])
            copied = path + sum(copied for *_, copied in chains)
            held = int(forest.depth[start : ends[start]].max()) - path < room and copied <= longest
            end = min(branchings[bisect_right(branchings, start)], start + room)
            chains.append((ends[start], end - start, path) if held else (ends[start], 0, 0))
            yield start, end, True, held
        start = end


def _as_padded_rows(forest: Forest, token_budget: int, ranks: int) -> _Places:
    paths = sorted(forest.leaf_paths(), key=len, reverse=True)
    if len(paths[0]) > token_budget:
        raise ConfigError(
            f"a context of {len(paths[0])} tokens is a padded row longer than batch.token_budget={token_budget}; "
            f"set it to at least {len(paths[0])}"
        )
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
    inputs: list[MicroBatch] = []
    for number in reversed(range(len(groups))):  # backwards, so that the first row that holds a node is its home
        group = groups[number]
        width = len(group[0]) if group else 0
        ids = torch.zeros(len(group), width, dtype=torch.long)
        for row in reversed(range(len(group))):
            path = group[row]
            ids[row, : len(path)] = forest.token[path]
            home[path] = number
            index[path] = row * width + torch.arange(len(path))
        inputs.append(MicroBatch(ids, torch.arange(width).expand(len(group), width), None))
    return inputs[::-1], home, index


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
