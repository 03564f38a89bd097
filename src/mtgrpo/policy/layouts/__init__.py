"""How the ranks of a run share the model, the gradient and the weights. One file = one layout.

All ranks have the same batch, lay it out alike and compute their own micro-batches. Gradients are summed, never
averaged, for the weights of tokens already add up over all ranks; scores and metrics are summed too. So every layout
makes the updates of one process.
"""

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from mtgrpo.batch.packing import MicroBatch, Packing
from mtgrpo.batch.word import Pass
from mtgrpo.errors import RunError
from mtgrpo.model.prefix import Prefix, passes
from mtgrpo.model.scorer import Scorer, Scores
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import OptimizerSettings

Score = Callable[[MicroBatch, float, Prefix | None], Scores]  # of a micro-batch, at a temperature, after a prefix


class ParallelLayout:
    """One process, which has the whole model and computes all micro-batches; the base of layouts with several ranks."""

    aligned = False  # whether passes are collectives, so that all ranks make theirs in one order

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def wrap(self, model: PreTrainedModel) -> Scorer:
        """The model as it is scored from here on; a sharded one keeps a part of its weights. Once for each model."""
        return Scorer(model)

    def make_optimizer(self, model: PreTrainedModel, settings: OptimizerSettings, steps: int) -> Optimizer:
        """What steps the weights of a model that `wrap` has been given."""
        return Optimizer(model, settings, steps)

    def passes(self, packings: Sequence[Packing]) -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
        """The passes of this rank for an update; see `model.prefix.passes`. packings: those of all ranks."""
        return passes(packings[self.rank].micro_batches)

    def backward(self, prefix: Prefix) -> None:
        """The backward pass that `passes` asks for."""
        prefix.backward()

    def finish(self, optimizer: Optimizer) -> None:
        """All passes of an update are made: complete the gradient."""

    @contextmanager
    def scoring_by(self, scorer: Scorer, weights: dict[str, Tensor]) -> Generator[Score]:
        """What scores, within, by other weights than the model's, which are sharded alike; no gradient."""
        yield partial(scorer.with_weights, weights)

    def reshard(self) -> None:
        """Let go of what other ranks have too; the parameters of the model are parts again."""

    def total(self, amounts: Tensor) -> Tensor:
        """`amounts` [n] fp64 on the CPU, summed over the ranks; NaN where a rank has none, and where none has one."""
        return amounts

    def add_up(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Sums over the ranks by name, of which a rank may lack some."""
        return dict(amounts)

    def largest(self, amount: float) -> float:
        """The largest of all ranks; NaN if one is."""
        return amount

    def agreed(self, fault: str) -> str:
        """A fault that any rank has found, the first rank's first; "" where none has."""
        return fault

    def check_share(self, trained: float, expected: float) -> None:
        """Raise RunError where the weights of the tokens that all ranks have trained do not add up to `expected`."""


class SeveralRanks(ParallelLayout):
    """What layouts with several ranks share: sums over the default process group, on the CPU."""

    def total(self, amounts: Tensor) -> Tensor:
        known = ~amounts.isnan()
        sums = torch.stack([torch.where(known, amounts, 0.0), known.to(amounts)])
        dist.all_reduce(sums)
        if (sums[1] > 1).any():
            raise RunError("several ranks computed the same token: they have not laid the batch out alike")
        return torch.where(sums[1] > 0, sums[0], torch.nan)

    def add_up(self, amounts: Mapping[str, float]) -> dict[str, float]:
        by_rank = self._gathered({name: float(amount) for name, amount in amounts.items()})
        names = dict.fromkeys(name for row in by_rank for name in row)
        return {name: math.fsum(row.get(name, 0.0) for row in by_rank) for name in names}

    def largest(self, amount: float) -> float:
        by_rank = torch.zeros(self.ranks, dtype=torch.float64)
        by_rank[self.rank] = amount
        dist.all_reduce(by_rank)
        return by_rank.max().item()

    def agreed(self, fault: str) -> str:
        return next(filter(None, self._gathered(fault)), "")

    def _gathered(self, own: Any) -> list[Any]:
        """What each rank has, as JSON: to unpickle it would be to run what a stranger among them says."""
        text = json.dumps(own).encode()
        sizes = torch.zeros(self.ranks, dtype=torch.int64)
        sizes[self.rank] = len(text)
        dist.all_reduce(sizes)
        rows = torch.zeros(self.ranks, int(sizes.max()), dtype=torch.uint8)
        rows[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.all_reduce(rows)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def check_share(self, trained: float, expected: float) -> None:
        if not math.isclose(trained, expected, rel_tol=1e-3, abs_tol=1e-3):
            raise RunError(
                f"the ranks have trained tokens with a share of {trained:.6g} in the loss, of {expected:.6g}: they "
                "have not laid the batch out alike"
            )
