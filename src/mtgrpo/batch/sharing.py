"""A batch shared out over ranks: which rank reads each hidden state. A rank computes what it reads and all above that.

Ranks that read in the same tree compute what is above all of their parts each by itself, so a tree is cut only where
no rank can take it whole. Every rank shares out alike, without a word to the others.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.batch.forest import Forest

PRECISION = 1.005  # how close the bound of a rank's cost is brought to one within which no way was found
AFFINITIES = (2.0, 100.0)  # what a subtree adds to a rank weighs so many times what the rank has already; each is tried

Shared = list[tuple[int, int, int]]
"""Stretches of nodes and who reads them: start, stop, rank."""


def share_forest(forest: Forest, computing: Tensor, reading: Tensor, ranks: int) -> Tensor:
    """The rank [nodes] int64 that reads each node, by what it costs [nodes] fp64 to compute a node and to read it.

    The bound that no rank's cost exceeds is bisected, as in MULTIFIT (Coffman, Garey and Johnson 1978).
    """
    rank_of = torch.zeros(len(forest), dtype=torch.long)
    if ranks == 1:
        return rank_of
    trees = _Trees(forest, computing, reading)
    low, high = trees.total / ranks / PRECISION, trees.total
    while high > low * PRECISION:
        bound = math.sqrt(low * high)
        shared = next((found for weight in AFFINITIES if (found := trees.share(ranks, bound, weight))), None)
        if shared is None:
            low = bound
            continue
        high = bound
        for start, stop, rank in shared:
            rank_of[start:stop] = rank
    return rank_of


class _Trees:
    """The trees of a batch and their costs. A node stands for its subtree, and for the run from it to a branching."""

    def __init__(self, forest: Forest, computing: Tensor, reading: Tensor) -> None:
        self._end: list[int] = forest.subtree_end.tolist()
        self._run_end: list[int] = forest.run_end().tolist()
        self._roots: list[int] = (forest.depth == 0).nonzero()[:, 0].tolist()
        # Of all nodes before each, and in the end of all
        self._computing: list[float] = [0.0, *computing.cumsum(0).tolist()]
        self._both: list[float] = [0.0, *(computing + reading).cumsum(0).tolist()]
        self.total = self._both[-1]

    def share(self, ranks: int, bound: float, affinity: float) -> Shared | None:
        """Who reads what, so that no rank costs more than `bound`; None where no such way is found.

        The costliest subtree goes first, to a rank to which it adds little and which has little. One that no rank can
        take is cut: its branches go one by one, and the run above them to each rank that has one of them.
        """
        shared: Shared = []
        load = np.zeros(ranks)
        adds: dict[int, NDArray[np.float64]] = {}  # [ranks], of each run that was cut off: what it would add to a rank
        waiting = [(self._minus(root), root, tuple[int, ...]()) for root in self._roots]
        heapq.heapify(waiting)
        while waiting:
            minus, start, above = heapq.heappop(waiting)
            added = sum((adds[run] for run in above), np.full(ranks, -minus))
            rank = int(np.where(load + added <= bound, load + affinity * added, np.inf).argmin())
            if load[rank] + added[rank] <= bound:
                shared.append((start, self._end[start], rank))
                load[rank] += added[rank]
                for run in above:
                    stop = self._run_end[run]
                    if adds[run].all():  # the first to have it reads it
                        shared.append((run, stop, rank))
                        adds[run][:] = self._computing[stop] - self._computing[run]
                    adds[run][rank] = 0
            elif branches := self._branches(start):
                adds[start] = np.full(ranks, self._both[branches[0]] - self._both[start])
                for branch in branches:
                    heapq.heappush(waiting, (self._minus(branch), branch, (*above, start)))
            else:
                return None
        return shared

    def _minus(self, start: int) -> float:
        """The cost of a subtree, with a minus: the costliest comes first."""
        return self._both[start] - self._both[self._end[start]]

    def _branches(self, start: int) -> list[int]:
        """Where the subtrees below a run begin."""
        branches = [self._run_end[start]]
        while branches[-1] < self._end[start]:
            branches.append(self._end[branches[-1]])
        return branches[:-1]


def spread(costs: Sequence[float], sizes: Sequence[int], bins: int, capacity: int) -> list[list[int]] | None:
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
