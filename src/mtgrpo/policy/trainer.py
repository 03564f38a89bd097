"""What trains, in a process that has the model: arrays in, new weights and numbers out. It knows no event loop."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import Batch
from mtgrpo.model.attention import describe_attention
from mtgrpo.model.liger import use_liger
from mtgrpo.model.load import load_model
from mtgrpo.model.out_of_memory import explained
from mtgrpo.model.rounding import Reference
from mtgrpo.model.scorer import Scores
from mtgrpo.model.settings import ModelSettings
from mtgrpo.model.sharding import part_like
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.none import NoParallel
from mtgrpo.policy.gradient_check import check_gradient
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.optimizer import Optimizer, note_of_lr
from mtgrpo.policy.settings import OptimizerSettings, UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy
from mtgrpo.policy.updater import PolicyUpdater, ReferencePolicy
from mtgrpo.policy.witness import GroupEvidence
from mtgrpo.profile import Profile, Profiler
from mtgrpo.weights.checkpoint import ModelSnapshot, read_training
from mtgrpo.weights.source import ModelWeights


class Stage(Enum):
    """What is learned from."""

    imitation = "imitation"  # demonstrations
    reinforcement = "reinforcement"  # rewards


@dataclass(frozen=True)
class TrainerConfig:
    """All that a trainer must know of a run; it can be sent to another process."""

    model: ModelSettings
    seed: int
    stop_ids: Sequence[int]  # tokens at which the model ends its turns
    optimizers: Mapping[Stage, tuple[OptimizerSettings, int]]  # with the number of its steps, for the schedule
    per_batch: int  # optimiser steps on a whole rollout batch
    learning: UpdateConfig
    token_budget: int
    temperature: float
    profile: Profile
    folder: Path  # of the run, for traces
    parallel: Parallel = field(default_factory=NoParallel)  # how several ranks share the work


class TrainerRank:
    """Loads a model and trains it, one stage after the other. Work is a generator that pauses between micro-batches."""

    def __init__(self, config: TrainerConfig, parallel: ParallelLayout | None = None) -> None:
        """`parallel`: how the ranks share the model. All of them are asked the same in the same order, and the first
        answers for all.
        """
        self.parallel = parallel or ParallelLayout()
        with explained("loading"):
            self.model = load_model(config.model, config.seed)
            kernels = use_liger(self.model)
        self.model.generation_config.eos_token_id = list(config.stop_ids)
        self.notes = [describe_attention(self.model), *kernels]  # for the user, not shown yet
        if self.parallel.aligned:  # a part of the model is not enough for this
            self.notes += check_gradient(self.model, self.parallel.agreed)
        self.scorer = self.parallel.wrap(self.model)
        self.policy: Policy | None = None
        self._config = config
        self._profiler = Profiler(config.profile)
        self._updater: PolicyUpdater | None = None
        self._version = 0  # training steps that the weights have seen
        self._earlier = (0, 0)  # changes of the weights, and of all, in the stages before
        self._snapshot: ModelSnapshot | None = None

    def begin(self, stage: Stage) -> None:
        """Train by the settings of `stage` from here on; a reference policy has the weights of this moment."""
        config, model = self._config, self.model
        self._earlier = self._weight_changes, self.changes + 1
        self._updater = self.policy = None  # their moments and reference are given back first
        settings, steps = config.optimizers[stage]
        self.parallel.reshard()
        optimizer = self.parallel.make_optimizer(model, settings, steps)
        if stage is Stage.imitation:
            self.policy = Policy(model, optimizer, config.token_budget, 1.0, None, self.parallel)
        else:
            self.policy = Policy(
                model, optimizer, config.token_budget, config.temperature, self._profiler, self.parallel
            )
            kept = config.learning.kl.coef and not config.learning.apart
            reference = ReferencePolicy(model) if kept else None
            self._updater = PolicyUpdater(self.policy, config.learning, reference)
            if note := note_of_lr(model, settings.lr):
                self.notes.append(note)
        self.policy.notes = self.notes

    @property
    def place(self) -> tuple[str, int]:
        """The phase that began last, and how many did in this stage; another thread may ask."""
        profiler = self.policy.profiler if self.policy else self._profiler
        return profiler.phase, profiler.passes

    @property
    def _trained(self) -> PolicyUpdater | Optimizer | None:
        """What has the state of the stage, beside the weights."""
        return self._updater or (self.policy.optimizer if self.policy else None)

    @property
    def _weight_changes(self) -> int:
        return self._earlier[0] + (self.policy.optimizer.changes if self.policy else 0)

    @property
    def changes(self) -> int:
        """How often what a snapshot holds has changed."""
        return self._earlier[1] + (self._trained.changes if self._trained else 0)

    def updating(
        self,
        batch: Batch,
        rewards: Rewards,
        version: int,
        seed: int,
        evidence: GroupEvidence | None,
        ref_logp: Tensor | None = None,
    ) -> CooperativeTask[Metrics]:
        """Train the policy, which has seen `version` training steps, on a rollout batch; see `PolicyUpdater`."""
        updater = self._updater
        assert updater is not None, "the stage has begun"
        updater.policy.optimizer.catch_up(version * self._config.per_batch)
        traced = self._profiler.trace(version + 1, self._config.folder) if self.parallel.rank == 0 else nullcontext()
        with traced:
            metrics = yield from updater.training(batch, rewards, version, seed, evidence, ref_logp)
        if not metrics["updates"]:
            updater.policy.optimizer.check.check_unchanged()
        self._version = version + 1
        return {f"policy/{name}": value for name, value in metrics.items()}

    def skip(self, version: int) -> None:
        """A training step without anything to train. Raises RunError where the weights are not those of the last."""
        assert self._updater is not None, "the stage has begun"
        self._updater.move_reference(version + 1)
        self._updater.policy.optimizer.check.check_unchanged()
        self._version = version + 1

    def imitating(self, batch: Batch, weights: Tensor) -> CooperativeTask[Metrics]:
        """One optimiser step on the cross-entropy of all tokens of `batch`, weighted by `weights` [tokens]."""
        assert self.policy is not None, "a stage has begun"
        return self.policy.updating(batch, torch.arange(len(batch)), weights, negative_log_likelihood)

    def referring(self, batch: Batch, rewards: Rewards) -> CooperativeTask[Tensor]:
        """As the reference of a KL penalty: what it says of `UpdateConfig.compared`; [tokens] fp64, else NaN."""
        assert self.policy is not None, "a stage has begun"
        return (yield from self.policy.scoring(batch, self._config.learning.compared(rewards))).logp

    @torch.no_grad()
    def move(self, name: str, weight: Tensor, share: float) -> None:
        """As the reference: go a share of the way to the whole `weight` of that name, if it is trained."""
        own = dict(self.model.named_parameters()).get(name)
        if own is not None and own.requires_grad:
            own.lerp_(part_like(weight.to(own.device), own), share)

    def load_reference(self, path: Path) -> None:
        """As the reference: have the weights that it had in checkpoint `path`."""
        for name, weight in read_training(path)["reference"].items():
            self.move(name, weight, 1.0)

    def weights(self) -> ModelWeights:
        """The present weights."""
        self.parallel.reshard()
        return ModelWeights(
            self.model, self._version, lambda: self._weight_changes, self._plain_pass, self.parallel.rank == 0
        )

    def _plain_pass(self, context: Sequence[int]) -> Reference:
        found = self.scorer.reference(context)
        self.parallel.reshard()  # nothing stays gathered while others sample
        return found

    def snapshot(self) -> ModelSnapshot:
        """A copy of all that the stage goes on from; the memory of the one before, written by now, is used again."""
        state = self._trained.state_dict() if self._trained else {}
        self.parallel.reshard()
        self._snapshot = ModelSnapshot(self.model, state, self._snapshot, self.parallel.rank == 0)
        return self._snapshot

    def load(self, path: Path, version: int) -> None:
        """Go on with the stage from checkpoint `path`, whose weights are loaded. Raises ConfigError."""
        assert self._trained is not None, "a stage has begun"
        self._trained.load_state_dict(read_training(path))
        self._version = version

    def take_record(self) -> dict[str, Tensor]:
        """What the tokens of the last batch were paid, see `Objective.record`; nothing of it stays."""
        assert self._updater is not None, "the stage has begun"
        record, self._updater.record = self._updater.record, {}
        return record

    def take_phases(self) -> dict[str, float]:
        """The seconds of each phase of training since this was asked last."""
        return self._profiler.take()


def negative_log_likelihood(_entries: Tensor, scores: Scores) -> PerToken:
    """Cross-entropy of the demonstrations, per token."""
    return PerToken(-scores.logp, torch.zeros_like(scores.logp, dtype=torch.bool))
