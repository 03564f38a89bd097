"""Measure a policy: the same rollouts as in training, no update."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import RunError
from mtgrpo.record import trajectories
from mtgrpo.record.reading import AFTER
from mtgrpo.record.summary import write_summary
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.stages.findings import Findings
from mtgrpo.stages.metrics import describe, valid
from mtgrpo.stages.run import Run, open_run
from mtgrpo.strict_json import strict_json
from mtgrpo.together import together
from mtgrpo.types import EVALUATION, Group, Task


class AllFailedError(RunError):
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
    groups = await together(runner.run_group(task, samples) for task in tasks)
    if not valid(groups):
        reason = groups[0].trajectories[0].reason
        raise AllFailedError(f"every conversation of the evaluation failed, the first because of {reason}")
    return groups


async def evaluate_fully(run: Run, name: str = AFTER) -> dict[str, float]:
    """The measurement before and after training: sampled and greedy, logged as a stage of its own.

    The sampled conversations are kept as `name`, one of BEFORE and AFTER.
    """
    return (await _measure(run, name))[0]


async def _measure(run: Run, name: str) -> tuple[dict[str, float], list[Group]]:
    """The metrics, and what was sampled."""
    samples = run.experiment.eval.samples
    run.sinks.stage(EVALUATION, 1)
    groups = await _run_groups(run.runner.at("eval", temperature=1.0), run.held_out, samples)
    trajectories.write(run.folder, name, groups)
    found = describe(groups, run.runner.reward.success_at, samples)
    metrics = {f"eval/{key}": value for key, value in found.items()}
    metrics |= await evaluate_greedy(run.runner, run.held_out)
    run.sinks.log(metrics, 1)
    return metrics, groups


def run_evaluation(experiment: Experiment, folder: Path, checkpoint: Path | None) -> None:
    """Measure a saved policy, or the model itself; writes `summary.json` and `evaluation.json` in `folder`.

    Raises RunError where held-out success is below `eval.fail_under`, when all is written.
    """
    name = str(checkpoint or experiment.model.name)

    async def measure() -> None:
        settings = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, name=name))
        async with open_run(settings, folder, trains=False) as run:
            metrics, groups = await _measure(run, AFTER)
            write_summary(folder, metrics)
            findings = Findings.of(groups, run.runner.reward, metrics["eval/greedy"])
            (folder / "evaluation.json").write_bytes(strict_json(findings.record(), indent=2) + b"\n")
            run.sinks.note(f"{findings.table()}\nall of it is in {folder / 'evaluation.json'}")
        if (success := metrics["eval/success"]) < (least := experiment.eval.fail_under):
            raise RunError(f"held-out success is {success:.3f}, below eval.fail_under={least:g}")

    asyncio.run(measure())
