"""Whether micro-batches are computed as the model's own forward pass computes each context alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.batch.packing import MicroBatch
from mtgrpo.model.rounding import distance, reference
from mtgrpo.model.scorer import Scorer

CHECKED = 4  # contexts that are computed again: the shortest, the longest, and between them

FEW = 16  # tokens; the differences of fewer say little, whatever the trajectory


@dataclass(frozen=True)
class Comparison:
    """The context whose log-probabilities are furthest from those of the plain forward pass."""

    apart: float  # nats
    bound: float  # nats, how much of it rounding explains
    context: Tensor  # its tokens

    @property
    def holds(self) -> bool:
        """Whether rounding explains it."""
        return self.apart <= self.bound

    def __str__(self) -> str:
        return (
            f"differ from the plain forward pass by {self.apart:.2g} nats after {len(self.context)} tokens, of which "
            f"rounding explains {self.bound:.2g}"
        )


@torch.no_grad()
def compare(scorer: Scorer, micro: MicroBatch) -> Comparison:
    """Compute some contexts of a micro-batch, which has targets, again, each alone; the worst of them."""
    parents = _chosen(micro)
    found = scorer.next_logprobs(micro, parents)
    worst: list[Comparison] = []
    for row, parent in zip(found, parents.tolist(), strict=True):
        context = context_of(micro, parent)
        plain = reference(scorer.model, context, first=-1)
        worst.append(Comparison(distance(plain.logprobs, row[None]), plain.bound, context))
    return max(worst, key=lambda c: c.apart / c.bound if c.apart == c.apart else torch.inf)


def depth(micro_batches: list[MicroBatch]) -> int:
    """The length of the longest context that is read."""
    read = [micro for micro in micro_batches if len(micro.parent)]
    return max((int(micro.position.flatten()[micro.parent].max()) + 1 for micro in read), default=0)


def deepest(micro_batches: list[MicroBatch]) -> MicroBatch:
    """The micro-batch with the longest context."""
    return max(micro_batches, key=lambda micro: depth([micro]))


def context_of(micro: MicroBatch, parent: int) -> Tensor:
    """The token ids up to the flat position `parent` of a micro-batch that belong to its context."""
    if micro.forest is None:
        row, column = divmod(parent, micro.ids.shape[1])
        return micro.ids[row, : column + 1]
    ancestors = micro.forest.subtree_end[: parent + 1] > parent
    return micro.ids[0, : parent + 1][ancestors]


def _chosen(micro: MicroBatch) -> Tensor:
    """Distinct parents [n], by the length of their contexts."""
    parents = micro.parent.unique()
    order = parents[micro.position.flatten()[parents].argsort(stable=True)]
    picks = torch.linspace(0, len(order) - 1, min(CHECKED, len(order))).round().long()
    return order[picks]


def worst_trajectory(log_rho: Tensor, trajectory: Tensor) -> float:
    """The largest root mean square of `log_rho` [tokens] over the tokens of a trajectory; few of them count as `FEW`.

    log_rho: log-probabilities of sampled tokens by the trainer minus those by the engine, in nats, of the same weights.
    """
    _, index, counts = trajectory.unique(return_inverse=True, return_counts=True)
    squares = torch.zeros(len(counts), dtype=log_rho.dtype).index_add(0, index, log_rho.square())
    return (squares / counts.clamp(min=FEW)).max().sqrt().item()
