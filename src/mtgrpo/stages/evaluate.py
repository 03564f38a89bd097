"""Measure a policy: the same rollouts as in training, no update."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mtgrpo.config.experiment import Experiment
from mtgrpo.record.summary import write_summary
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.stages.run import Run, open_run
from mtgrpo.types import Group, Status, Task, Trajectory


class AllFailedError(RuntimeError):
    """Every conversation of an evaluation failed: there is nothing to measure. The message gives a reason."""


async def evaluate(runner: RolloutRunner, tasks: Sequence[Task], samples: int) -> dict[str, float]:
    """Sampled at temperature 1, `samples` per task: success (mean over samples), pass@k, tool use, turns, length.

    Raises AllFailedError.
    """
    groups = await _run_groups(runner.at("eval", temperature=1.0), tasks, samples)
    return {f"eval/{name}": value for name, value in describe(groups, runner.reward.success_at, samples).items()}


async def evaluate_greedy(runner: RolloutRunner, tasks: Sequence[Task]) -> dict[str, float]:
    """The most likely token everywhere, once per task. Raises AllFailedError."""
    groups = await _run_groups(runner.at("greedy", temperature=0.0), tasks, 1)
    return {"eval/greedy": describe(groups, runner.reward.success_at, 1)["success"]}


async def _run_groups(runner: RolloutRunner, tasks: Sequence[Task], samples: int) -> list[Group]:
    groups = await asyncio.gather(*(runner.run_group(task, samples) for task in tasks))
    if not any(_valid(group) for group in groups):
        reason = groups[0].trajectories[0].reason
        raise AllFailedError(f"every conversation of the evaluation failed, the first because of {reason}")
    return list(groups)


def describe(groups: Sequence[Group], success_at: float, samples: int) -> dict[str, float]:
    """Means over trajectories, failed ones left out; pass@samples is the share of tasks that any sample solves.

    A success ends by itself, within all limits, with a reward of at least `success_at`.
    """
    valid = [t for group in groups for t in _valid(group)]
    if not valid:
        return {"failed": 1.0}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def succeeded(trajectory: Trajectory) -> bool:
        return trajectory.status is Status.COMPLETED and trajectory.reward >= success_at

    solved = [any(map(succeeded, scored)) for g in groups if (scored := _valid(g))]
    return {
        "success": mean([float(succeeded(t)) for t in valid]),
        "reward": mean([t.reward for t in valid]),
        f"pass@{samples}": mean([float(s) for s in solved]),
        "tool_rate": mean([float(t.tool_calls > 0) for t in valid]),
        "tool_error_rate": mean([float(t.tool_errors > 0) for t in valid]),
        "tool_timeouts": mean([float(t.tool_timeouts) for t in valid]),
        "tool_retries": mean([float(t.tool_retries) for t in valid]),
        "tool_outages": mean([float(len(t.outages)) for t in valid]),
        "turns": mean([float(len(t.turns)) for t in valid]),
        "sampled_tokens": mean([float(t.sampled_tokens) for t in valid]),
        "truncated": mean([float(t.status is Status.TRUNCATED) for t in valid]),
        "failed": 1 - len(valid) / sum(len(group.trajectories) for group in groups),
    }


def _valid(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if t.status is not Status.FAILED]


async def evaluate_fully(run: Run) -> dict[str, float]:
    """The measurement before and after training: sampled and greedy, logged as a stage of its own."""
    settings = run.experiment.eval
    run.sinks.stage("evaluation", 1)
    metrics = await evaluate(run.runner, run.held_out, settings.samples)
    metrics |= await evaluate_greedy(run.runner, run.held_out)
    run.sinks.log(metrics, 1)
    return metrics


def run_evaluation(experiment: Experiment, folder: Path, checkpoint: Path) -> None:
    """Measure a saved policy; writes `summary.json` in `folder`."""

    async def measure() -> None:
        settings = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, name=str(checkpoint)))
        async with open_run(settings, folder) as run:
            write_summary(folder, await evaluate_fully(run))
            run.sinks.note(f"the measurements are in {folder / 'summary.json'}")

    asyncio.run(measure())
