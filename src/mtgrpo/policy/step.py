"""Micro-batches of a batch through the model, their losses weighted and added, one update."""

import math
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import Batch
from mtgrpo.batch.packing import Layout, MicroBatch, Packing, pack, visits
from mtgrpo.batch.word import Pass
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.model.attention import AttentionKind, cuts_trees
from mtgrpo.model.out_of_memory import explained
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.rounding import ends_the_run
from mtgrpo.model.scorer import Scores, flops_of, layout_of
from mtgrpo.policy.gradient_check import check_derivative, check_walk
from mtgrpo.policy.guard import Deviation, compare, deepest, depth
from mtgrpo.policy.layouts import ParallelLayout, Score
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.profile import Profiler

Metrics = dict[str, float]
T = TypeVar("T")
# The differences of one micro-batch or trajectory of many may be so many times those that rounding explains usually.
MAX_OUTLIER_RATIO = 3.0
MAX_SKIPPED_UPDATES = 3  # in a row, whose gradient is not finite
ON_ROWS = ": training on padded rows"
CooperativeTask = Generator[None, None, T]  # work that pauses between micro-batches; in the end its result
TokenLoss = Callable[[Tensor, Scores], PerToken]  # (entries of the batch, their scores with gradient)


class Policy:
    """A model, its optimiser, and how much of a batch is computed at once.

    `parallel` says which ranks share the work: each computes its own micro-batches, and what they find is summed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        token_budget: int,
        temperature: float,
        profiler: Profiler | None = None,
        parallel: ParallelLayout | None = None,
    ) -> None:
        self.model = model
        self.parallel = parallel or ParallelLayout()
        self.scorer = self.parallel.wrap(model)
        self.optimizer = optimizer
        self.profiler = optimizer.profiler = profiler or Profiler()
        self._token_budget = token_budget
        self._temperature = temperature
        self._cost, self._layout = flops_of(model), layout_of(model)
        self.notes: list[str] = []  # for the user, not shown yet
        self._checked_tokens = 0  # contexts up to this length were compared with the plain forward pass
        # Whether the gradient was compared with log-probabilities, and with that of plain rows.
        self._differentiated = self.parallel.aligned
        self._context = torch.zeros(0)  # one of them, and
        self._bound = 0.0  # nats, how far rounding may move its log-probabilities
        self._noted = 0.0  # nats, the last difference that was noted
        self._skipped = 0  # updates in a row whose gradient was not finite

    def pack(self, batch: Batch, entries: Tensor) -> list[Packing]:
        """The micro-batches of each rank that read `entries` [n]; all ranks have the same."""
        packings = self._pack(batch, entries)
        if (longest := max(depth(packing.micro_batches) for packing in packings)) <= self._checked_tokens:
            return packings
        self._checked_tokens = 1 << (longest - 1).bit_length()  # once more when contexts outgrow the next power of two
        with self.profiler.measure("check"):
            return self._check_layout(packings, batch, entries)

    def _pack(self, batch: Batch, entries: Tensor) -> list[Packing]:
        with self.profiler.measure("packing"):
            packings = pack(batch, entries, self._token_budget, self._cost, self._layout, self.parallel.ranks)
        if not any(micro.opens for packing in packings for micro in packing.micro_batches) or cuts_trees(self.model):
            return packings
        self.notes.append(
            f"a tree is larger than batch.token_budget={self._token_budget}, and {type(self.model).__name__} attends "
            "several times in a layer, so that no part of it can be computed first" + ON_ROWS
        )
        self._use(AttentionKind.sdpa)
        return self._pack(batch, entries)

    def _use(self, attention: AttentionKind) -> None:
        """Lay micro-batches out as `attention` reads them, from here on."""
        self.model.set_attn_implementation(attention.value)
        self._layout = layout_of(self.model)

    def _check_layout(self, packings: list[Packing], batch: Batch, entries: Tensor) -> list[Packing]:
        """`packings`, compared with plain forward passes; padded rows from here on where a forest is wrong, they right.

        Raises RunError where both are wrong by more than rounding and than is harmless.
        """
        worst = self._compare(packings)
        self._context, self._bound = worst.context, MAX_OUTLIER_RATIO * worst.bound
        if math.isnan(worst.apart):  # diverged weights are found when the batch is scored
            return packings
        if not self._differentiated:
            check_derivative(self.model, worst.context)
            fault, self._differentiated = self.parallel.agreed(check_walk(self.model, worst.context)), True
            if fault:
                rows = self._on_rows(fault, batch, entries)
                self.notes.append(fault + ON_ROWS)
                return self._check_layout(rows, batch, entries)
        if worst.holds:
            return packings
        if self._layout is Layout.forest:
            fault = f"the log-probabilities of the token forest {worst}"
            rows = self._on_rows(fault, batch, entries)
            if self._compare(rows).holds:
                self.notes.append(fault + ON_ROWS)
                return rows
            self._use(AttentionKind.forest)
        text = f"the log-probabilities of {type(self.model).__name__}, however it is laid out, {worst}"
        if ends_the_run(worst.apart, MAX_OUTLIER_RATIO * worst.bound):
            raise RunError(f"{text}: such contexts cannot be trained; set environment.max_context_length lower")
        self.notes.append(text)
        return packings

    def _compare(self, packings: list[Packing]) -> Deviation:
        """The deepest micro-batch of all ranks with plain forward passes; every rank computes it, the worst counts."""
        deepest_of = max(packings, key=lambda packing: depth(packing.micro_batches))
        found = compare(self.scorer, deepest(deepest_of.micro_batches))
        apart, bound = (self.parallel.largest(nats) for nats in (found.apart, found.bound))
        return replace(found, apart=apart, bound=bound)

    def _on_rows(self, fault: str, batch: Batch, entries: Tensor) -> list[Packing]:
        """Padded rows from here on. Raises RunError where the token budget does not hold one."""
        self._use(AttentionKind.sdpa)
        try:
            return self._pack(batch, entries)
        except ConfigError as error:
            raise RunError(f"{fault}; and of the padded rows that would be right, {error}") from error

    def judge(self, apart: float, what: str) -> None:
        """Note, or raise RunError, where log-probabilities are `apart` nats apart, more than rounding explains."""
        if apart <= max(self._bound, 2 * self._noted):
            return
        with self.profiler.measure("check"):  # by the present weights
            self._bound = MAX_OUTLIER_RATIO * self.scorer.reference(self._context, first=-1).bound
        self.parallel.reshard()  # a step would leave what is gathered as it is
        text = f"{what} by {apart:.2g} nats, of which rounding explains {self._bound:.2g}"
        if ends_the_run(apart, self._bound):
            raise RunError(text)
        if apart > self._bound:
            self._noted = apart
            self.notes.append(f"{text}; training goes on, for so little decides nothing")

    def score(self, by: Score, micro: MicroBatch, prefix: Prefix) -> Scores:
        """The scores of a micro-batch. Raises RunError if they are not finite."""
        scores = by(micro, self._temperature, prefix)
        wrong = (~scores.logp.detach().isfinite()).nonzero()[:, 0]
        if len(wrong):
            raise RunError(
                f"the log-probability of {len(wrong)} of {len(scores.logp)} sampled tokens is not finite, the first "
                f"that of token {int(micro.token[wrong[0].cpu()])} with {scores.logp[wrong[0]].item()}: the weights "
                "have diverged, or what was sampled has probability 0 under the policy"
            )
        return scores

    def scoring(
        self, batch: Batch, entries: Tensor, weights: dict[str, Tensor] | None = None
    ) -> CooperativeTask[Scores]:
        """The scores of `entries` [n], without gradient: fp64 on the CPU, [len(batch)], and NaN at other places.

        weights: in place of the policy's that are trained, by name.
        """
        logp, entropy, value = torch.full((3, len(batch)), torch.nan, dtype=torch.float64)
        above: Prefix | None = None
        packing = self.pack(batch, entries)[self.parallel.rank]
        own = nullcontext(self.scorer)
        with own if weights is None else self.parallel.scoring_by(self.scorer, weights) as by:
            for micro, entered in visits(packing.micro_batches):
                if not entered:
                    above = above and above.above
                    continue
                prefix = Prefix(micro, above)
                above = prefix if micro.opens else above
                with self.profiler.measure("forward"), explained("training"), torch.no_grad():
                    scores = self.score(by, micro, prefix)
                for whole, part in zip((logp, entropy, value), scores, strict=True):
                    if part is not None:
                        whole[micro.entries] = part.double().cpu()[micro.target]
                yield
        self.parallel.reshard()
        return Scores(*map(self.parallel.total, (logp, entropy, value)))

    def updating(
        self,
        batch: Batch,
        entries: Tensor,
        weights: Tensor,
        loss: TokenLoss,
        before_step: Callable[[], None] = lambda: None,
    ) -> CooperativeTask[Metrics]:
        """One optimiser step on sum_i weights[i] * loss_i over `entries`.

        entries [n] int64: what has a loss; weights [len(batch)]: the share of each token (see average.py). A token that
        several trajectories share is computed once and has one loss, and one weight, for each of them. `before_step` is
        called when the gradient is complete.
        """
        sums: Metrics = {"loss": 0.0, "weight": 0.0}
        packings = self.pack(batch, entries)
        for micro, prefix, step in self.parallel.passes(packings):
            with self.profiler.measure("backward" if step is Pass.backward else "forward"), explained("training"):
                if step is Pass.keys:
                    with torch.no_grad():
                        self.scorer(micro.unread(), self._temperature, prefix)
                elif step is Pass.loss:
                    prefix.loss = self.optimizer.scaled(self._weighted(micro, prefix, weights, loss, sums))
                else:
                    self.parallel.backward(prefix)
            if step is Pass.backward:
                yield
        with self.profiler.measure("backward"), explained("training"):
            self.parallel.finish(self.optimizer)
        before_step()
        sums, packing = self.parallel.add_up(sums), packings[0]
        self.parallel.check_share(sums["weight"], float(weights[entries].sum()))
        lr, weight, total = self.optimizer.lr, sums.pop("weight"), sums.pop("loss")
        with self.profiler.measure("update"), explained("update"):
            metrics = {"loss": total, "lr": lr, "grad_norm": self.optimizer.step()}
        metrics["skipped"] = self._count_skipped(total, metrics["grad_norm"])
        metrics["computed_tokens"] = float(packing.computed)
        metrics["repeated_tokens"] = float(packing.computed - packing.distinct)
        return metrics | {name: amount / weight for name, amount in sums.items() if weight}

    def _count_skipped(self, loss: float, norm: float) -> float:
        """1 where the optimiser left the weights as they are, since the gradient is not finite; else 0.

        Raises RunError for the last of `MAX_SKIPPED_UPDATES` in a row, in float16 once the loss is not scaled any more.
        """
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        text = f"the gradient's norm is {norm}, with a loss of {loss:.3g}: the weights stay as they were"
        if self._skipped >= MAX_SKIPPED_UPDATES and self.optimizer.scale <= self.optimizer.least_scale:
            raise RunError(f"{text}, {self._skipped} times in a row; set optimizer.lr or optimizer.max_grad_norm lower")
        if self._skipped:
            self.notes.append(text)
        return float(self._skipped > 0)

    def _weighted(self, micro: MicroBatch, prefix: Prefix, weights: Tensor, loss: TokenLoss, sums: Metrics) -> Tensor:
        """The share of a micro-batch in the loss, with its gradient; adds the metrics of its tokens to `sums`."""
        scores = self.score(self.scorer, micro, prefix).at(micro.target)
        per_token = loss(micro.entries, scores)
        share = weights[micro.entries].to(scores.logp)
        value = (per_token.loss * share).sum()
        metrics = per_token.metrics | {"clip_fraction": per_token.clipped, "entropy": scores.entropy.detach()}
        weighted = {name: (amounts * share).sum() for name, amounts in metrics.items()}
        weighted |= {"loss": value.detach(), "weight": share.sum()}
        for name, amount in weighted.items():
            sums[name] = sums.get(name, 0.0) + amount.item()
        return value


def at_once(work: CooperativeTask[T]) -> T:
    """The result of work that is done without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value
