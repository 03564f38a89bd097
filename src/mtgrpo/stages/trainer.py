"""The story: stream -> rollout batch -> update -> new weights -> log -> save, until the first limit is reached."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import RunError
from mtgrpo.policy.step import Metrics
from mtgrpo.policy.updater import PolicyUpdater
from mtgrpo.record import trajectories
from mtgrpo.record.curve import Curve
from mtgrpo.record.reading import BEFORE
from mtgrpo.record.summary import write_summary
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages.budget import Budget
from mtgrpo.stages.evaluate import AllFailedError, evaluate, evaluate_fully
from mtgrpo.stages.metrics import describe_conversations, describe_failures, describe_step
from mtgrpo.stages.run import Run, open_run
from mtgrpo.stages.sft import warm_start
from mtgrpo.stages.trends import Trends
from mtgrpo.stages.update import make_stream, make_updater, save, update

MISMATCH = "in a conversation the engine's log-probabilities differ from the trainer's"


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
        summary |= {f"{name}/before": value for name, value in (await evaluate_fully(run, BEFORE)).items()}
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
    updater, stream, budget = make_updater(run), make_stream(run), Budget(run.experiment.trainer)
    trends = Trends()
    run.sinks.stage("reinforcement learning", run.experiment.trainer.steps)
    for note in run.experiment.notes:
        run.sinks.note(note)
    try:
        while not (reached := budget.reached(stream.epoch)):
            await _step(run, updater, stream, budget, curve, trends)
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
    if summary := updater.policy.profiler.summary():
        run.sinks.note(summary)
    return budget.steps, budget.seconds


async def _step(run: Run, updater: PolicyUpdater, stream: Stream, budget: Budget, curve: Curve, trends: Trends) -> None:
    """One rollout batch, one update, and where it is due an evaluation and a checkpoint."""
    experiment, policy = run.experiment, updater.policy
    began, step = time.perf_counter(), budget.steps + 1
    try:
        batch = await stream.batch(version=budget.steps)
    except RunError as error:
        raise RunError(f"{error}; see {trajectories.write(run.folder, 'untrained', stream.finished)}") from error
    evidence = trajectories.write(run.folder, f"step_{step:06d}", batch.groups)
    try:
        metrics, train_s, interrupted = await update(run, updater, batch.trained, step)
        if experiment.engine.exact:
            policy.judge(metrics.get("policy/mismatch/worst_trajectory", 0.0), MISMATCH)
    except RunError as error:
        raise RunError(f"{error}; what it was trained on is in {evidence}") from error
    for notes in (run.engine.notes, policy.notes, run.tasks.notes):
        run.sinks.tell(notes)
    seconds = time.perf_counter() - began
    metrics |= describe_step(batch, experiment, step - 1, seconds - train_s, train_s)
    metrics |= policy.profiler.step(describe_conversations(batch.groups, experiment.profile), run.engine.sync_s)
    budget.count(batch.groups, seconds)
    over = interrupted or budget.reached(stream.epoch)
    try:
        if not over and _due(step, experiment.eval.every_steps):
            metrics |= await evaluate(run.runner, run.held_out, samples=1)
            curve.success[step] = metrics["eval/success"]
    except AllFailedError as error:  # an outage, which may be over at the next step
        run.sinks.note(str(error))
    finally:  # also when Ctrl-C ends the evaluation
        for text in (*describe_failures(batch.groups), *trends.warnings(metrics)):
            run.sinks.note(f"step {step}: {text}")
        run.sinks.log(metrics, step)
        curve.reward.append(metrics["reward/mean"])
    if interrupted:
        raise asyncio.CancelledError
    if not over and _due(step, experiment.checkpoint.every_steps):
        save(run, updater, step)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
