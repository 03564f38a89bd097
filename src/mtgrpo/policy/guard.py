"""Whether what is trained is what was sampled, computed as the model's own forward pass computes each context alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.algorithms.average import Average
from mtgrpo.batch.forest import Batch
from mtgrpo.batch.packing import MicroBatch, open_before
from mtgrpo.errors import RunError
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.rounding import distance
from mtgrpo.model.scorer import Scorer
from mtgrpo.types import Trajectory

CHECKED_CONTEXTS = 4  # are computed again: the shortest, the longest, and some between them

MIN_COUNTED_TOKENS = 16  # of a trajectory: the differences of fewer say little


@dataclass(frozen=True)
class Deviation:
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
def compare(scorer: Scorer, path: Sequence[MicroBatch]) -> Deviation:
    """Compute some contexts of the last of `path`, which continues the others, again, each alone; the worst of them."""
    above: Prefix | None = None
    for chain in path[:-1]:
        above = Prefix(chain, above)
        scorer.hidden(chain, torch.tensor([chain.given]), above)
    micro = path[-1]
    every = micro.parent.unique()
    every = every[micro.position.flatten()[every].argsort(stable=True)]  # by the length of their contexts
    parents = every[torch.linspace(0, len(every) - 1, min(CHECKED_CONTEXTS, len(every))).round().long()]
    logprobs = scorer.next_logprobs(micro, parents, Prefix(micro, above))
    comparisons: list[Deviation] = []
    for row, parent in zip(logprobs, parents.tolist(), strict=True):
        context = context_of(micro, parent)
        plain = scorer.reference(context, first=-1)
        comparisons.append(Deviation(distance(plain.logprobs, row[None]), plain.bound, context))
    return max(comparisons, key=lambda c: c.apart / c.bound if c.apart == c.apart else torch.inf)


def depth(micro_batches: list[MicroBatch]) -> int:
    """The length of the longest context that is read."""
    read = [micro for micro in micro_batches if len(micro.parent)]
    return max((int(micro.position.flatten()[micro.parent].max()) + 1 for micro in read), default=0)


def deepest(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """The chains that the micro-batch with the longest context is given, and that one."""
    place = max(range(len(micro_batches)), key=lambda place: depth([micro_batches[place]]))
    return [*open_before(micro_batches, place), micro_batches[place]]


def context_of(micro: MicroBatch, parent: int) -> Tensor:
    """The token ids up to the flat position `parent` of a micro-batch that belong to its context."""
    if micro.forest is None:
        row, column = divmod(parent, micro.ids.shape[1])
        return micro.ids[row, : column + 1]
    ancestors = micro.forest.subtree_end[: parent + 1] > parent
    return micro.ids[0, : parent + 1][ancestors]


def check_provenance(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """Raise RunError unless the tokens of `batch` are what `trajectories` sampled, each after the token before it.

    So neither the text of a tool nor a token without a log-probability of its own is ever trained.
    """
    token, before, owner, logprobs = list[int](), list[int](), list[int](), list[float]()
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            above = turn
            last = turn.new_context
            while not last and above.parent >= 0:  # a turn may be empty, and so may be what it adds to its context
                above = trajectory.turns[above.parent]
                last = above.output or above.new_context
            row = [*last[-1:], *turn.output]
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
    for what, (trained, expected) in compared.items():
        if len(trained) != len(expected) or not torch.equal(trained, expected.to(trained)):
            wrong = (trained[: len(expected)] != expected[: len(trained)]).nonzero()[:, 0]
            place = int(wrong[0]) if len(wrong) else min(len(trained), len(expected))
            raise RunError(
                f"the {what} of entry {place} of a batch is not that of a sampled token ({len(trained)} entries, "
                f"{len(expected)} sampled tokens): what was sampled and what would be trained differ"
            )


def check_weights(weights: Tensor, average: Average) -> None:
    """Raise RunError unless `weights` [tokens] of an optimiser step sum to 1; average=constant has any sum."""
    total = weights.sum().item()
    if average is not Average.constant and not abs(total - 1) < 1e-9:
        raise RunError(f"the weights of an update's tokens sum to {total}, not to 1: the loss is divided wrongly")


def worst_trajectory(log_rho: Tensor, trajectory: Tensor) -> float:
    """The largest root mean square of `log_rho` [tokens] over a trajectory, of at least `MIN_COUNTED_TOKENS` tokens.

    log_rho: log-probabilities of sampled tokens by the trainer minus those by the engine, in nats, of the same weights.
    """
    _, index, counts = trajectory.unique(return_inverse=True, return_counts=True)
    squares = torch.zeros(len(counts), dtype=log_rho.dtype).index_add(0, index, log_rho.square())
    return (squares / counts.clamp(min=MIN_COUNTED_TOKENS)).max().sqrt().item()
