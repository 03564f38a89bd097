"""The door between the controller of a run and what trains: arrays and numbers pass through it, no model does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.batch.forest import Batch
from mtgrpo.config.experiment import Experiment
from mtgrpo.policy.settings import UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerConfig, TrainerRank
from mtgrpo.policy.witness import Evidence
from mtgrpo.weights.checkpoint import Checkpoint, Snapshot
from mtgrpo.weights.source import WeightSource


class PolicyTrainer(Protocol):
    """Trains a model wherever that is. One thing at a time is asked of it."""

    notes: list[str]  # for the user, not shown yet
    train_s: float  # seconds of training alone, in all

    def connect(self, moved: Callable[[], None], gives_way: bool) -> None:
        """Call `moved` after each micro-batch. gives_way: between them an engine computes, which shares the weights."""

    def begin(self, stage: Stage) -> None:
        """Train by the settings of `stage` from here on."""

    async def update(
        self, batch: Batch, rewards: Rewards, version: int, seed: int, evidence: Evidence | None
    ) -> Metrics:
        """Train the policy, which has seen `version` training steps, on a rollout batch. Raises RunError."""
        ...

    def skip(self, version: int) -> None:
        """A training step without anything to train."""

    async def imitate(self, batch: Batch, weights: Tensor) -> Metrics:
        """One optimiser step on demonstrations; weights [tokens]: the share of each in the loss."""
        ...

    def weights(self) -> WeightSource:
        """The present weights."""
        ...

    @property
    def changes(self) -> int:
        """How often what a snapshot holds has changed."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of all that the stage goes on from, for another thread to write; the one before is written by now."""
        ...

    def load(self, path: Path, version: int) -> None:
        """Go on with the stage from checkpoint `path`, whose weights are loaded already. Raises ConfigError."""

    def take_phases(self) -> dict[str, float]:
        """The seconds of each phase of training since this was asked last; see `Profiler`."""
        ...

    def close(self) -> None:
        """Give everything back."""


class InProcess:
    """A trainer in this process: in a thread of its own, or in turn with an engine that shares the weights."""

    def __init__(self, rank: TrainerRank) -> None:
        self.rank = rank
        self.notes = rank.notes
        self.train_s = 0.0
        self.begin, self.skip, self.load = rank.begin, rank.skip, rank.load
        self.weights, self.snapshot, self.take_phases = rank.weights, rank.snapshot, rank.take_phases
        self._moved: Callable[[], None] = lambda: None
        self._gives_way = False

    def connect(self, moved: Callable[[], None], gives_way: bool) -> None:
        """See `PolicyTrainer`, as all of these."""
        self._moved, self._gives_way = moved, gives_way

    async def update(
        self, batch: Batch, rewards: Rewards, version: int, seed: int, evidence: Evidence | None
    ) -> Metrics:
        return await self._finish(self.rank.updating(batch, rewards, version, seed, evidence))

    async def imitate(self, batch: Batch, weights: Tensor) -> Metrics:
        return await self._finish(self.rank.imitating(batch, weights))

    @property
    def changes(self) -> int:
        return self.rank.changes

    def close(self) -> None:
        return

    async def _finish(self, work: CooperativeTask[Metrics]) -> Metrics:
        """The result of `work`, while the event loop goes on; an engine has its turns in this thread, if it has any."""
        work = self._watched(work)
        began = time.perf_counter()
        if not self._gives_way:
            metrics = await asyncio.to_thread(at_once, work)
            self.train_s += time.perf_counter() - began
            return metrics
        while True:
            try:
                next(work)
            except StopIteration as done:
                self.train_s += time.perf_counter() - began
                return done.value
            self.train_s += time.perf_counter() - began
            await asyncio.sleep(0)
            began = time.perf_counter()

    def _watched(self, work: CooperativeTask[Metrics]) -> CooperativeTask[Metrics]:
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value
            self._moved()
            yield


def open_trainer(config: TrainerConfig) -> PolicyTrainer:
    """A trainer with its model."""
    return InProcess(TrainerRank(config))


def trainer_config(
    experiment: Experiment, stop_ids: list[int], resumed: Checkpoint | None, folder: Path
) -> TrainerConfig:
    """What the trainer of a run must know; of one that is resumed it loads the weights of the checkpoint."""
    trajectories = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    size = experiment.trainer.minibatch_trajectories or trajectories
    per_batch = -(-trajectories // size) * experiment.trainer.updates_per_batch
    return TrainerConfig(
        model=replace(experiment.model, name=str(resumed.path)) if resumed else experiment.model,
        seed=experiment.seed,
        stop_ids=stop_ids,
        imitation=experiment.sft.optimizer,
        imitation_steps=experiment.sft.steps,
        optimizer=experiment.optimizer,
        optimizer_steps=experiment.trainer.steps * per_batch,
        learning=update_config(experiment),
        token_budget=experiment.batch.tokens,
        temperature=experiment.sampling.temperature,
        profile=experiment.profile,
        folder=folder,
    )


def update_config(experiment: Experiment) -> UpdateConfig:
    """What a run learns from its rollout batches."""
    return UpdateConfig(
        algorithm=experiment.algorithm,
        advantage=experiment.advantage,
        kl=experiment.kl,
        reference=experiment.reference,
        correction=experiment.correction,
        updates=experiment.trainer,
        length=experiment.algorithm.average_length or experiment.rollout.max_trajectory_tokens,
        stale=experiment.rollout.max_staleness > 0,
        exact=experiment.engine.exact,
        control=experiment.debug.advantages,
    )
