"""The loss of every token of a rollout batch, update by update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.algorithms import PerToken, Tokens
from mtgrpo.algorithms.correction import OldPolicy, interpolate
from mtgrpo.algorithms.grpo import is_clamped
from mtgrpo.algorithms.kl import Place
from mtgrpo.batch.forest import Batch
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.settings import UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Policy
from mtgrpo.policy.witness import Witness

NOT_REPRODUCIBLE = (
    "the forward pass is not reproducible: before the first update of a batch its log-probabilities changed"
)


@dataclass(frozen=True)
class Prepared:
    """What is known of a rollout batch before its first update; tensors [tokens], fp64, NaN where not needed."""

    entries: Tensor  # int64, which tokens have a loss
    advantage: Tensor
    target: Tensor | None  # of the value head
    before: Scores | None  # of the policy before the first update
    ref_logp: Tensor
    weight: Tensor | None  # the correction's factors
    kept: Tensor | None  # bool, by entropy
    witness: Witness | None  # a trajectory of the first update


class Objective:
    """Gives `Policy` the loss of tokens; `begin` comes before each update."""

    def __init__(
        self,
        learning: UpdateConfig,
        policy: Policy,
        kl_coef: float,
        batch: Batch,
        prepared: Prepared,
        version: int,
        updates: int,
    ) -> None:
        """version: training steps that the policy has seen. updates: optimiser steps that the batch is used for."""
        self.first_logp = torch.full((len(batch),), torch.nan, dtype=torch.float64)  # as each token was first scored
        self._learning, self._policy = learning, policy
        self._kl_coef = kl_coef if learning.kl.place is Place.loss else 0.0
        self._batch, self._prepared, self._version = batch, prepared, version
        self._before = prepared.before if updates > 1 else None  # a single update is its own old policy
        self._old = learning.old_policy
        self._sequence: Tensor | None = None  # [tokens], of the update that has begun
        self._first = True
        self._state_weight = torch.zeros(0)  # [tokens], of this update

    def begin(self, entries: Tensor, weights: Tensor, first: bool) -> CooperativeTask[None]:
        """Another update, on `entries` [n], which `weights` [tokens] weigh; what its losses need of all of them."""
        self._first = first
        if self._prepared.target is not None:
            states = max(1, int(self._prepared.target[entries].isfinite().sum()))
            self._state_weight = 1 / (states * weights)  # so that values are averaged over the states
        algorithm = self._learning.algorithm
        if not algorithm.needs_sequence_ratio:
            return
        advantage, trajectory = self._prepared.advantage[entries], self._batch.trajectory[entries]
        log_ratio = torch.zeros_like(advantage)
        if not first or self._old is not OldPolicy.trainer:  # else the policy is the old one
            now = (yield from self._policy.scoring(self._batch, entries)).logp[entries]
            log_ratio = now - self._old_logp(entries, now, self._batch.behaviour_logp[entries].to(now))
        term = algorithm.sequence_term(log_ratio, advantage)
        _, index, counts = torch.unique(trajectory, return_inverse=True, return_counts=True)
        means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, term) / counts
        self._sequence = torch.full((len(self._batch),), torch.nan, dtype=torch.float64)
        self._sequence[entries] = means[index]

    def __call__(self, entries: Tensor, scores: Scores) -> PerToken:
        """The loss of `entries` [n]."""
        learning, prepared, logp = self._learning, self._prepared, scores.logp
        now = logp.detach()
        fresh = self.first_logp[entries].isnan()
        self.first_logp[entries] = torch.where(fresh, now.double().cpu(), self.first_logp[entries])
        behaviour = self._batch.behaviour_logp[entries].to(now)
        old = self._old_logp(entries, now, behaviour)
        if self._first and self._old is OldPolicy.trainer and len(entries):
            self._policy.judge((now - old).square().mean().sqrt().item(), NOT_REPRODUCIBLE)
        sequence = None if self._sequence is None else self._sequence[entries].to(logp)
        tokens = Tokens(logp, old, prepared.advantage[entries].to(logp), sequence)
        result = learning.algorithm.loss(tokens)
        metrics = dict(result.metrics)
        clamped = is_clamped(tokens.log_ratio if sequence is None else sequence)
        factor = self._factor(entries, old, behaviour, metrics)
        loss = result.loss * factor
        ref_logp = prepared.ref_logp[entries].to(logp) if self._kl_coef else None

        def penalty(logp: Tensor, of: Tensor | slice) -> Tensor | float:
            """What the distance to the reference adds to the loss `of` some of the entries."""
            if ref_logp is None:
                return 0.0
            return self._kl_coef * learning.kl.penalty(logp, behaviour[of], ref_logp[of])

        if self._first and prepared.witness is not None:
            scale = self._policy.optimizer.scale
            prepared.witness.watch(entries, tokens, learning.algorithm, penalty, factor, result.clipped, scale)
        if ref_logp is not None:
            loss = loss + penalty(logp, slice(None))
            clamped |= learning.kl.clamped(now, behaviour, ref_logp)
        if learning.algorithm.entropy_coef:
            loss = loss - learning.algorithm.entropy_coef * scores.entropy
        if prepared.target is not None:
            value_loss = self._value_loss(prepared.target[entries], entries, scores)
            loss = loss + value_loss
            metrics["value_loss"] = value_loss.detach()
        if clamped.any():
            metrics["log_ratio_clamped"] = clamped
        return PerToken(loss, result.clipped, metrics)

    def _old_logp(self, entries: Tensor, now: Tensor, behaviour: Tensor) -> Tensor:
        """What the ratio compares with; all [n]. now: the log-probabilities of this update, detached."""
        if self._old is OldPolicy.engine:
            return behaviour
        if self._old is OldPolicy.interpolated:
            return interpolate(behaviour, now, self._batch.version[entries].to(now.device), self._version)
        return now if self._before is None else self._before.logp[entries].to(now)

    def _factor(self, entries: Tensor, old: Tensor, behaviour: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """What masks and corrections multiply the loss of `entries` by, [n]; adds its metrics."""
        prepared, correction = self._prepared, self._learning.correction
        factor = torch.ones_like(old)
        if prepared.kept is not None:
            factor = factor * prepared.kept[entries].to(old)
        if prepared.weight is not None:
            return factor * prepared.weight[entries].to(old)
        if self._old is OldPolicy.interpolated and correction.active:
            metrics["correction/weight"] = correction.weights(
                old, behaviour, self._batch.trajectory[entries].to(old.device)
            )
            return factor * metrics["correction/weight"]
        return factor

    def _value_loss(self, target: Tensor, entries: Tensor, scores: Scores) -> Tensor:
        """Of each token [n]: 0 where its state has no target; its weighted sum is the mean over the states."""
        before = self._prepared.before
        assert scores.value is not None and before is not None and before.value is not None
        target, old = target.to(scores.value), before.value[entries].to(scores.value)
        loss = self._learning.algorithm.value_loss(scores.value, old, target.nan_to_num(0.0))
        return torch.where(target.isnan(), 0.0, loss * self._state_weight[entries].to(loss)).to(scores.logp)
