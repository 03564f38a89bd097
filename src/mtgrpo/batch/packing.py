"""Forest -> micro-batches under a token budget, for each rank those of its share (`batch/sharing.py`).

Only what is needed is computed: the parents of the entries' nodes (their hidden states predict the entries) and their
ancestors. A tree is computed whole where the budget allows. Of a larger one with a short trunk, such as a system prompt
that all conversations share, each micro-batch has the trunk and some branches. Any other is walked depth first: a chain
of nodes where it must be cut, and below it micro-batches that get the chain's keys and values; see `visits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from mtgrpo.batch.forest import Batch, Forest, Kept
from mtgrpo.batch.sharing import share_forest, spread
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

    def unread(self) -> MicroBatch:
        """The same nodes with nothing to be read from them; `cost` stays that of reading too."""
        kept = None if self.kept is None else replace(self.kept, number=NONE)
        return replace(self, parent=NONE, token=NONE, entries=NONE, target=NONE, kept=kept)


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
    batch: Batch, entries: Tensor, token_budget: int, cost: Cost, layout: Layout = Layout.forest, ranks: int = 1
) -> list[Packing]:
    """Cover `entries` [n] int64 with micro-batches of at most `token_budget` tokens, each entry read exactly once.

    Returns what each rank computes: what one process would for the entries that the rank reads. Ranks have similar
    costs. Raises ConfigError when a padded row is longer than the budget.
    """
    if len(entries) == 0:
        return [Packing([], distinct=0, computed=0) for _ in range(ranks)]
    parent = batch.forest.parent[batch.node[entries]]
    needed = batch.forest.with_ancestors(parent)
    reader = _share_out(batch.forest.subset(needed), torch.searchsorted(needed, parent), cost, layout, ranks)
    of_ranks = [_cover(batch, entries[reader == rank], token_budget, cost, layout) for rank in range(ranks)]
    computed = sum(micro.computed * (1 if micro.held else 2) for of_rank in of_ranks for micro in of_rank)
    longest = max(of_ranks, key=len)
    for of_rank in of_ranks:
        of_rank += [empty_like(longest[0])] * (len(longest) - len(of_rank))
    return [Packing(of_rank, len(needed), computed) for of_rank in of_ranks]


def _share_out(forest: Forest, parent: Tensor, cost: Cost, layout: Layout, ranks: int) -> Tensor:
    """The rank [entries] int64 that reads each entry, whose hidden state is that of the node `parent` [entries]."""
    if layout is Layout.forest:
        return share_forest(forest, *_costs(forest, parent, cost), ranks)[parent]
    after = torch.arange(1, len(forest) + 1)
    ends = after[forest.subtree_end == after]  # past each leaf, and with it the nodes whose first row is that leaf's
    length = forest.depth[ends - 1] + 1.0
    row_costs = cost.token * length + cost.pair * length * (length + 1) / 2
    shared = spread(row_costs.tolist(), [0] * len(ends), ranks, capacity=0)
    assert shared is not None, "no row takes room"
    rank_of = torch.empty(len(ends), dtype=torch.long)
    for rank, rows in enumerate(shared):
        rank_of[rows] = rank
    return rank_of[torch.searchsorted(ends, parent, right=True)]


def _costs(forest: Forest, parent: Tensor, cost: Cost) -> tuple[Tensor, Tensor]:
    """What it costs [nodes] fp64 to compute each node, and to read those that `parent` [n] names."""
    reading = torch.zeros(len(forest), dtype=torch.float64)
    reading[parent] = cost.read
    return cost.token + cost.pair * (forest.depth.double() + 1), reading


def _cover(batch: Batch, entries: Tensor, token_budget: int, cost: Cost, layout: Layout) -> list[MicroBatch]:
    """The micro-batches of one rank, which reads `entries` [n]; the costliest walk first."""
    if len(entries) == 0:
        return []
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
        computing, reading = _costs(forest, parent, cost)
        inputs, home, index = _as_forests(forest, computing + reading, token_budget)
    else:
        inputs, home, index = _as_padded_rows(forest, token_budget)
    home = home[parent]
    targets_read, entries_read = _by_label(home, len(inputs)), _by_label(home[target], len(inputs))
    walks: list[list[MicroBatch]] = []
    for micro, targets, places in zip(inputs, targets_read, entries_read, strict=True):
        pairs, reads = int((micro.position.flatten()[micro.given :] + 1).sum()), len(parent[targets].unique())
        if not micro.given:
            walks.append([])
        walks[-1].append(
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
    walks.sort(key=lambda walk: -sum(micro.cost for micro in walk))
    return [micro for walk in walks for micro in walk]


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


def empty_like(micro: MicroBatch) -> MicroBatch:
    """A micro-batch with nothing to compute, laid out like another."""
    forest = None if micro.forest is None else micro.forest.subset(NONE)
    return MicroBatch(NONE[None], NONE[None], forest, kept=micro.unread().kept)


_Places = tuple[list[MicroBatch], Tensor, Tensor]
"""Micro-batches in which nothing is read yet; [nodes] where each hidden state is read: micro-batch, row*width+column"""


def _as_forests(forest: Forest, node_costs: Tensor, token_budget: int) -> _Places:
    roots = [*(forest.depth == 0).nonzero()[:, 0].tolist(), len(forest)]
    trees = list(pairwise(roots))
    small = [(start, stop) for start, stop in trees if stop - start <= token_budget]
    groups = _group(small, node_costs, token_budget)
    home, index = torch.empty(2, len(forest), dtype=torch.long)
    inputs: list[MicroBatch] = []

    def add(path: Tensor, nodes: Tensor, opens: bool = False, held: bool = True) -> None:
        home[nodes], index[nodes] = len(inputs), len(path) + torch.arange(len(nodes))
        local = forest.subset(torch.cat([path, nodes]))
        ids, position = local.token[None], local.depth[None]
        inputs.append(MicroBatch(ids, position, local, given=len(path), opens=opens, held=held))

    for members in groups:
        add(NONE, torch.cat([NONE, *(torch.arange(*small[i]) for i in sorted(members))]))
    run_end = forest.run_end()
    for root, stop in (tree for tree in trees if tree[1] - tree[0] > token_budget):
        trunk, branches = torch.arange(root, int(run_end[root])), _branches(forest, int(run_end[root]), stop)
        room = token_budget - len(trunk)
        if len(trunk) <= MAX_TRUNK_SHARE * token_budget and all(end - start <= room for start, end in branches):
            for members in _group(branches, node_costs, room):
                add(NONE, torch.cat([trunk, *(torch.arange(*branches[i]) for i in sorted(members))]))
            continue
        for start, end, opens, held in _parts(forest, run_end.tolist(), root, stop, token_budget):
            path = root + (forest.subtree_end[root:start] > start).nonzero()[:, 0]
            add(path, torch.arange(start, end), opens, held)
    return inputs, home, index


def _branches(forest: Forest, trunk_end: int, stop: int) -> list[tuple[int, int]]:
    """Where the subtrees below the trunk of a tree, which ends at `stop`, begin and end."""
    starts = (forest.depth[trunk_end:stop] == forest.depth[trunk_end - 1] + 1).nonzero()[:, 0] + trunk_end
    return list(pairwise([*starts.tolist(), stop]))


def _group(trees: list[tuple[int, int]], costs: Tensor, token_budget: int) -> list[list[int]]:
    """Trees that are computed together: as few groups as the budget allows, of similar cost."""
    sizes = [stop - start for start, stop in trees]
    of_tree = [float(costs[start:stop].sum()) for start, stop in trees]
    count = max(-(-sum(sizes) // token_budget), sum(2 * size > token_budget for size in sizes))
    while (groups := spread(of_tree, sizes, count, token_budget)) is None:
        count += 1
    return groups


def _parts(
    forest: Forest, run_end: list[int], root: int, stop: int, token_budget: int
) -> Iterator[tuple[int, int, bool, bool]]:
    """Cut the tree [root, stop), which the budget does not hold, into micro-batches: start, stop, opens and held.

    The walk is depth first. The chains above the node `start` hold a part of the budget, and the rest is the room. If
    the next subtree fits into the room, as many subtrees as fit are one micro-batch. If it does not fit, the nodes up
    to its first branching, or as many of them as fit, are a chain, and the walk goes on below that chain.

    A chain is held only if the longest path below it fits too, so that the walk never gets stuck. Each held chain
    needs a copy of the keys and values of the path above it. The copies for chains below one another together may have
    the length of the tree's longest path; a chain that exceeds this length is not held.
    """
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
            end = min(run_end[start], start + room)
            chains.append((ends[start], end - start, path) if held else (ends[start], 0, 0))
            yield start, end, True, held
        start = end


def _as_padded_rows(forest: Forest, token_budget: int) -> _Places:
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
    home, index = torch.empty(2, len(forest), dtype=torch.long)
    inputs: list[MicroBatch] = []
    for number in reversed(range(len(groups))):  # backwards, so that the first row that holds a node is its home
        group = groups[number]
        width = len(group[0])
        ids = torch.zeros(len(group), width, dtype=torch.long)
        for row in reversed(range(len(group))):
            path = group[row]
            ids[row, : len(path)] = forest.token[path]
            home[path] = number
            index[path] = row * width + torch.arange(len(path))
        inputs.append(MicroBatch(ids, torch.arange(width).expand(len(group), width), None))
    return inputs[::-1], home, index


def _by_label(label: Tensor, count: int) -> list[Tensor]:
    """The places of each label 0 .. count-1 in `label`, in order."""
    return list(label.argsort(stable=True).split(label.bincount(minlength=count).tolist()))
