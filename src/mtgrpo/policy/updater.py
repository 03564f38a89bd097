"""One rollout batch into new weights: mini-batches, their updates, and the penalty for leaving the reference.

Takes tensors and knows neither engine nor event loop.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms.average import token_weights
from mtgrpo.batch.forest import Batch
from mtgrpo.errors import ConfigError
from mtgrpo.model.sharding import part_like
from mtgrpo.policy.guard import check_weights
from mtgrpo.policy.objective import WORST_MISMATCH, Objective
from mtgrpo.policy.settings import ReferenceSettings, UpdateConfig, Updates
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy
from mtgrpo.policy.witness import GroupEvidence
from mtgrpo.weights.saved import NO_REFERENCE

MISMATCH = "in a conversation the engine's log-probabilities differ from the trainer's"


class ReferencePolicy:
    """What a KL penalty compares with: frozen, refreshed now and then, or a moving average.

    A copy of the weights of `model` that are trained, by name. It has no model: the policy's runs with these.
    Weights that are not trained are not copied: with LoRA it is the adapters alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights: dict[str, Tensor] = {
            name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad
        }
        self.moves = 0

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go back to `weights`, which were saved."""
        for name, weight in weights.items():
            self.weights[name].copy_(part_like(weight, self.weights[name]))

    @torch.no_grad()
    def move(self, model: PreTrainedModel, settings: ReferenceSettings, step: int) -> None:
        """Move towards `model` after training step number `step` (from 1), as `settings` say."""
        if share := settings.share(step):
            self.moves += 1
            policy = dict(model.named_parameters())
            for name, weight in self.weights.items():
                weight.lerp_(policy[name], share)


class PolicyUpdater:
    """Trains a policy, batch by batch."""

    def __init__(self, policy: Policy, learning: UpdateConfig, reference: ReferencePolicy | None = None) -> None:
        needed = learning.kl.coef > 0 and not learning.apart
        assert (reference is not None) == needed, "a KL penalty compares with a reference"
        self.policy = policy
        self.kl_coef = learning.kl.coef  # as it was adapted
        self._target_met = False  # whether the KL has reached its target
        self._learning = learning
        self._reference = reference  # what a KL penalty compares with
        self.record: dict[str, Tensor] = {}  # what the tokens of the last batch were paid; see `Objective.record`

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
        """Continue from `state`, with the present settings. Raises ConfigError for a KL penalty that is new."""
        self.policy.optimizer.load_state_dict(state["optimizer"])
        if not self._learning.kl.coef:
            return
        if not state["reference"]:
            raise ConfigError(NO_REFERENCE)
        if self._reference is not None:
            self._reference.load(state["reference"])
        first, adapted, target_met = state["kl"]
        if first == self._learning.kl.coef:
            self.kl_coef, self._target_met = adapted, target_met

    def training(
        self,
        batch: Batch,
        rewards: Rewards,
        version: int,
        seed: int,
        evidence: GroupEvidence | None = None,
        ref_logp: Tensor | None = None,
    ) -> CooperativeTask[Metrics]:
        """Update the policy, which has seen `version` updates, on one rollout batch; metrics are means over its steps.

        Raises RunError where the gradient is not what the rewards ask for, of which `evidence` was laid out apart.
        `seed` decides the order of mini-batches. ref_logp [tokens]: what a reference says that is apart. The old
        log-probabilities are frozen before the first step. With a single step they are the step's own, detached: the
        ratio is then exactly 1. See `OldPolicy` for the others. Trajectories whose advantage is 0 everywhere are not
        computed where that leaves them no gradient, but stay in the normaliser.
        """
        learning = self._learning
        steps = list(_minibatches(len(rewards.outcome), learning.updates, seed))
        reference = self._reference.weights if self._reference and ref_logp is None else ref_logp
        objective = Objective(learning, self.policy, reference, self.kl_coef, batch, steps, version)
        yield from objective.prepare(rewards, seed, evidence)
        group, collected = rewards.group[batch.trajectory], list[Metrics]()
        for chosen in steps:
            inside = torch.isin(batch.trajectory, chosen)
            entries = objective.entries[inside[objective.entries]]
            if len(entries) == 0:
                continue
            weights = torch.zeros(len(batch), dtype=torch.float64)
            weights[inside] = token_weights(
                learning.algorithm.average,
                batch.trajectory[inside],
                group[inside],
                batch.segment[inside],
                learning.length,
            )
            check_weights(weights, learning.algorithm.average)
            yield from objective.begin(entries, weights, first=not collected)
            update = self.policy.updating(batch, entries, weights, objective, objective.end_passes)
            collected.append((yield from update))
            if objective.witness is not None and len(collected) == 1:
                objective.witness.check(weights, batch.trajectory[entries])
        later = [row.pop("ratio") ** 2 / row.pop("squared_ratio") for row in collected if "ratio" in row]
        metrics = _mean(collected) | {"updates": float(len(collected))} | ({"ess": min(later)} if later else {})
        metrics |= {"trained_tokens": float(len(objective.entries)), **objective.describe()}
        self.record = objective.record() if learning.records else {}
        if learning.scores_after:
            self.record["after"] = (yield from self.policy.scoring(batch, objective.entries)).logp
        if learning.kl.target and "kl" in metrics:  # else nothing was measured
            self._target_met |= metrics["kl"] >= learning.kl.target
            if self._target_met:  # before, it would only fall, and be too low when the target is met
                self.kl_coef = learning.kl.adapt(self.kl_coef, metrics["kl"])
        self.move_reference(version + 1)
        if learning.exact:
            self.policy.judge(metrics.get(WORST_MISMATCH, 0.0), MISMATCH)
        return metrics

    def move_reference(self, step: int) -> None:
        """After training step number `step`, which may have had nothing to train."""
        if self._reference is not None:
            self._reference.move(self.policy.model, self._learning.reference, step)


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
