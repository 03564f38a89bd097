"""A rollout batch becomes an update: the event loop lays it out as tensors, the policy trains, the engine follows."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from mtgrpo.advantages.rewards import comparable, rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import RunningEngine
from mtgrpo.journal import Journal
from mtgrpo.policy.guard import check_provenance
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.reference import ReferencePolicy
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy, at_once
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig
from mtgrpo.profile import Profiler
from mtgrpo.rollout.curriculum import Difficulty
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages.controls import control
from mtgrpo.stages.run import Run
from mtgrpo.types import Group


def make_stream(run: Run, journal: Journal) -> Stream:
    """The groups of a run, written down in `journal`; those that its filter leaves out replaced with `refill`."""
    experiment = run.experiment
    chosen, algorithm = experiment.filter, experiment.algorithm

    def keeps(group: Group) -> bool:
        left = comparable([group], algorithm)
        return bool(left) and chosen.keeps(left[0], experiment.reward.success_at, algorithm.shaped_reward)

    batches = chosen.max_batches if chosen.refill else 1
    opened = journal.recording(run.runner.open_conversation, experiment.environment.replayable)
    runner = dataclasses.replace(run.runner, open_conversation=opened)
    difficulty = Difficulty(experiment.curriculum, experiment.reward.success_at, experiment.seed)
    return Stream(runner, run.tasks, experiment.rollout, keeps, batches, journal, difficulty)


def make_updater(run: Run) -> PolicyUpdater:
    """What trains the policy of a run; its optimiser's schedule counts optimiser steps."""
    experiment = run.experiment
    trajectories = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    size = experiment.trainer.minibatch_trajectories or trajectories
    per_batch = -(-trajectories // size) * experiment.trainer.updates_per_batch
    policy = Policy(
        run.model,
        Optimizer(run.model, experiment.optimizer, experiment.trainer.steps * per_batch),
        experiment.batch.tokens,
        experiment.sampling.temperature,
        Profiler(experiment.profile, run.engine.sync_s),
    )
    reference = ReferencePolicy(run.model) if experiment.kl.coef else None
    return PolicyUpdater(policy, update_config(experiment), reference)


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
        control=control(experiment.debug.advantages),
    )


async def update(run: Run, updater: PolicyUpdater, groups: Sequence[Group], step: int) -> tuple[Metrics, float, bool]:
    """Train on `groups` while rollouts go on, if they run ahead; else while the engine sleeps.

    Returns the metrics, the seconds of training alone, and whether Ctrl-C came meanwhile: a step that has begun is
    finished before anything is saved.
    """
    interrupted = False
    training = asyncio.create_task(_train_and_load(run, updater, groups, step))
    while not training.done():
        try:
            await asyncio.shield(training)
        except asyncio.CancelledError:
            interrupted = True
    return *training.result(), interrupted


async def _train_and_load(
    run: Run, updater: PolicyUpdater, groups: Sequence[Group], step: int
) -> tuple[Metrics, float]:
    engine, in_step = run.engine, not run.experiment.rollout.max_staleness
    if in_step:
        await engine.sleep()
    metrics, seconds = await beside(engine, run.watchdog.training(learn(run, updater, groups, step)))
    await engine.load_weights(run.model, step)  # before the engine has its next turn
    if in_step:
        await engine.wake()
    return metrics, seconds


async def beside(engine: RunningEngine, work: CooperativeTask[Metrics]) -> tuple[Metrics, float]:
    """The result of training, and its seconds alone, while the event loop goes on.

    An engine that shares the model has its turns between micro-batches, in this thread; beside any other engine
    training runs in a thread of its own.
    """
    seconds = 0.0
    if not engine.shares_weights:
        began = time.perf_counter()
        return await asyncio.to_thread(at_once, work), time.perf_counter() - began
    while True:
        began = time.perf_counter()
        try:
            next(work)
        except StopIteration as done:
            return done.value, seconds + time.perf_counter() - began
        seconds += time.perf_counter() - began
        await asyncio.sleep(0)


def learn(run: Run, updater: PolicyUpdater, groups: Sequence[Group], step: int) -> CooperativeTask[Metrics]:
    """One rollout batch: its groups as tensors, then update number `step`."""
    experiment, profiler = run.experiment, updater.policy.profiler
    compared = comparable(groups, experiment.algorithm)
    if not compared:
        updater.move_reference(step)
        return {}
    with profiler.trace(step, run.folder):
        with profiler.measure("packing"):
            batch = build_batch([trajectory for group in compared for trajectory in group.trajectories])
            check_provenance(batch, [trajectory for group in compared for trajectory in group.trajectories])
            rewards = rewards_of(compared, experiment.algorithm, batch.trajectory, batch.turn)
        metrics = yield from updater.training(batch, rewards, step - 1, experiment.seed * 1_000_003 + step)
    return {f"policy/{name}": value for name, value in metrics.items()}
