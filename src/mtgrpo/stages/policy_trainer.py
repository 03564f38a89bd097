"""The door between the controller of a run and what trains: arrays and numbers pass through it, no model does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.batch.forest import Batch
from mtgrpo.cluster.controller import Ranks
from mtgrpo.cluster.rank import make_trainer
from mtgrpo.config.experiment import Experiment
from mtgrpo.policy.settings import UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerConfig, TrainerRank
from mtgrpo.policy.witness import Evidence
from mtgrpo.weights.saved import Checkpoint


class PolicyTrainer:
    """Trains a model in this process, in a thread or in turn with an engine that shares the weights; or in several.

    One thing at a time is asked of it. `TrainerRank` says what those methods do that are not here.
    """

    def __init__(self, config: TrainerConfig, devices: Sequence[int] = (0,)) -> None:
        """devices: where there are several, a process of its own trains on each; see `mtgrpo.cluster`."""
        self.rank = rank = TrainerRank(config) if len(devices) == 1 else Ranks(make_trainer, config, devices)
        self.notes = rank.notes  # for the user, not shown yet
        self.train_s = 0.0  # seconds of training alone, in all
        self.begin, self.skip, self.load = rank.begin, rank.skip, rank.load
        self.weights, self.snapshot, self.take_phases = rank.weights, rank.snapshot, rank.take_phases
        self.take_record = rank.take_record
        self._moved: Callable[[], None] = lambda: None
        self._gives_way = False

    def connect(self, moved: Callable[[], None], gives_way: bool) -> None:
        """Call `moved` after each micro-batch. gives_way: between them an engine computes, which shares the weights."""
        self._moved, self._gives_way = moved, gives_way

    async def update(
        self, batch: Batch, rewards: Rewards, version: int, seed: int, evidence: Evidence | None
    ) -> Metrics:
        """Train the policy, which has seen `version` training steps, on a rollout batch. Raises RunError."""
        return await self._finish(self.rank.updating(batch, rewards, version, seed, evidence))

    async def imitate(self, batch: Batch, weights: Tensor) -> Metrics:
        """One optimiser step on demonstrations; weights [tokens]: the share of each in the loss."""
        return await self._finish(self.rank.imitating(batch, weights))

    @property
    def changes(self) -> int:
        """How often what a snapshot holds has changed."""
        return self.rank.changes

    @property
    def places(self) -> list[str]:
        """Where each of several ranks stands, for people."""
        return self.rank.places if isinstance(self.rank, Ranks) else []

    def close(self) -> None:
        """Give everything back. Raises RunError where one of several ranks has failed."""
        if isinstance(self.rank, Ranks):
            self.rank.close()

    async def _finish(self, work: CooperativeTask[Metrics]) -> Metrics:
        """The result of `work`, while the event loop goes on; an engine has its turns in this thread, if it has any."""
        work = self._watch(work)
        if not self._gives_way:
            return await asyncio.to_thread(at_once, work)
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value
            await asyncio.sleep(0)

    def _watch(self, work: CooperativeTask[Metrics]) -> CooperativeTask[Metrics]:
        while True:
            began = time.perf_counter()
            try:
                next(work)
            except StopIteration as done:
                return done.value
            finally:
                self.train_s += time.perf_counter() - began
            self._moved()
            yield


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
        optimizers={
            Stage.imitation: (experiment.sft.optimizer, experiment.sft.steps),
            Stage.reinforcement: (experiment.optimizer, experiment.trainer.steps * per_batch),
        },
        learning=update_config(experiment),
        token_budget=experiment.batch.tokens,
        temperature=experiment.sampling.temperature,
        profile=experiment.profile,
        folder=folder,
        parallel=experiment.parallel,
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
        records=experiment.record.tokens.active,
        scores_after=experiment.record.tokens.after,
    )
