"""One batch of trajectories into new weights: micro-batches, weights per token, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.algorithms import Algorithm, PerToken
from mtgrpo.algorithms.average import token_weights
from mtgrpo.algorithms.kl import KL
from mtgrpo.batch.forest import Batch
from mtgrpo.batch.packing import MicroBatch, Packing, pack
from mtgrpo.extension import ConfigError
from mtgrpo.policy.forward import Scores, check_forest, flops_of, layout_of, score
from mtgrpo.policy.optimizer import Optimizer

Metrics = dict[str, float]
MAX_DRIFT = 0.1  # nats, between two forward passes of the same weights; fp32 has 1e-5, bfloat16 a few hundredths
TokenLoss = Callable[[Tensor, Tensor], PerToken]  # (entries of the batch, their log-probabilities with gradient)


@dataclass
class Updates:
    """How one rollout batch is used."""

    minibatch_trajectories: int = 0  # trajectories per optimiser step; 0 = the whole batch in one step
    updates_per_batch: int = 1  # passes over the batch

    def __post_init__(self) -> None:
        if self.minibatch_trajectories < 0 or self.updates_per_batch < 1:
            raise ConfigError(
                "trainer.minibatch_trajectories must be >= 0 and trainer.updates_per_batch >= 1, "
                f"got {self.minibatch_trajectories} and {self.updates_per_batch}"
            )


@dataclass(frozen=True)
class Signal:
    """What credit assignment says of each trajectory of a batch; tensors [trajectories]."""

    advantage: Tensor  # fp32
    trained: Tensor  # bool; false = its tokens count in the normaliser but carry no loss


class Policy:
    """A model, its optimiser, and how much of a batch is computed at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        token_budget: int,
        temperature: float,
        weights: AbstractContextManager[object] | None = None,  # held while they are written
    ) -> None:
        self.model = model
        self._weights = weights or nullcontext()
        self.optimizer = optimizer
        self._token_budget = token_budget
        self._temperature = temperature
        self._cost, self._layout = flops_of(model), layout_of(model)
        self._checked = False  # whether the forest was compared with the plain path

    def pack(self, batch: Batch, entries: Tensor) -> Packing:
        """The micro-batches that read `entries` [n]."""
        return pack(batch, entries, self._token_budget, self._cost, self._layout)

    def score(self, micro: MicroBatch, model: PreTrainedModel | None = None) -> Scores:
        """The scores of a micro-batch. Raises RuntimeError if they are not finite, or not those of a plain forward."""
        scores = score(model or self.model, micro, self._temperature)
        wrong = (~scores.logp.detach().isfinite()).nonzero()[:, 0]
        if len(wrong):
            raise RuntimeError(
                f"the log-probability of {len(wrong)} of {len(scores.logp)} sampled tokens is not finite, the first "
                f"that of token {int(micro.token[wrong[0].cpu()])} with {scores.logp[wrong[0]].item()}: the weights "
                "have diverged, or what was sampled has probability 0 under the policy"
            )
        if not self._checked:
            check_forest(model or self.model, micro, scores, self._temperature)
            self._checked = True
        return scores

    @torch.no_grad()
    def logprobs(self, batch: Batch, entries: Tensor, model: PreTrainedModel | None = None) -> Tensor:
        """Log-probabilities of `entries` [n] under `model` (default: this policy), without gradient."""
        result = torch.zeros(len(batch), dtype=torch.float64)
        for micro in self.pack(batch, entries).micro_batches[0]:
            result[micro.entries] = self.score(micro, model).logp.double().cpu()[micro.target]
        return result[entries]

    def update(self, batch: Batch, entries: Tensor, weights: Tensor, loss: TokenLoss) -> Metrics:
        """One optimiser step on sum_i weights[i] * loss_i over `entries`.

        entries [n] int64: what has a loss; weights [len(batch)]: the share of each token (see average.py). A token that
        several trajectories share is computed once and has one loss, and one weight, for each of them.
        """
        total, clipped, entropy, weight = 0.0, 0.0, 0.0, 0.0
        packing = self.pack(batch, entries)
        for micro in packing.micro_batches[0]:
            scores = self.score(micro)
            target = micro.target.to(scores.logp.device)
            per_token = loss(micro.entries, scores.logp[target])
            share = weights[micro.entries].to(scores.logp)
            value = (per_token.loss * share).sum()
            value.backward()
            total += value.item()
            clipped += (per_token.clipped * share).sum().item()
            entropy += (scores.entropy.detach()[target] * share).sum().item()
            weight += share.sum().item()
        lr = self.optimizer.lr
        with self._weights:
            metrics = {"loss": total, "lr": lr, "grad_norm": self.optimizer.step()}
        metrics |= {
            "computed_tokens": float(packing.computed),
            "repeated_tokens": float(packing.computed - packing.distinct),
        }
        if weight:
            metrics |= {"clip_fraction": clipped / weight, "entropy": entropy / weight}
        return metrics


def train_batch(
    policy: Policy,
    batch: Batch,
    signal: Signal,
    algorithm: Algorithm,
    kl: KL,
    reference: PreTrainedModel | None,
    updates: Updates,
    seed: int,
    stale: bool = False,
) -> Metrics:
    """Update `policy` on one rollout batch; metrics are means over the optimiser steps.

    The old log-probabilities are frozen before the first step. With a single step they are the step's own, detached:
    the ratio is then exactly 1. Where the batch may be `stale` they are those of the engine, of the policy that sampled
    each token: ratio and clip then bound how far the policy moves from it. Trajectories whose advantage is 0 are not
    computed (without a KL penalty their gradient is zero) but stay in the normaliser.
    """
    steps = list(_minibatches(len(signal.advantage), updates, seed))
    matters = signal.trained & ((signal.advantage != 0) | (kl.coef > 0))
    advantage = signal.advantage[batch.trajectory]
    everything = matters[batch.trajectory].nonzero()[:, 0]
    one_pass = steps[: len(steps) // updates.updates_per_batch] if len(steps) > 1 else []
    old = batch.behaviour_logp if stale else _frozen(policy, batch, everything, one_pass)
    ref = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    if reference is not None:
        ref[everything] = policy.logprobs(batch, everything, reference)
    new = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    kl_sum = 0.0
    collected: list[Metrics] = []

    def loss(entries: Tensor, logp: Tensor) -> PerToken:
        nonlocal kl_sum
        now = logp.detach()
        first = new[entries].isnan()
        new[entries] = torch.where(first, now.double().cpu(), new[entries])
        before = now if len(steps) == 1 and not stale else old[entries].to(logp)
        if not collected and not stale:
            _check_drift((now - before).abs().max().item())
        per_token = algorithm.loss(logp, before, advantage[entries].to(logp))
        if reference is None:
            return per_token
        penalty = kl.per_token(logp, ref[entries].to(logp))
        kl_sum += penalty.detach().sum().item()
        return PerToken(per_token.loss + kl.coef * penalty, per_token.clipped)

    for members in steps:
        inside = torch.isin(batch.trajectory, members)
        entries = (inside & matters[batch.trajectory]).nonzero()[:, 0]
        if len(entries) == 0:
            continue
        weights = torch.zeros(len(batch), dtype=torch.float64)
        weights[inside] = token_weights(algorithm.average, batch.trajectory[inside])
        collected.append(policy.update(batch, entries, weights, loss))
    metrics = _mean(collected) | {"updates": float(len(collected)), "trained_tokens": float(len(everything))}
    if reference is not None and collected:
        metrics["kl"] = kl_sum / (len(everything) * updates.updates_per_batch)
    return metrics | _mismatch(batch, everything, new if len(steps) == 1 or stale else old)


def _check_drift(drift: float) -> None:
    if drift > MAX_DRIFT:
        raise RuntimeError(
            f"log-probabilities changed by {drift:.3g} before the first update of a batch: the forward pass is not "
            "reproducible"
        )


def _frozen(policy: Policy, batch: Batch, entries: Tensor, one_pass: Sequence[Tensor]) -> Tensor:
    """Log-probabilities of `entries` before the first update, else NaN, [len(batch)]; packed, and so rounded, alike."""
    found = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    for members in one_pass:
        mine = entries[torch.isin(batch.trajectory[entries], members)]
        found[mine] = policy.logprobs(batch, mine)
    return found


def _minibatches(trajectories: int, updates: Updates, seed: int) -> Iterator[Tensor]:
    """Which trajectories each optimiser step takes: another order in each pass, a function of `seed`."""
    size = updates.minibatch_trajectories or trajectories
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates.updates_per_batch):
        order = torch.randperm(trajectories, generator=generator) if size < trajectories else torch.arange(trajectories)
        yield from order.tensor_split(-(-trajectories // size))  # of nearly equal size


def _mismatch(batch: Batch, entries: Tensor, trainer_logp: Tensor) -> Metrics:
    """How far the trainer's log-probabilities are from the engine's, which sampled: 0 up to rounding when in step."""
    if len(entries) == 0:
        return {}
    difference = trainer_logp[entries] - batch.behaviour_logp[entries]
    return {
        "mismatch/max_abs_dlogp": difference.abs().max().item(),
        "mismatch/kl": (difference.exp() - 1 - difference).mean().item(),
    }


def _mean(rows: list[Metrics]) -> Metrics:
    names = {name for row in rows for name in row}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in sorted(names)}
