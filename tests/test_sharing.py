"""A batch over ranks: shared out evenly, and no rank computes much more than it must."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from torch import Tensor

from mtgrpo.batch.forest import Batch, Forest, build_batch
from mtgrpo.batch.packing import Cost, Packing, pack
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TASK = Task("test/0", (Message("user", "?"),))
COSTS = {"long": Cost(token=10, pair=1, read=40), "short": Cost(token=880e6, pair=0.115e6, read=311e6)}
RANKS = (2, 4, 8, 16)
MAX_OVER_MEAN, MAX_OVER_BOUND = 1.1, 1.15


class Played:
    """Conversations of random tokens, from 10 to 60 sampled in a turn."""

    def __init__(self, system: int, prompt: int, turns: int, segments: int = 1) -> None:
        self._rng = random.Random(0)
        self._system, self._prompt, self._turns, self._segments = self._tokens(system), prompt, turns, segments

    def groups(self, tasks: int, siblings: int) -> Batch:
        prompts = [[*self._system, *self._tokens(self._prompt)] for _ in range(tasks)]
        return build_batch([self._conversation(prompt) for prompt in prompts for _ in range(siblings)])

    def _conversation(self, prompt: list[int]) -> Trajectory:
        turns: list[Turn] = []
        for number in range(self._segments * self._turns):
            begins = number % self._turns == 0
            context = self._some(5, 40) if number else []
            output = self._some(10, 60)
            turns.append(
                Turn(
                    prompt + context if begins else context, output, [-0.1] * len(output), [0] * len(output),
                    Finish.STOP, Message("assistant"), -1 if begins else number - 1,
                )
            )  # fmt: skip
        return Trajectory(TASK, turns=turns)

    def _some(self, least: int, most: int) -> list[int]:
        return self._tokens(self._rng.randint(least, most))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10**6) for _ in range(count)]


SHAPES = {  # what was played, in how many groups of how many siblings, and the token budget
    "a common system prompt": (Played(200, 60, turns=3), (8, 8), 65_536),
    "nothing in common": (Played(0, 60, turns=3), (8, 8), 65_536),
    "a system prompt of 1,500 of 10,000 nodes": (Played(1500, 60, turns=3), (8, 8), 65_536),
    "deep chains beyond the budget": (Played(40, 100, turns=6), (16, 8), 300),
    "deep chains, of which some are beyond the budget": (Played(40, 100, turns=6), (16, 8), 700),
    "condensed contexts beyond the budget": (Played(150, 60, turns=2, segments=3), (8, 8), 1000),
    "one task": (Played(0, 300, turns=3), (1, 64), 65_536),
}


@functools.cache
def batch_of(shape: str) -> Batch:
    played, size, _ = SHAPES[shape]
    return played.groups(*size)


@functools.cache
def packed(shape: str, kind: str, ranks: int) -> list[Packing]:
    batch = batch_of(shape)
    return pack(batch, torch.arange(len(batch)), SHAPES[shape][2], COSTS[kind], ranks=ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_have_even_shares(shape: str, kind: str, ranks: int) -> None:
    costs = [sum(micro.cost for micro in rank.micro_batches) for rank in packed(shape, kind, ranks)]
    assert max(costs) <= MAX_OVER_MEAN * sum(costs) / ranks
    assert max(costs) <= MAX_OVER_BOUND * least_bound(batch_of(shape), COSTS[kind], ranks)


def least_bound(batch: Batch, cost: Cost, ranks: int) -> float:
    """Below this one of the ranks is, however a batch is shared out.

    If no rank costs more than a bound, one that has a trunk can have no more than the rest of the bound of what is
    below it. So many ranks must at least compute the trunk, and all of them together must have room for everything.
    """
    forest = batch.forest.subset(batch.forest.with_ancestors(batch.forest.parent[batch.node]))
    read = (batch.forest.parent[batch.node]).unique()
    needed = batch.forest.with_ancestors(read)
    reading = cost.read * torch.isin(needed, read).double()
    computing = cost.token + cost.pair * (forest.depth + 1.0)
    low, high = 0.0, float((computing + reading).sum())
    while high - low > 1e-3 * high:
        bound = (low + high) / 2
        if least_work(forest, computing, reading, bound) <= ranks * bound:
            high = bound
        else:
            low = bound
    return low


def least_work(forest: Forest, computing: Tensor, reading: Tensor, bound: float) -> float:
    """What all ranks must compute and read together if none may cost more than `bound`; infinity if they cannot."""
    run_end, ends = forest.run_end().tolist(), forest.subtree_end.tolist()
    compute, read = ([0.0, *costs.cumsum(0).tolist()] for costs in (computing, reading))

    def work(start: int, stop: int, room: float) -> float:
        """Of the subtrees from `start` to `stop`, where a rank has so much room for them."""
        total = 0.0
        while start < stop:
            run, end = run_end[start], ends[start]
            trunk = compute[run] - compute[start]
            left = room - trunk
            below = work(run, end, left)
            if left <= 0 or below == math.inf:
                return math.inf
            copies = max(1, math.ceil(below / left - 1e-9))
            total += below + copies * trunk + read[run] - read[start]
            start = end
        return total

    return work(0, len(forest), bound)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_bound_is_the_mean_where_there_is_no_trunk(ranks: int) -> None:
    """And where all have one, each rank has it."""
    for system, tasks in ((0, 256), (300, 64)):
        batch = Played(system, 5, turns=1).groups(tasks, 1)
        costs = COSTS["long"]
        whole = sum(micro.cost for micro in pack(batch, torch.arange(len(batch)), 10**6, costs)[0].micro_batches)
        trunk = 10 * system + system * (system + 1) / 2
        assert least_bound(batch, costs, ranks) == pytest.approx((whole + (ranks - 1) * trunk) / ranks, rel=2e-3)


def test_a_batch_of_fewer_conversations_than_ranks_costs_no_more_than_its_longest() -> None:
    batch = Played(30, 60, turns=3).groups(2, 3)
    packings = pack(batch, torch.arange(len(batch)), 10**6, COSTS["long"], ranks=16)
    costs = sorted(sum(micro.cost for micro in rank.micro_batches) for rank in packings)
    alone = [batch_alone(batch, number) for number in range(6)]
    assert costs[:10] == [0] * 10
    assert costs[-1] <= max(alone)


def batch_alone(batch: Batch, trajectory: int) -> float:
    (packing,) = pack(batch, (batch.trajectory == trajectory).nonzero()[:, 0], 10**6, COSTS["long"])
    return packing.micro_batches[0].cost
