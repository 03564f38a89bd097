"""One rollout batch into new weights: advantages, corrections, mini-batches, losses.

Takes tensors and knows neither engine nor event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtgrpo.advantages import advantages
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms.average import Membership, token_weights
from mtgrpo.algorithms.correction import OldPolicy, diagnostics
from mtgrpo.algorithms.kl import Estimator, Place, estimate
from mtgrpo.batch.forest import Batch
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.controls import apply_control
from mtgrpo.policy.guard import check_weights, worst_trajectory
from mtgrpo.policy.objective import Objective, Prepared
from mtgrpo.policy.reference import ReferencePolicy
from mtgrpo.policy.settings import UpdateConfig, Updates
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy, at_once
from mtgrpo.policy.witness import Evidence, choose

MISMATCH = "in a conversation the engine's log-probabilities differ from the trainer's"
WORST_MISMATCH = "mismatch/worst_trajectory"


class PolicyUpdater:
    """Trains a policy, batch by batch."""

    def __init__(self, policy: Policy, learning: UpdateConfig, reference: ReferencePolicy | None = None) -> None:
        assert (reference is not None) == (learning.kl.coef > 0), "a KL penalty compares with a reference"
        self.policy = policy
        self.kl_coef = learning.kl.coef  # as it was adapted
        self._target_met = False  # whether the KL has reached its target
        self._learning = learning
        self._reference = reference  # what a KL penalty compares with

    @property
    def changes(self) -> int:
        """How often what the next update depends on has changed."""
        return self.policy.optimizer.changes + (self._reference.moves if self._reference else 0)

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

    def training(
        self, batch: Batch, rewards: Rewards, version: int, seed: int, evidence: Evidence | None = None
    ) -> CooperativeTask[Metrics]:
        """Update the policy, which has seen `version` updates, on one rollout batch; metrics are means over its steps.

        Raises RunError where the gradient is not what the rewards ask for, of which `evidence` was laid out apart.
        `seed` decides the order of mini-batches. The old log-probabilities are frozen before the first step. With a
        single step they are the step's own, detached: the ratio is then exactly 1. See `OldPolicy` for the others.
        Trajectories whose advantage is 0 everywhere are not computed where that leaves them no gradient, but stay in
        the normaliser.
        """
        learning = self._learning
        steps = list(_minibatches(len(rewards.outcome), learning.updates, seed))
        one_pass = steps[: len(steps) // learning.updates.updates_per_batch]
        prepared = yield from self._prepare(batch, rewards, one_pass, len(steps) > 1, seed, evidence)
        objective = Objective(learning, self.policy, self.kl_coef, batch, prepared, version, len(steps))
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
            if prepared.witness is not None and len(collected) == 1:
                prepared.witness.check(weights, batch.trajectory[entries], self.policy.complete)
        metrics = _mean(collected)
        metrics |= {"updates": float(len(collected)), "trained_tokens": float(len(prepared.entries))}
        scored_before = len(steps) == 1 or prepared.before is not None  # else some tokens only after an update
        metrics |= self._describe(batch, prepared, objective.first_logp, version if scored_before else None)
        measured = metrics.get("kl", learning.kl.target)
        self._target_met |= measured >= learning.kl.target
        if self._target_met:  # before, it would only fall, and be too low when the target is met
            self.kl_coef = learning.kl.adapt(self.kl_coef, measured)
        self.move_reference(version + 1)
        if learning.exact:
            self.policy.judge(metrics.get(WORST_MISMATCH, 0.0), MISMATCH)
        return metrics

    def move_reference(self, step: int) -> None:
        """After training step number `step`, which may have had nothing to train."""
        if self._reference is not None:
            self._reference.move(self.policy.model, self._learning.reference, step)

    def _prepare(
        self,
        batch: Batch,
        rewards: Rewards,
        one_pass: list[Tensor],
        several: bool,
        seed: int,
        evidence: Evidence | None,
    ) -> CooperativeTask[Prepared]:
        """Compute the advantages, and what the losses need once for the batch, by as few forward passes as it takes."""
        learning, algorithm = self._learning, self._learning.algorithm
        rewards = learning.advantage.weigh(rewards)
        in_reward = self._reference is not None and learning.kl.place is Place.reward
        # What counts in a baseline is charged for its distance too, also where it is not trained.
        everything = (rewards.of_tokens(rewards.trained) | in_reward).nonzero()[:, 0]
        ref_logp = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        if self._reference is not None:
            ref_logp = (yield from self.policy.scoring(batch, everything, self._reference)).logp
        before: Scores | None = None
        if in_reward or algorithm.has_critic:
            before = yield from self._score_before_update(batch, everything, one_pass)
        if in_reward and before is not None:
            penalty = estimate(learning.kl.estimator, before.logp, ref_logp)
            rewards = replace(rewards, per_token=-self.kl_coef * penalty)
        # The critic says nothing of trajectories that are not trained.
        values = before.value.nan_to_num(0.0) if algorithm.has_critic and before and before.value is not None else None
        assigned = advantages(learning.advantage, algorithm, rewards, values)
        advantage = apply_control(learning.control, assigned.advantage, batch.trajectory, seed)
        first = one_pass[0].tolist()
        witness = choose(evidence, learning, rewards, values, first, seed) if evidence else None
        entries = self._with_gradient(advantage, rewards).nonzero()[:, 0]
        if not advantage[entries].isfinite().all():
            raise RunError("an advantage is not finite: see the rewards in the trajectories of this step")
        from_trainer = learning.old_policy is OldPolicy.trainer and (several or learning.correction.active)
        if before is None and (from_trainer or algorithm.top_entropy < 1):
            before = yield from self._score_before_update(batch, entries, one_pass)
        weight = self._correct(batch, entries, before)
        kept = self._choose_by_entropy(batch, entries, before)
        return Prepared(entries, advantage, assigned.target, before, ref_logp, weight, kept, witness)

    def _correct(self, batch: Batch, entries: Tensor, before: Scores | None) -> Tensor | None:
        """The factors of the off-policy correction [tokens]; None where there is none."""
        learning = self._learning
        if before is None or not learning.correction.active or learning.old_policy is not OldPolicy.trainer:
            return None
        weight = torch.ones(len(batch), dtype=torch.float64)
        logp, behaviour_logp = before.logp[entries], batch.behaviour_logp[entries]
        weight[entries] = learning.correction.weights(logp, behaviour_logp, batch.trajectory[entries])
        return weight

    def _choose_by_entropy(self, batch: Batch, entries: Tensor, before: Scores | None) -> Tensor | None:
        """Which tokens have a loss because the policy was unsure there, [tokens] bool; None = all."""
        share = self._learning.algorithm.top_entropy
        if before is None or share == 1 or not len(entries):
            return None
        entropy = _of_contexts(batch, before.entropy, entries)
        return entropy >= torch.quantile(entropy[entries], 1 - share)

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
        scores: Scores | None = None
        for part in parts:
            new = yield from self.policy.scoring(batch, part)
            for whole, some in zip(scores or (), new, strict=False):
                if whole is not None and some is not None:
                    whole[part] = some[part]
            scores = scores or new
        assert scores is not None, "a pass has a mini-batch"
        return scores

    def _describe(self, batch: Batch, prepared: Prepared, first_logp: Tensor, version: int | None) -> Metrics:
        """What one batch was like: distances to the engine and the reference, the correction, the critic.

        version: of the policy before the update, where all log-probabilities are by it.
        """
        entries, before = prepared.entries, prepared.before
        if len(entries) == 0:
            return {}
        logp = first_logp if before is None else before.logp
        log_rho = logp - batch.behaviour_logp
        metrics = diagnostics(log_rho[entries])
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
        fresh = entries[batch.version[entries] == version] if version is not None else entries[:0]
        if len(fresh):
            metrics[WORST_MISMATCH] = worst_trajectory(log_rho[fresh], batch.trajectory[fresh])
        return metrics


def _of_contexts(batch: Batch, entropy: Tensor, entries: Tensor) -> Tensor:
    """`entropy` [tokens], the same for all of `entries` that were sampled in one context.

    Where siblings are computed in several mini-batches, rounding gives each of them another one.
    """
    context = batch.forest.parent[batch.node]
    if batch.kept is not None:
        context = context * batch.kept.sets + batch.kept.number
    _, index = context.unique(return_inverse=True)
    largest = entropy.new_full((len(batch),), -torch.inf).scatter_reduce(0, index[entries], entropy[entries], "amax")
    return torch.where(entropy.isnan(), torch.nan, largest[index])


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
