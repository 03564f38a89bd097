"""Whether what is trained is what was sampled, computed as the model's own forward pass computes each context alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.algorithms.average import Average
from mtgrpo.batch.forest import Batch
from mtgrpo.batch.packing import MicroBatch
from mtgrpo.errors import RunError
from mtgrpo.model.rounding import distance, reference
from mtgrpo.model.scorer import Scorer
from mtgrpo.types import Trajectory

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


def check_provenance(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """Raise RunError unless the tokens of `batch` are what `trajectories` sampled, each after the token before it.

    So neither the text of a tool nor a token without a log-probability of its own is ever trained.
    """
    token: list[int] = []
    before: list[int] = []
    logprobs: list[float] = []
    owner: list[int] = []
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            last = turn.new_context[-1:] or trajectory.turns[turn.parent].output[-1:]
            row = [*last, *turn.output]
            token += row[1:]
            before += row[:-1]
            logprobs += turn.logprobs
            owner += [number] * len(turn.output)
    parent = batch.forest.parent[batch.node]
    compared = {
        "token": (batch.token, torch.tensor(token)),
        "token before": (batch.forest.token[parent], torch.tensor(before)),
        "log-probability": (batch.behaviour_logp, torch.tensor(logprobs, dtype=torch.float64)),
        "trajectory": (batch.trajectory, torch.tensor(owner)),
    }
    for what, (found, expected) in compared.items():
        if len(found) != len(expected) or not torch.equal(found, expected.to(found)):
            wrong = (found[: len(expected)] != expected[: len(found)]).nonzero()[:, 0]
            place = int(wrong[0]) if len(wrong) else min(len(found), len(expected))
            raise RunError(
                f"the {what} of entry {place} of a batch is not that of a sampled token ({len(found)} entries, "
                f"{len(expected)} sampled tokens): what was sampled and what would be trained differ"
            )


def check_weights(weights: Tensor, average: Average) -> None:
    """Raise RunError unless `weights` [tokens] of an optimiser step sum to 1; average=constant has any sum."""
    total = weights.sum().item()
    if average is not Average.constant and not abs(total - 1) < 1e-9:
        raise RunError(f"the weights of an update's tokens sum to {total}, not to 1: the loss is divided wrongly")


def worst_trajectory(log_rho: Tensor, trajectory: Tensor) -> float:
    """The largest root mean square of `log_rho` [tokens] over the tokens of a trajectory; few of them count as `FEW`.

    log_rho: log-probabilities of sampled tokens by the trainer minus those by the engine, in nats, of the same weights.
    """
    _, index, counts = trajectory.unique(return_inverse=True, return_counts=True)
    squares = torch.zeros(len(counts), dtype=log_rho.dtype).index_add(0, index, log_rho.square())
    return (squares / counts.clamp(min=FEW)).max().sqrt().item()
