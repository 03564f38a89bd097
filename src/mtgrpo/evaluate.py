"""Measure a policy: the same play as in training, no update."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mtgrpo.experiment import Experiment
from mtgrpo.log import write_summary
from mtgrpo.rollout.group import Player
from mtgrpo.run import Run, open_run
from mtgrpo.types import Group, Status, Task, Trajectory


class NothingPlayedError(RuntimeError):
    """Every conversation of an evaluation failed: there is nothing to measure. The message gives a reason."""


async def evaluate(player: Player, tasks: Sequence[Task], samples: int) -> dict[str, float]:
    """Sampled at temperature 1, `samples` per task: success (mean over samples), pass@k, tool use, turns, length.

    Raises NothingPlayedError.
    """
    groups = await _play(player.at("eval", temperature=1.0), tasks, samples)
    return {f"eval/{name}": value for name, value in describe(groups, player.reward.success_at, samples).items()}


async def evaluate_greedy(player: Player, tasks: Sequence[Task]) -> dict[str, float]:
    """The most likely token everywhere, once per task. Raises NothingPlayedError."""
    groups = await _play(player.at("greedy", temperature=0.0), tasks, 1)
    return {"eval/greedy": describe(groups, player.reward.success_at, 1)["success"]}


async def _play(player: Player, tasks: Sequence[Task], samples: int) -> list[Group]:
    groups = await asyncio.gather(*(player.play_group(task, samples) for task in tasks))
    if not any(_scored(group) for group in groups):
        reason = groups[0].trajectories[0].reason
        raise NothingPlayedError(f"every conversation of the evaluation failed, the first because of {reason}")
    return list(groups)


def describe(groups: Sequence[Group], success_at: float, samples: int) -> dict[str, float]:
    """Means over trajectories, failed ones left out; pass@samples is the share of tasks that any sample solves.

    A success ends by itself, within all limits, with a reward of at least `success_at`.
    """
    played = [t for group in groups for t in _scored(group)]
    if not played:
        return {"failed": 1.0}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def succeeded(trajectory: Trajectory) -> bool:
        return trajectory.status is Status.COMPLETED and trajectory.reward >= success_at

    solved = [any(map(succeeded, scored)) for g in groups if (scored := _scored(g))]
    return {
        "success": mean([float(succeeded(t)) for t in played]),
        "reward": mean([t.reward for t in played]),
        f"pass@{samples}": mean([float(s) for s in solved]),
        "tool_rate": mean([float(t.tool_calls > 0) for t in played]),
        "tool_error_rate": mean([float(t.tool_errors > 0) for t in played]),
        "tool_timeouts": mean([float(t.tool_timeouts) for t in played]),
        "tool_retries": mean([float(t.tool_retries) for t in played]),
        "tool_outages": mean([float(len(t.outages)) for t in played]),
        "turns": mean([float(len(t.turns)) for t in played]),
        "sampled_tokens": mean([float(t.sampled_tokens) for t in played]),
        "truncated": mean([float(t.status is Status.TRUNCATED) for t in played]),
        "failed": 1 - len(played) / sum(len(group.trajectories) for group in groups),
    }


def _scored(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if t.status is not Status.FAILED]


async def evaluate_fully(run: Run) -> dict[str, float]:
    """The measurement before and after training: sampled and greedy, logged as a stage of its own."""
    settings = run.experiment.eval
    run.sinks.stage("evaluation", 1)
    metrics = await evaluate(run.player, run.held_out, settings.samples)
    metrics |= await evaluate_greedy(run.player, run.held_out)
    run.sinks.log(metrics, 1)
    return metrics


def run_evaluation(experiment: Experiment, folder: Path, checkpoint: Path) -> None:
    """Measure a saved policy; writes `summary.json` in `folder`."""

    async def measure() -> None:
        settings = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, name=str(checkpoint)))
        with open_run(settings, folder) as run:
            write_summary(folder, await evaluate_fully(run))
            run.sinks.note(f"the measurements are in {folder / 'summary.json'}")

    asyncio.run(measure())
