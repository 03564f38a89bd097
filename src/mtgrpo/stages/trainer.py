"""The story: stream -> batch -> step -> new weights -> log -> save, until the first limit is reached."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mtgrpo import checkpoint
from mtgrpo.advantages.rewards import comparable, rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.experiment import Advantages, Experiment, TrainerSettings
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.reference import freeze
from mtgrpo.policy.step import CooperativeTask, Policy
from mtgrpo.policy.updater import Control, PolicyUpdater, UpdateConfig
from mtgrpo.profile import Profiler
from mtgrpo.record import trajectories
from mtgrpo.record.curve import save_curve, terminal_curve
from mtgrpo.record.summary import write_summary
from mtgrpo.rollout.stream import Stream, describe_stream
from mtgrpo.stages.evaluate import AllFailedError, describe, evaluate, evaluate_fully
from mtgrpo.stages.run import Run, open_run
from mtgrpo.stages.sft import warm_start
from mtgrpo.types import Group, Status, Trajectory

Metrics = dict[str, float]
MISMATCH = "in a conversation the engine's log-probabilities differ from the trainer's"


@dataclass
class Curve:
    """How the run learned: the training reward of every step, and held-out success where it was measured."""

    reward: list[float] = field(default_factory=list[float])
    success: dict[int, float] = field(default_factory=dict[int, float])  # step -> eval/success

    def draw(self, folder: Path, width: int, height: int) -> str:
        """Write `curve.png`; returns the curve for a terminal of that size."""
        steps = range(1, len(self.reward) + 1)
        held_out = (list(self.success), list(self.success.values()))
        save_curve(folder / "curve.png", {"training reward": (steps, self.reward), "held-out success": held_out})
        return terminal_curve(self.reward, "training reward", width, height)


def run_training(experiment: Experiment, folder: Path) -> None:
    """Warm start, evaluate, train, evaluate; everything a run leaves lies in `folder`."""
    curve = Curve()
    summary = asyncio.run(train(experiment, folder, curve))
    size = shutil.get_terminal_size((100, 24))
    drawn = curve.draw(folder, min(size.columns, 100), 14)
    if "console" in experiment.log:
        before, after = summary["eval/success/before"], summary["eval/success/after"]
        print(f"\n{drawn}\n\nheld-out success {before:.3f} -> {after:.3f}\n{folder}")


async def train(experiment: Experiment, folder: Path, curve: Curve) -> Metrics:
    """The whole run; fills `curve` and returns what `summary.json` holds."""
    experiment.check_training()
    began = time.perf_counter()
    async with open_run(experiment, folder) as run:
        summary: Metrics = {"time/sft_s": await warm_start(run)}
        summary |= {f"{name}/before": value for name, value in (await evaluate_fully(run)).items()}
        curve.success[0] = summary["eval/success/before"]
        steps, seconds = await reinforce(run, curve)
        summary |= {"train/steps": float(steps), "time/rl_s": seconds}
        summary |= {f"{name}/after": value for name, value in (await evaluate_fully(run)).items()}
        curve.success[steps] = summary["eval/success/after"]
        summary["time/total_s"] = time.perf_counter() - began
        write_summary(folder, summary)
    return summary


async def reinforce(run: Run, curve: Curve) -> tuple[int, float]:
    """Roll out, update, repeat, until the first limit; returns steps and seconds, evaluation and saving not counted."""
    experiment = run.experiment
    profiler = Profiler(experiment.profile, run.engine.sync_s)
    temperature = experiment.sampling.temperature
    policy = Policy(run.model, _optimizer(run), experiment.batch.token_budget, temperature, profiler)
    reference = freeze(run.model) if experiment.kl.coef else None
    updater = PolicyUpdater(policy, update_config(experiment), reference)
    budget = Budget(experiment.trainer)
    stream = _stream(run)
    run.sinks.stage("reinforcement learning", experiment.trainer.steps)
    for notice in experiment.notes:
        run.sinks.note(notice)
    try:
        reached = await _steps(run, updater, stream, budget, curve)
    except asyncio.CancelledError:  # Ctrl-C
        save(run, updater, budget.steps)
        trajectories.write(run.folder, "untrained", stream.finished)
        run.sinks.note(f"interrupted: the policy after {budget.steps} steps is saved in {run.folder}")
        raise
    else:
        save(run, updater, budget.steps)
    finally:
        await stream.close()
    run.sinks.note(f"stopped after {budget.steps} steps: {reached}")
    if summary := profiler.summary():
        run.sinks.note(summary)
    return budget.steps, budget.seconds


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
        control=_control(experiment),
    )


def _stream(run: Run) -> Stream:
    """The groups of a run, those that its filter leaves out replaced if asked."""
    experiment = run.experiment
    chosen, algorithm = experiment.filter, experiment.algorithm

    def keeps(group: Group) -> bool:
        left = comparable([group], algorithm)
        return bool(left) and chosen.keeps(left[0], experiment.reward.success_at, algorithm.shaped_reward)

    batches = chosen.max_batches if chosen.refill else 1
    return Stream(run.runner, run.tasks, experiment.rollout, keeps, batches)


async def _steps(run: Run, updater: PolicyUpdater, stream: Stream, budget: Budget, curve: Curve) -> str:
    """Roll out, update, repeat; returns the limit that was reached."""
    experiment = run.experiment
    while not (reached := budget.reached(stream.epoch)):
        began = time.perf_counter()
        step = budget.steps + 1
        batch = await stream.batch(version=budget.steps)
        groups = batch.groups
        with updater.policy.profiler.trace(step, run.folder):
            metrics, train_s, interrupted = await _learn_beside(run, updater, batch.trained, step)
        if experiment.engine.exact:
            updater.policy.judge(metrics.get("policy/mismatch/worst_trajectory", 0.0), MISMATCH)
        for notes in (run.engine.notes, updater.policy.notes):
            run.sinks.tell(notes)
        ended = time.perf_counter()
        metrics |= _describe_batch(groups, experiment, ended - began - train_s, train_s)
        metrics["rollout/filtered"] = batch.left_out / len(groups)
        metrics |= describe_stream(batch, version=step - 1)
        metrics |= updater.policy.profiler.step(groups, run.engine.sync_s)
        budget.count(groups, ended - began)
        over = interrupted or budget.reached(stream.epoch)
        try:
            if experiment.eval.every_steps and step % experiment.eval.every_steps == 0 and not over:
                metrics |= await evaluate(run.runner, run.held_out, samples=1)
                curve.success[step] = metrics["eval/success"]
        except AllFailedError as error:  # an outage, which may be over at the next step
            run.sinks.note(str(error))
        finally:  # also when Ctrl-C ends the evaluation
            _record(run, step, groups, metrics)
            curve.reward.append(metrics["reward/mean"])
        if interrupted:
            raise asyncio.CancelledError
        if experiment.checkpoint.every_steps and step % experiment.checkpoint.every_steps == 0 and not over:
            save(run, updater, step)
    return reached


def _record(run: Run, step: int, groups: Sequence[Group], metrics: Metrics) -> None:
    """What a step leaves in the run's folder."""
    failed = [t for group in groups for t in group.trajectories if t.status is Status.FAILED]
    if failed:
        run.sinks.note(f"step {step}: {len(failed)} conversations failed, the first because of {failed[0].reason}")
    if outages := [why for group in groups for t in group.trajectories for why in t.outages]:
        run.sinks.note(f"step {step}: {len(outages)} calls were answered by no tool, the first because {outages[0]}")
    trajectories.write(run.folder, f"step_{step:06d}", groups)
    run.sinks.log(metrics, step)


async def _learn_beside(
    run: Run, updater: PolicyUpdater, groups: Sequence[Group], step: int
) -> tuple[Metrics, float, bool]:
    """Learn while rollouts go on: between any two micro-batches they have their turn.

    Also the seconds of learning alone, and whether Ctrl-C came meanwhile: a step that has begun is finished before
    anything is saved.
    """

    async def by_turns() -> tuple[Metrics, float]:
        work, seconds = learn(run.experiment, updater, groups, step), 0.0
        while True:
            began = time.perf_counter()
            try:
                next(work)
            except StopIteration as done:
                run.engine.version = step  # before the engine has its next turn
                return done.value, seconds + time.perf_counter() - began
            seconds += time.perf_counter() - began
            await asyncio.sleep(0)

    interrupted = False
    learning = asyncio.create_task(by_turns())
    while not learning.done():
        try:
            await asyncio.shield(learning)
        except asyncio.CancelledError:
            interrupted = True
    return *learning.result(), interrupted


def learn(
    experiment: Experiment, updater: PolicyUpdater, groups: Sequence[Group], step: int
) -> CooperativeTask[Metrics]:
    """One rollout batch: layout, credit, update number `step`."""
    compared = comparable(groups, experiment.algorithm)
    if not compared:
        updater.move_reference(step)
        return {}
    with updater.policy.profiler.measure("packing"):
        batch = build_batch([trajectory for group in compared for trajectory in group.trajectories])
    rewards = rewards_of(compared, experiment.algorithm, batch.trajectory, batch.turn)
    metrics = yield from updater.training(batch, rewards, step - 1, experiment.seed * 1_000_003 + step)
    return {f"policy/{name}": value for name, value in metrics.items()}


def _control(experiment: Experiment) -> Control | None:
    """What a control experiment puts in the place of the advantages."""
    if experiment.debug.advantages is Advantages.flipped:
        return lambda advantage, trajectory, seed: -advantage
    if experiment.debug.advantages is Advantages.shuffled:
        return _shuffled
    return None


def _shuffled(advantage: Tensor, trajectory: Tensor, seed: int) -> Tensor:
    """Each trajectory gets the advantages of another, stretched over its own tokens."""
    _, index, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    generator = torch.Generator().manual_seed(seed + 2**40)  # another order than the mini-batches'
    other = torch.randperm(len(counts), generator=generator)[index]
    within = torch.arange(len(trajectory)) - starts[index]
    return advantage[starts[other] + within * counts[other] // counts[index]]


def save(run: Run, updater: PolicyUpdater, step: int) -> None:
    """Write a checkpoint: the policy, its optimiser, and up to which task the run has admitted any."""
    tensors, rest = checkpoint.flatten(updater.policy.optimizer.state_dict())
    state = {"step": step, "tasks": run.tasks.state_dict(), "kl_coef": updater.kl_coef, "optimizer": rest}
    keep_last = run.experiment.checkpoint.keep_last
    checkpoint.save(run.folder, step, run.model, run.tokenizer, tensors, state, keep_last)


@dataclass
class Budget:
    """Counts what a run has used, and says which limit it has reached."""

    settings: TrainerSettings
    steps: int = 0
    turns: int = 0
    seconds: float = 0.0

    def count(self, groups: Sequence[Group], seconds: float) -> None:
        """One more step is done."""
        self.steps += 1
        self.turns += sum(len(t.turns) for group in groups for t in group.trajectories)
        self.seconds += seconds

    def reached(self, epoch: int) -> str:
        """The first limit that is reached, as the user would write it; "" while there is none."""
        used = {"steps": self.steps, "epochs": epoch, "total_turns": self.turns, "wall_time_s": self.seconds}
        for name, value in used.items():
            limit = getattr(self.settings, name)
            if limit and value >= limit:
                return f"trainer.{name}={limit}"
        return ""


def _optimizer(run: Run) -> Optimizer:
    """The optimiser of the reinforcement-learning stage; its schedule counts optimiser steps."""
    experiment = run.experiment
    batch_trajectoriesper_step = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    size = experiment.trainer.minibatch_trajectories or batch_trajectoriesper_step
    per_batch = -(-batch_trajectoriesper_step // size) * experiment.trainer.updates_per_batch
    return Optimizer(run.model, experiment.optimizer, experiment.trainer.steps * per_batch)


def _describe_batch(groups: Sequence[Group], experiment: Experiment, rollout_s: float, train_s: float) -> Metrics:
    """What a batch of rollouts was like; names under perf/ and time/ are measurements of the machine."""
    found = describe(groups, experiment.reward.success_at, experiment.rollout.group_size)
    shaped = experiment.algorithm.shaped_reward
    rewards = [[(shaped(t), *t.turn_rewards) for t in g.trajectories if t.status is not Status.FAILED] for g in groups]
    spread = [len(set(of_group)) > 1 for of_group in rewards]
    batch_trajectories = [t for group in groups for t in group.trajectories]
    tokens, segments = sum(t.sampled_tokens for t in batch_trajectories), sum(t.segments for t in batch_trajectories)
    causes = Counter(t.reason.partition(":")[0] for t in batch_trajectories if t.status is Status.FAILED)
    waited = {
        "queue": sum(t.queued_s for t in batch_trajectories),
        "decode": sum(t.sample_s for t in batch_trajectories),
        "tool": sum(t.tool_s for t in batch_trajectories),
    }
    seconds = rollout_s + train_s if experiment.rollout.max_staleness else rollout_s
    return {
        "reward/mean": found.pop("reward", math.nan),
        "reward/success": found.pop("success", math.nan),
        "reward/groups_with_variance": sum(spread) / len(spread),
        **_components(batch_trajectories),
        **_turn_rewards(batch_trajectories),
        **{f"rollout/{name}": value for name, value in found.items()},
        "rollout/segments": segments / max(1, len(batch_trajectories)),
        "rollout/retried": sum(t.attempts > 1 for t in batch_trajectories) / max(1, len(batch_trajectories)),
        **{f"rollout/failed/{cause}": count / len(batch_trajectories) for cause, count in causes.items()},
        "rollout/groups_left_out": float(len(groups) - len(comparable(groups, experiment.algorithm))),
        **{f"perf/{name}_share": share / max(1e-9, sum(waited.values())) for name, share in waited.items()},
        "perf/conversations_open": (waited["decode"] + waited["tool"]) / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "time/rollout_s": rollout_s,
        "time/train_s": train_s,
    }


def _components(batch_trajectories: Sequence[Trajectory]) -> Metrics:
    """The means of what the rewards are made of, where they are composed."""
    found = [t.components for t in batch_trajectories if t.components]
    return {f"reward/{name}/mean": sum(one[name] for one in found) / len(found) for name in (found or [{}])[0]}


def _turn_rewards(batch_trajectories: Sequence[Trajectory]) -> Metrics:
    """The rewards of single turns, where there are any: per turn, and summed over a trajectory."""
    judged = [t.turn_rewards for t in batch_trajectories if t.turn_rewards]
    if not judged:
        return {}
    sums = [sum(amounts) for amounts in judged]
    return {"reward/turn": sum(sums) / sum(map(len, judged)), "reward/turns_of_trajectory": sum(sums) / len(judged)}
