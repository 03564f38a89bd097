"""The door between the controller of a run and what trains: arrays and numbers pass through it, no model does."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.batch.forest import Batch
from mtgrpo.cluster.controller import Ranks
from mtgrpo.cluster.launch import Processes
from mtgrpo.cluster.rank import make_trainer
from mtgrpo.config.experiment import Experiment
from mtgrpo.model.load import device_of_process
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.none import NoParallel
from mtgrpo.policy.settings import OptimizerSettings, UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Metrics, T, at_once
from mtgrpo.policy.trainer import Stage, TrainerConfig, TrainerRank
from mtgrpo.policy.witness import GroupEvidence
from mtgrpo.weights.checkpoint import Snapshot
from mtgrpo.weights.saved import Checkpoint


class PolicyTrainer:
    """Trains a model in this process, in a thread or in turn with an engine that shares the weights; or in several.

    One thing at a time is asked of it. `TrainerRank` says what those methods do that are not here.
    """

    def __init__(
        self,
        config: TrainerConfig,
        devices: Sequence[int] = (0,),
        reference: Sequence[int] = (),
        start: Callable[[Sequence[int], Path], Any] | None = None,
    ) -> None:
        """devices: where there are several, or `start` starts them, a process of its own trains on each.

        See `mtgrpo.cluster`. reference: those on which the reference of a KL penalty is in a process of its own each.
        """
        alone = len(devices) == 1 and start is None
        self.rank = rank = (
            TrainerRank(config) if alone else Ranks(make_trainer, config, devices, start=start or Processes)
        )
        self.notes = rank.notes  # for the user, not shown yet
        self.train_s = 0.0  # seconds of training alone, in all
        self.weights, self.take_phases, self.take_record = rank.weights, rank.take_phases, rank.take_record
        self._moved: Callable[[], None] = lambda: None
        self._gives_way = False
        self._config = config
        self._reference: Ranks | None = None
        self._refers, self._moves = False, 0  # whether the reference has begun, and how often it has moved
        number = device_of_process().index if alone else None
        on_device = partial(torch.cuda.set_device, -1 if number is None else number)  # a thread begins with the first
        self._thread = ThreadPoolExecutor(1, initializer=on_device)  # asyncio's may be busy with tools and rewards
        try:
            if reference:
                self._reference = Ranks(make_trainer, _of_reference(config, reference), reference, role="reference")
        except BaseException:
            self.close()
            raise

    def connect(self, moved: Callable[[], None], gives_way: bool) -> None:
        """Call `moved` after each micro-batch. gives_way: between them an engine computes, which shares the weights."""
        self._moved, self._gives_way = moved, gives_way

    async def update(
        self, batch: Batch, rewards: Rewards, version: int, seed: int, evidence: GroupEvidence | None
    ) -> Metrics:
        """Train the policy, which has seen `version` training steps, on a rollout batch. Raises RunError."""
        ref_logp: Tensor | None = None
        if self._reference is not None:
            ref_logp = await self.in_thread(partial(at_once, self._watch(self._reference.referring(batch, rewards))))
            self._tell_of_reference()
        metrics = await self._finish(self.rank.updating(batch, rewards, version, seed, evidence, ref_logp))
        share = self._config.learning.reference.share(version + 1)
        if self._reference is None or self._gives_way:  # an engine that shares the weights has no turn meanwhile
            self._move_reference(share)
        else:
            await self.in_thread(partial(self._move_reference, share))
        return metrics

    def begin(self, stage: Stage) -> None:
        """See `TrainerRank.begin`."""
        self.rank.begin(stage)
        self._refers = self._reference is not None and stage is Stage.reinforcement
        if self._reference is not None and self._refers:
            self._reference.begin(stage)
            self._move_reference(1.0)
            self._tell_of_reference()

    def skip(self, version: int) -> None:
        """See `TrainerRank.skip`."""
        self.rank.skip(version)
        self._move_reference(self._config.learning.reference.share(version + 1))

    def load(self, path: Path, version: int) -> None:
        """See `TrainerRank.load`."""
        self.rank.load(path, version)
        if self._reference is not None and self._refers:
            self._reference.load_reference(path)

    def snapshot(self) -> Snapshot:
        """See `TrainerRank.snapshot`."""
        own = self.rank.snapshot()
        return _WithReference(own, self._reference.snapshot()) if self._reference is not None and self._refers else own

    def _move_reference(self, share: float) -> None:
        """A share of the way to the present weights, one after the other."""
        if self._reference is not None and share:
            self._moves += 1
            for name, weight in self.rank.weights().tensors(None):
                self._reference.move(name, weight, share)

    def _tell_of_reference(self) -> None:
        if self._reference is not None:
            self.notes += [f"reference: {note}" for note in self._reference.notes]
            self._reference.notes.clear()

    async def imitate(self, batch: Batch, weights: Tensor) -> Metrics:
        """One optimiser step on demonstrations; weights [tokens]: the share of each in the loss."""
        return await self._finish(self.rank.imitating(batch, weights))

    @property
    def changes(self) -> int:
        """How often what a snapshot holds has changed."""
        return self.rank.changes + self._moves

    @property
    def places(self) -> list[str]:
        """Where each of several ranks stands, for people."""
        return [place for ranks in (self.rank, self._reference) if isinstance(ranks, Ranks) for place in ranks.places]

    def close(self) -> None:
        """Give everything back. Raises RunError where one of several ranks has failed."""
        with ExitStack() as stack:
            stack.callback(self._thread.shutdown)
            for ranks in (self.rank, self._reference):
                if isinstance(ranks, Ranks):
                    stack.callback(ranks.close)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, in the trainer's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _finish(self, work: CooperativeTask[Metrics]) -> Metrics:
        """The result of `work`, while the event loop goes on; an engine has its turns in this thread, if it has any."""
        work = self._watch(work)
        if not self._gives_way:
            return await self.in_thread(partial(at_once, work))
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value
            await asyncio.sleep(0)

    def _watch(self, work: CooperativeTask[T]) -> CooperativeTask[T]:
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


@dataclass
class _WithReference:
    """The snapshots of what is trained and of its reference, which is in other processes, as one `Snapshot`."""

    own: Snapshot
    reference: Any  # as `ModelSnapshot`

    @property
    def bytes(self) -> int:
        return self.own.bytes + self.reference.bytes

    def not_finite(self) -> str:
        return self.own.not_finite() or self.reference.not_finite()

    def save(self, folder: Path) -> Any:
        return {**self.own.save(folder), **self.reference.save_reference(folder)}


def _of_reference(config: TrainerConfig, devices: Sequence[int]) -> TrainerConfig:
    """What the reference is made by: the same model, divided where it has several devices, and never stepped."""
    divided = config.parallel.divides and len(devices) > 1
    unused = dict.fromkeys(Stage, (OptimizerSettings(), 0))
    return replace(config, parallel=FSDP2(reshard=True) if divided else NoParallel(), optimizers=unused)


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
        per_batch=per_batch,
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
        apart=bool(experiment.devices.reference.count),
    )
