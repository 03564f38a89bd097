"""Turns -> token forest: a prefix that several rows share is stored, and computed, once.

The nodes stand in depth-first order, each tree from its root: a node comes before its descendants, which are the
range of nodes up to its `subtree_end`. A batch is a forest plus one entry per sampled token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.errors import RunError
from mtgrpo.types import Trajectory, Turn


@dataclass(frozen=True)
class Forest:
    """Token rows that share their prefixes. All tensors are [nodes] int64, in depth-first order.

    A node is a token after a certain context: the path from its root. Token q attends to token k exactly when
    k <= q < subtree_end[k], that is when k is q itself or an ancestor.
    """

    token: Tensor
    parent: Tensor  # -1 = a root
    depth: Tensor  # 0 = a root; also the position in its rows
    subtree_end: Tensor  # one past the last descendant

    def __len__(self) -> int:
        return len(self.token)

    def leaf_paths(self) -> Iterator[Tensor]:
        """The node numbers [length] int64 from root to leaf, one path for each leaf, depth-first."""
        path, start, after = torch.empty(0, dtype=torch.long), 0, torch.arange(1, len(self) + 1)
        for stop in after[self.subtree_end == after].tolist():  # past each leaf, which follows what is new on its path
            path = torch.cat([path[: self.depth[start]], torch.arange(start, stop)])
            yield path
            start = stop

    def run_end(self) -> Tensor:
        """[nodes] int64, one past the run of nodes that each is on: the last of them has no child, or several."""
        continued = (self.depth[1:] == self.depth[:-1] + 1) & (self.subtree_end[1:] == self.subtree_end[:-1])
        ends = torch.cat([(~continued).nonzero()[:, 0] + 1, torch.tensor([len(self)])])
        return ends.repeat_interleave(ends.diff(prepend=torch.tensor([0])))

    def with_ancestors(self, nodes: Tensor) -> Tensor:
        """`nodes` [n] and their ancestors, each once, in order; [m] int64."""
        marked = torch.zeros(len(self) + 1, dtype=torch.long)
        marked[nodes + 1] = 1
        before = marked.cumsum(0)  # [k] = how many marked nodes come before node k
        return (before[self.subtree_end] > before[:-1]).nonzero()[:, 0]

    def subset(self, nodes: Tensor) -> Forest:
        """The forest of `nodes` [n] int64 alone: in order, and with each node its ancestors."""
        parent = self.parent[nodes]
        return Forest(
            token=self.token[nodes],
            parent=torch.where(parent < 0, -1, torch.searchsorted(nodes, parent)),
            depth=self.depth[nodes],
            subtree_end=torch.searchsorted(nodes, self.subtree_end[nodes]),
        )


@dataclass(frozen=True)
class Kept:
    """The tokens that top-k, top-p or min-p kept when each entry was sampled: those of set number[i].

    Set k is token[offset[k]:offset[k + 1]]; equal ones are stored once. Siblings that were sampled on either side of a
    weight update have kept different tokens in the same context.
    """

    number: Tensor  # [entries] int64
    offset: Tensor  # [sets + 1] int64
    token: Tensor  # [total] int64

    @property
    def sets(self) -> int:
        """How many there are."""
        return len(self.offset) - 1

    def listed(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Offsets [n + 1] and tokens [total] of `sets` [n] int64, one after the other."""
        counts = self.offset.diff()[sets]
        offset = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        within = torch.arange(int(offset[-1])) - offset[:-1].repeat_interleave(counts)
        return offset, self.token[self.offset[sets].repeat_interleave(counts) + within]


@dataclass(frozen=True)
class Batch:
    """The sampled tokens of some trajectories: one entry each, in the order of trajectory, turn and position.

    The tensors are [entries]. A token that two trajectories sampled in the same context is one node with two entries.
    """

    forest: Forest
    node: Tensor  # int64, never a root: the hidden state of the node's parent predicts the token
    behaviour_logp: Tensor  # fp64, what the engine reported
    trajectory: Tensor  # int64, index into the trajectories the batch was made of
    turn: Tensor  # int64, index of the turn within its trajectory
    segment: Tensor  # int64, numbers the runs of turns that continue one another, over the whole batch
    version: Tensor  # int64, of the policy that sampled the token: its number of weight updates
    kept: Kept | None = None  # None = all tokens were sampled from the whole vocabulary

    def __len__(self) -> int:
        return len(self.node)

    @property
    def token(self) -> Tensor:
        """The sampled tokens, int64."""
        return self.forest.token[self.node]

    @property
    def shared(self) -> float:
        """How many times as many tokens the segments have, each by itself, as the forest has nodes."""
        lengths = torch.zeros(max(self.segment.tolist(), default=-1) + 1, dtype=torch.long)
        lengths.scatter_reduce_(0, self.segment, self.forest.depth[self.node] + 1, "amax")
        return lengths.sum().item() / max(1, len(self.forest))


def build_forest(rows: Sequence[Sequence[int]]) -> tuple[Forest, list[Tensor]]:
    """The forest of `rows` of token ids (below 2^32), and for each row its node numbers [len(row)] int64."""
    order, tokens = _sort(rows)
    lengths = np.array([len(rows[i]) for i in order], dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), lengths)  # of each token; rows in sorted order from here on
    column = np.arange(len(tokens)) - np.repeat(lengths.cumsum() - lengths, lengths)
    length_before = np.concatenate([[0], lengths[:-1]])[row]
    above = np.arange(len(tokens)) - length_before  # the token of the row before in the same column, if it has one
    differs = (column >= length_before) | (tokens != tokens[above])
    common = lengths.copy()  # how many tokens each row has in common with the row before it
    np.minimum.at(common, row[differs], column[differs])
    new = column >= common[row]

    # A new token is the next node, any other one the node of the last new token in its column. Small integer types sort
    # fastest. The first token of each column is new, so none is filled from another column.
    by_column = np.argsort(column.astype(np.min_scalar_type(column.max(initial=0))), kind="stable")
    last_new = np.maximum.accumulate(np.where(new[by_column], np.arange(len(new)), 0))
    node = new.cumsum() - 1
    node[by_column] = node[by_column][last_new]

    count = int(new.sum())
    forest = {name: np.empty(count, dtype=np.int64) for name in ("token", "parent", "depth", "subtree_end")}
    forest["token"][node] = tokens
    forest["parent"][node] = np.where(column == 0, -1, np.roll(node, 1))
    forest["depth"][node] = column
    # The rows of a node are neighbours; its subtree ends with the last of them, whose value is assigned last.
    forest["subtree_end"][node] = np.bincount(row[new], minlength=len(rows)).cumsum()[row]

    nodes: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(rows)
    for i, of_row in zip(order, torch.from_numpy(node).split(lengths.tolist()), strict=True):
        nodes[i] = of_row
    return Forest(**{name: torch.from_numpy(values) for name, values in forest.items()}), nodes


def _sort(rows: Sequence[Sequence[int]]) -> tuple[list[int], NDArray[np.int64]]:
    """The order in which rows with a common prefix are neighbours, shorter first, and all tokens in this order."""
    everything = np.fromiter(chain.from_iterable(rows), dtype=">u4").tobytes()  # big-endian: bytes sort as tokens do
    keys: list[bytes] = []
    start = 0
    for row in rows:
        stop = start + 4 * len(row)
        keys.append(everything[start:stop])
        start = stop
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, np.frombuffer(b"".join(keys[i] for i in order), dtype=">u4").astype(np.int64)


def build_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Lay the turns out as a forest: one row per segment. The first turn to continue another continues its row too.

    Raises RunError for turns that cannot be trained on, naming the turn and what is wrong.
    """
    rows: list[list[int]] = []
    places: list[tuple[int, int, int]] = []  # of each turn's output: row, start, stop
    labels: list[tuple[int, int, int]] = []  # of each turn: trajectory, turn, segment
    behaviour: list[float] = []
    versions: list[int] = []
    kept: list[array[int]] = []
    for index, trajectory in enumerate(trajectories):
        first = len(places)  # of its turns
        for number, turn in enumerate(trajectory.turns):
            of_row, _, stop = places[first + turn.parent] if 0 <= turn.parent < number else (len(rows), 0, 0)
            if of_row == len(rows) or stop < len(rows[of_row]):  # it continues none, or not as the first
                rows.append(rows[of_row][:stop] if stop else [])
                of_row = len(rows) - 1
            row = rows[of_row]
            row.extend(turn.new_context)
            problem = _problem(turn, number, context_length=len(row))
            if problem:
                raise RunError(
                    f"task {trajectory.task.id!r}, sample {trajectory.sample_index}, turn {number}: {problem}"
                )
            places.append((of_row, len(row), len(row) + len(turn.output)))
            labels.append((index, number, of_row))
            row.extend(turn.output)
            behaviour.extend(turn.logprobs)
            versions.extend(turn.versions)
            kept.extend(turn.kept)
    if kept and len(kept) != len(behaviour):
        raise RunError(
            f"{len(kept)} of {len(behaviour)} sampled tokens say what top-k, top-p or min-p kept: a batch is sampled "
            "from the whole vocabulary throughout, or cut throughout"
        )
    forest, nodes = build_forest(rows)
    none = torch.empty(0, dtype=torch.long)  # so that there is something to join where there are no turns
    lengths = torch.tensor([stop - start for _, start, stop in places], dtype=torch.long)
    label = torch.tensor(labels, dtype=torch.long).reshape(-1, 3).repeat_interleave(lengths, dim=0)
    return Batch(
        forest=forest,
        node=torch.cat([none, *(nodes[row][start:stop] for row, start, stop in places)]),
        behaviour_logp=torch.tensor(behaviour, dtype=torch.float64),
        trajectory=label[:, 0],
        turn=label[:, 1],
        segment=label[:, 2],
        version=torch.tensor(versions, dtype=torch.long),
        kept=_join(kept) if kept else None,
    )


def _join(kept: Sequence[array[int]]) -> Kept:
    sets: dict[bytes, int] = {}
    number = torch.tensor([sets.setdefault(tokens.tobytes(), len(sets)) for tokens in kept])
    offset = torch.tensor([0, *(len(tokens) // 4 for tokens in sets)]).cumsum(0)
    return Kept(number, offset, torch.from_numpy(np.frombuffer(b"".join(sets), np.int32).astype(np.int64)))


def _problem(turn: Turn, number: int, context_length: int) -> str:
    """Why a turn cannot be trained on and what to do; "" when it can."""
    if not -1 <= turn.parent < number:
        return f"parent={turn.parent} is no turn before it; give its whole context with parent=-1"
    for name, values in (("versions", turn.versions), ("log-probabilities", turn.logprobs)):
        if len(values) != len(turn.output):
            return (
                f"{len(turn.output)} output tokens but {len(values)} {name}; the engine must report one for each "
                "sampled token"
            )
    if turn.output and context_length == 0:
        return (
            f"output position 0, token {turn.output[0]}, was sampled from an empty context, so nothing predicts it; "
            "a context needs at least one token, such as one that begins a text"
        )
    for position, logprob in enumerate(turn.logprobs):
        if not math.isfinite(logprob):
            return (
                f"output position {position}, token {turn.output[position]}, has log-probability {logprob}; sampled "
                "tokens have finite ones: check the engine's model for overflow, or drop the trajectory"
            )
    return ""
