"""One rollout batch into new weights: advantages, corrections, mini-batches, losses.

Takes tensors and knows neither engine nor event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator, Assigned, advantages
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm, PerToken, Tokens
from mtgrpo.algorithms.average import Membership, token_weights
from mtgrpo.algorithms.correction import Correction, OldPolicy, diagnostics, interpolated
from mtgrpo.algorithms.kl import KL, Estimator, Place, estimate
from mtgrpo.algorithms.ratio import is_clamped
from mtgrpo.batch.forest import Batch
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.guard import check_weights, worst_trajectory
from mtgrpo.policy.reference import ReferencePolicy
from mtgrpo.policy.settings import ReferenceSettings, Updates
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy, at_once

NOT_REPRODUCIBLE = (
    "the forward pass is not reproducible: before the first update of a batch its log-probabilities changed"
)
Control = Callable[[Tensor, Tensor, int], Tensor]  # (advantage, trajectory [tokens], seed) -> advantage [tokens]


@dataclass(frozen=True)
class UpdateConfig:
    """What is learnt from a rollout batch, and how."""

    algorithm: Algorithm
    advantage: AdvantageEstimator
    kl: KL = field(default_factory=KL)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    correction: Correction = field(default_factory=Correction)
    updates: Updates = field(default_factory=Updates)
    length: int = 1  # of average=constant, in tokens
    stale: bool = False  # whether older weights may have sampled a batch
    control: Control | None = None  # what a control experiment does to the advantages


@dataclass(frozen=True)
class _Prepared:
    """What is known of a rollout batch before its first update; tensors [tokens], fp64, NaN where not needed."""

    entries: Tensor  # int64, which tokens have a loss
    advantage: Tensor
    target: Tensor | None  # of the value head
    before: Scores | None  # of the policy before the first update
    ref_logp: Tensor
    weight: Tensor | None  # the correction's factors
    kept: Tensor | None  # bool, by entropy


class PolicyUpdater:
    """Trains a policy, batch by batch."""

    def __init__(self, policy: Policy, learning: UpdateConfig, reference: ReferencePolicy | None = None) -> None:
        assert (reference is not None) == (learning.kl.coef > 0), "a KL penalty compares with a reference"
        self.policy = policy
        self.kl_coef = learning.kl.coef  # as it was adapted
        self._target_met = False  # whether the KL has reached its target
        self._learning = learning
        self._reference = reference  # what a KL penalty compares with

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, beside the weights and the batch."""
        return {
            "optimizer": self.policy.optimizer.state_dict(),
            "reference": self._reference.weights if self._reference else {},
            "kl": [self._learning.kl.coef, self.kl_coef, self._target_met],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the settings that are given now.

        Raises ConfigError where there was no KL penalty and is one now.
        """
        self.policy.optimizer.load_state_dict(state["optimizer"])
        if self._reference is None:
            return
        if not state["reference"]:
            raise ConfigError("kl.coef was 0, so the reference was not kept: resume with kl.coef=0, or begin anew")
        self._reference.load(state["reference"])
        first, adapted, target_met = state["kl"]
        if first == self._learning.kl.coef:
            self.kl_coef, self._target_met = adapted, target_met

    def train(self, batch: Batch, rewards: Rewards, version: int, seed: int) -> Metrics:
        """`training`, at once."""
        return at_once(self.training(batch, rewards, version, seed))

    def training(self, batch: Batch, rewards: Rewards, version: int, seed: int) -> CooperativeTask[Metrics]:
        """Update the policy, which has seen `version` updates, on one rollout batch; metrics are means over its steps.

        `seed` decides the order of mini-batches. The old log-probabilities are frozen before the first step. With a
        single step they are the step's own, detached: the ratio is then exactly 1. See `OldPolicy` for the others.
        Trajectories whose advantage is 0 everywhere are not computed where that leaves them no gradient, but stay in
        the normaliser.
        """
        learning = self._learning
        steps = list(_minibatches(len(rewards.outcome), learning.updates, seed))
        one_pass = steps[: len(steps) // learning.updates.updates_per_batch]
        prepared = yield from self._prepare(batch, rewards, one_pass, len(steps) > 1, seed)
        objective = _Objective(learning, self.policy, self.kl_coef, batch, prepared, version, len(steps) == 1)
        members = Membership(batch.trajectory, rewards.group[batch.trajectory], batch.segment)
        collected: list[Metrics] = []
        for chosen in steps:
            inside = torch.isin(batch.trajectory, chosen)
            entries = prepared.entries[inside[prepared.entries]]
            if len(entries) == 0:
                continue
            weights = torch.zeros(len(batch), dtype=torch.float64)
            weights[inside] = token_weights(learning.algorithm.average, members[inside], learning.length)
            check_weights(weights, learning.algorithm.average)
            yield from objective.begin(entries, weights, first=not collected)
            collected.append((yield from self.policy.updating(batch, entries, weights, objective)))
        metrics = _mean(collected)
        metrics |= {"updates": float(len(collected)), "trained_tokens": float(len(prepared.entries))}
        metrics |= self._describe(batch, prepared, objective.first_logp)
        if len(steps) == 1 or prepared.before is not None:  # else some tokens were first scored after an update
            metrics |= _mismatch_of_trajectories(batch, prepared, objective.first_logp, version)
        measured = metrics.get("kl", learning.kl.target)
        self._target_met |= measured >= learning.kl.target
        if self._target_met:  # before, it would only fall, and be too low when the target is met
            self.kl_coef = learning.kl.adapted(self.kl_coef, measured)
        self.move_reference(version + 1)
        return metrics

    def move_reference(self, step: int) -> None:
        """After training step number `step`, which may have had nothing to train."""
        if self._reference is not None:
            self._reference.move(self.policy.model, self._learning.reference, step)

    def _prepare(
        self, batch: Batch, rewards: Rewards, one_pass: list[Tensor], several: bool, seed: int
    ) -> CooperativeTask[_Prepared]:
        """AdvantageEstimator, and what has to be computed once per batch."""
        learning, algorithm = self._learning, self._learning.algorithm
        rewards = learning.advantage.weighted(rewards)
        trained = rewards.of_tokens(rewards.trained)
        in_reward = self._reference is not None and learning.kl.place is Place.reward
        # What counts in a baseline is charged for its distance too, also where it is not trained.
        everything = (trained | in_reward).nonzero()[:, 0]
        ref_logp = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        if self._reference is not None:
            ref_logp = (yield from self.policy.scoring(batch, everything, self._reference)).logp
        before: Scores | None = None
        if in_reward or algorithm.has_critic:
            before = yield from self._score_before_update(batch, everything, one_pass)
        if in_reward and before is not None:
            penalty = estimate(learning.kl.estimator, before.logp, ref_logp)
            rewards = replace(rewards, per_token=-self.kl_coef * penalty)
        assigned = self._assign(batch, rewards, before, seed)
        entries = self._with_gradient(assigned.advantage, rewards).nonzero()[:, 0]
        if not assigned.advantage[entries].isfinite().all():
            raise RunError("an advantage is not finite: see the rewards in the trajectories of this step")
        correction = learning.correction
        old = correction.resolved(learning.stale, algorithm.uses_behaviour_policy)
        weigh = correction.active and old is OldPolicy.trainer
        if before is None and ((several and old is OldPolicy.trainer) or weigh or algorithm.top_entropy < 1):
            before = yield from self._score_before_update(batch, entries, one_pass)
        weight = kept = None
        if weigh and before is not None:
            weight = torch.ones(len(batch), dtype=torch.float64)
            trajectory = batch.trajectory[entries]
            weight[entries] = correction.weights(before.logp[entries], batch.behaviour_logp[entries], trajectory)
        if algorithm.top_entropy < 1 and before is not None and len(entries):
            kept = before.entropy >= torch.quantile(before.entropy[entries], 1 - algorithm.top_entropy)
        return _Prepared(entries, assigned.advantage, assigned.target, before, ref_logp, weight, kept)

    def _assign(self, batch: Batch, rewards: Rewards, before: Scores | None, seed: int) -> Assigned:
        """The advantages that the losses get, and targets for the value head."""
        learning, values = self._learning, None
        if learning.algorithm.has_critic and before is not None and before.value is not None:
            values = before.value.nan_to_num(0.0)  # of trajectories that are not trained
        assigned = advantages(learning.advantage, learning.algorithm, rewards, values)
        if not learning.control:
            return assigned
        return replace(assigned, advantage=learning.control(assigned.advantage, batch.trajectory, seed))

    def _with_gradient(self, advantage: Tensor, rewards: Rewards) -> Tensor:
        """Which tokens are computed: those of trajectories with a gradient, whole; [tokens] bool."""
        learning = self._learning
        in_loss = self._reference is not None and learning.kl.place is Place.loss
        matters = rewards.trained
        if not (in_loss or learning.algorithm.always_has_gradient):
            trajectory = rewards.trajectory[rewards.turn]
            matters = matters & torch.isin(torch.arange(len(matters)), trajectory[advantage != 0])
        return rewards.of_tokens(matters)

    def _score_before_update(self, batch: Batch, entries: Tensor, one_pass: list[Tensor]) -> CooperativeTask[Scores]:
        """The scores of `entries` before the first update; packed, and so rounded, as the updates will be."""
        parts = [entries[torch.isin(batch.trajectory[entries], members)] for members in one_pass]
        scored: list[Scores] = []
        for part in parts:
            scored.append((yield from self.policy.scoring(batch, part)))
        found = scored[0]
        for part, scores in zip(parts[1:], scored[1:], strict=True):
            for whole, new in zip(found, scores, strict=True):
                if whole is not None and new is not None:
                    whole[part] = new[part]
        return found

    def _describe(self, batch: Batch, prepared: _Prepared, first_logp: Tensor) -> Metrics:
        """What one batch was like: distances to the engine and the reference, the correction, the critic."""
        entries, before = prepared.entries, prepared.before
        if len(entries) == 0:
            return {}
        logp = first_logp if before is None else before.logp
        metrics = diagnostics((logp - batch.behaviour_logp)[entries])
        if self._reference is not None:
            # By k1, whatever the penalty is: rare tokens make the mean of k3 several times too large in single batches.
            metrics["kl"] = estimate(Estimator.k1, logp[entries], prepared.ref_logp[entries]).mean().item()
            metrics["kl_coef"] = self.kl_coef
        if prepared.weight is not None:
            weight = prepared.weight[entries]
            metrics |= {
                "correction/rejected": (weight == 0).double().mean().item(),
                "correction/weight": weight.mean().item(),
            }
        if prepared.target is not None and before is not None and before.value is not None:
            states = entries[prepared.target[entries].isfinite()]
            target, error = prepared.target[states], (prepared.target - before.value)[states]
            if len(states) > 1 and target.var() > 0:
                metrics["explained_variance"] = 1 - (error.var() / target.var()).item()
        return metrics


class _Objective:
    """The loss of every token of a rollout batch, update by update."""

    def __init__(
        self,
        learning: UpdateConfig,
        policy: Policy,
        kl_coef: float,
        batch: Batch,
        prepared: _Prepared,
        version: int,
        single: bool,
    ) -> None:
        self.first_logp = torch.full((len(batch),), torch.nan, dtype=torch.float64)  # as each token was first scored
        self._learning, self._policy, self._kl_coef = learning, policy, kl_coef
        self._batch, self._prepared, self._version, self._single = batch, prepared, version, single
        self._old = learning.correction.resolved(learning.stale, learning.algorithm.uses_behaviour_policy)
        self._sequence: Tensor | None = None  # [tokens], of the update that has begun
        self._first = True
        self._state_weight = torch.zeros(0)  # [tokens], of this update

    def begin(self, entries: Tensor, weights: Tensor, first: bool) -> CooperativeTask[None]:
        """Another update, on `entries` [n], which `weights` [tokens] weigh; what its losses need of all of them."""
        self._first = first
        if self._prepared.target is not None:
            states = max(1, int(self._prepared.target[entries].isfinite().sum()))
            self._state_weight = 1 / (states * weights)  # so that values are averaged over the states
        algorithm, batch = self._learning.algorithm, self._batch
        if not algorithm.needs_sequence_ratio:
            return
        advantage, trajectory = self._prepared.advantage[entries], batch.trajectory[entries]
        log_ratio = torch.zeros_like(advantage)
        if not first or self._old is not OldPolicy.trainer:  # else the policy is the old one
            now = (yield from self._policy.scoring(batch, entries)).logp[entries]
            log_ratio = now - self._old_logp(entries, now)
        term = algorithm.sequence_term(log_ratio, advantage)
        _, index, counts = torch.unique(trajectory, return_inverse=True, return_counts=True)
        self._sequence = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        self._sequence[entries] = (torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, term) / counts)[
            index
        ]

    def _old_logp(self, entries: Tensor, now: Tensor) -> Tensor:
        """What the ratio compares with; `now` [n] are the log-probabilities of this update, detached."""
        behaviour = self._batch.behaviour_logp[entries].to(now)
        if self._old is OldPolicy.engine:
            return behaviour
        if self._old is OldPolicy.interpolated:
            return interpolated(behaviour, now, self._batch.version[entries].to(now.device), self._version)
        before = self._prepared.before
        return now if before is None or self._single else before.logp[entries].to(now)

    def __call__(self, entries: Tensor, scores: Scores) -> PerToken:
        """The loss of `entries` [n]."""
        learning, prepared, logp = self._learning, self._prepared, scores.logp
        now = logp.detach()
        fresh = self.first_logp[entries].isnan()
        self.first_logp[entries] = torch.where(fresh, now.double().cpu(), self.first_logp[entries])
        old = self._old_logp(entries, now)
        if self._first and self._old is OldPolicy.trainer and len(entries):
            self._policy.judge(_rms(now - old), NOT_REPRODUCIBLE)
        sequence = None if self._sequence is None else self._sequence[entries].to(logp)
        tokens = Tokens(logp, old, prepared.advantage[entries].to(logp), sequence)
        found = learning.algorithm.loss(tokens)
        loss, metrics = found.loss, dict(found.metrics)
        clamped = is_clamped(tokens.log_ratio if sequence is None else sequence)
        if prepared.kept is not None:
            loss = loss * prepared.kept[entries].to(logp)
        if prepared.weight is not None:
            loss = loss * prepared.weight[entries].to(logp)
        elif self._old is OldPolicy.interpolated and learning.correction.active:
            behaviour, trajectory = self._batch.behaviour_logp[entries].to(now), self._batch.trajectory[entries]
            metrics["correction/weight"] = learning.correction.weights(old, behaviour, trajectory.to(now.device))
            loss = loss * metrics["correction/weight"]
        if self._kl_coef and learning.kl.place is Place.loss:
            ref_logp = prepared.ref_logp[entries].to(logp)
            behaviour = self._batch.behaviour_logp[entries].to(logp)
            loss = loss + self._kl_coef * learning.kl.penalty(logp, behaviour, ref_logp)
            clamped |= learning.kl.clamped(now, behaviour, ref_logp)
        if learning.algorithm.entropy_coef:
            loss = loss - learning.algorithm.entropy_coef * scores.entropy
        if prepared.target is not None:
            value_loss = self._value_loss(prepared.target[entries], entries, scores)
            loss = loss + value_loss
            metrics["value_loss"] = value_loss.detach()
        if clamped.any():
            metrics["log_ratio_clamped"] = clamped
        return PerToken(loss, found.clipped, metrics)

    def _value_loss(self, target: Tensor, entries: Tensor, scores: Scores) -> Tensor:
        """Of each token [n]: 0 where its state has no target; its weighted sum is the mean over the states."""
        before = self._prepared.before
        assert scores.value is not None and before is not None and before.value is not None
        wanted, old = target.to(scores.value), before.value[entries].to(scores.value)
        found = self._learning.algorithm.value_loss(scores.value, old, wanted.nan_to_num(0.0))
        return torch.where(wanted.isnan(), 0.0, found * self._state_weight[entries].to(found)).to(scores.logp)


def _mismatch_of_trajectories(batch: Batch, prepared: _Prepared, first_logp: Tensor, version: int) -> Metrics:
    """How far engine and trainer are apart in what the present weights have sampled of each trajectory."""
    logp = first_logp if prepared.before is None else prepared.before.logp
    fresh = prepared.entries[batch.version[prepared.entries] == version]
    if len(fresh) == 0:
        return {}
    log_rho = (logp - batch.behaviour_logp)[fresh]
    return {"mismatch/worst_trajectory": worst_trajectory(log_rho, batch.trajectory[fresh])}


def _rms(differences: Tensor) -> float:
    return differences.square().mean().sqrt().item()


def _minibatches(trajectories: int, updates: Updates, seed: int) -> Iterator[Tensor]:
    """Which trajectories each optimiser step takes: another order in each pass, a function of `seed`."""
    size = updates.minibatch_trajectories or trajectories
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates.updates_per_batch):
        order = torch.randperm(trajectories, generator=generator) if size < trajectories else torch.arange(trajectories)
        yield from order.tensor_split(-(-trajectories // size))  # of nearly equal size


def _mean(rows: list[Metrics]) -> Metrics:
    names = {name for row in rows for name in row}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in sorted(names)}
