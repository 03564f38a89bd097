"""A rollout batch becomes an update: the event loop lays it out as tensors, the policy trains, the engine follows."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from mtgrpo.advantages import varies
from mtgrpo.advantages.rewards import Rewards, comparable, rewards_of
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.config.experiment import Experiment
from mtgrpo.journal import Journal
from mtgrpo.policy.guard import check_provenance
from mtgrpo.policy.step import Metrics
from mtgrpo.policy.witness import GroupEvidence, evidence_of
from mtgrpo.profile import Profiler
from mtgrpo.rollout.settings import Difficulty
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.stages.policy_trainer import update_config
from mtgrpo.stages.run import Run
from mtgrpo.types import Group, Sample, Trajectory, WeightPush

KeepTokens = Callable[[Sequence[Trajectory], Batch, Mapping[str, Tensor]], None]  # takes what became of a batch


def make_stream(run: Run, journal: Journal) -> Stream:
    """The groups of a run, written down in `journal`; those that its filter leaves out replaced with `refill`."""
    experiment, chosen = run.experiment, run.experiment.filter
    opened = journal.recording(run.runner.open_conversation, experiment.environment.replayable)

    def keeps(group: Group) -> bool:
        return not _refusal(group, experiment)

    @asynccontextmanager
    async def counted(scope: str, task: str, sample_index: int) -> AsyncGenerator[Sample]:
        async with opened(scope, task, sample_index) as sample:
            yield sample
        run.sinks.played()

    batches = chosen.max_batches if chosen.refill else 1
    runner = dataclasses.replace(run.runner, open_conversation=counted)
    difficulty = Difficulty(experiment.curriculum, experiment.reward.success_at, experiment.seed)
    return Stream(runner, run.tasks, experiment.rollout, keeps, batches, journal, difficulty)


def _refusal(group: Group, experiment: Experiment) -> str:
    """Why a group is not trained, "" where it may be."""
    estimator, algorithm = experiment.advantage, experiment.algorithm
    left = comparable([group], algorithm)
    if not left:
        return "too few ended without failure to compare"
    return experiment.filter.refuses(left[0], experiment.reward.success_at, lambda g: varies(g, estimator, algorithm))


def untrained(batch: RolloutBatch, experiment: Experiment) -> dict[int, str]:
    """The groups of a batch, by number, that are not trained, and why not."""
    trained = set(map(id, batch.trained))
    return {
        number: _refusal(group, experiment) or "the batch was full"
        for number, group in enumerate(batch.groups)
        if id(group) not in trained
    }


async def update(
    run: Run, profiler: Profiler, groups: Sequence[Group], step: int, keep: KeepTokens | None = None
) -> tuple[Metrics, float, bool]:
    """Train on `groups` while rollouts go on, if they run ahead; else while the engine sleeps.

    `keep` gets what the tokens were paid. Returns the metrics, the seconds of training alone, and whether Ctrl-C came
    meanwhile: a step that has begun is finished before anything is saved.
    """
    interrupted, train_s = False, run.trainer.train_s
    training = asyncio.create_task(_train_and_load(run, profiler, groups, step, keep))
    while not training.done():
        try:
            await asyncio.shield(training)
        except asyncio.CancelledError:
            interrupted = True
    return training.result(), run.trainer.train_s - train_s, interrupted


async def _train_and_load(
    run: Run, profiler: Profiler, groups: Sequence[Group], step: int, keep: KeepTokens | None
) -> Metrics:
    engine, in_step = run.engine, not run.experiment.rollout.max_staleness
    if in_step:
        await engine.sleep()
    metrics = await learn(run, profiler, groups, step, keep)
    began = time.perf_counter()
    await engine.load_weights(run.trainer.weights())  # before the engine has its next turn
    engine.pushes.append(WeightPush(step, began, time.perf_counter()))
    if in_step:
        await engine.wake()
    return metrics


async def learn(
    run: Run, profiler: Profiler, groups: Sequence[Group], step: int, keep: KeepTokens | None = None
) -> Metrics:
    """One rollout batch: its groups as tensors, then update number `step`."""
    experiment, learning = run.experiment, update_config(run.experiment)
    compared = comparable(groups, experiment.algorithm)
    if not compared:
        run.trainer.skip(step - 1)
        return {}

    def lay_out() -> tuple[Batch, Rewards, GroupEvidence | None]:
        with profiler.measure("packing"):
            trajectories = [trajectory for group in compared for trajectory in group.trajectories]
            batch = build_batch(trajectories)
            with profiler.measure("check"):
                check_provenance(batch, trajectories)
            rewards = rewards_of(compared, experiment.algorithm, batch.trajectory, batch.turn)
            with profiler.measure("check"):
                return batch, rewards, evidence_of(compared, learning)

    began = time.perf_counter()
    batch, rewards, evidence = lay_out() if run.engine.shares_weights else await run.trainer.in_thread(lay_out)
    run.trainer.train_s += time.perf_counter() - began
    metrics = await run.trainer.update(batch, rewards, step - 1, (experiment.seed * 1_000_003 + step) % 2**62, evidence)
    if keep:
        keep([t for group in compared for t in group.trajectories], batch, run.trainer.take_record())
    return metrics | {"batch/shared": batch.shared}
