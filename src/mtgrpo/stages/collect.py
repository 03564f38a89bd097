"""Conversations of a policy without training, as JSON Lines or Parquet."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from mtgrpo.config.experiment import Experiment, Form
from mtgrpo.record.writing import fine_tuning_row, open_rows, trajectory_row, write_summary
from mtgrpo.runtime.together import together
from mtgrpo.stages.evaluate import AllFailedError
from mtgrpo.stages.metrics import describe
from mtgrpo.stages.run import EVAL_SEED, Run, open_run
from mtgrpo.tasks import Split
from mtgrpo.types import Group


async def run_collection(experiment: Experiment, folder: Path) -> None:
    """Write what the model says into `folder`, task by task, as `experiment.collect` says."""
    async with open_run(experiment, folder, trains=False) as run:
        wanted, experiment = run.experiment.collect, run.experiment
        split, seed = (Split.eval, EVAL_SEED) if wanted.held_out else (Split.train, experiment.seed)
        tasks = experiment.task.stream(split, seed, repeat=False)  # each once
        runner, path, at_once = run.runner.at("collect"), folder / wanted.file, experiment.rollout.prompts_per_step
        done = written = 0
        run.sinks.stage("collecting", wanted.tasks)
        with open_rows(path, wanted.form is Form.messages) as write:
            # As many tasks at once as a training step has, so that memory does not grow with the file.
            while chosen := list(itertools.islice(tasks, min(at_once, wanted.tasks - done))):
                groups = await together(runner.run_group(task, wanted.samples) for task in chosen)
                if not (done or any(group.valid for group in groups)):
                    reason = groups[0].trajectories[0].reason
                    raise AllFailedError(f"every conversation of the first {len(chosen)} tasks failed, by {reason}")
                rows = _rows(run, groups)
                write(rows)
                written += len(rows)
                done += len(chosen)
                metrics = describe(groups, runner.reward.success_at, wanted.samples)
                run.sinks.log({f"collect/{key}": value for key, value in metrics.items()}, done)
        write_summary(folder, {"collect/tasks": done, "collect/conversations": written})
        run.sinks.note(f"{written} conversations of {done} tasks are in {path}")


def _rows(run: Run, groups: list[Group]) -> list[dict[str, Any]]:
    wanted, tools = run.experiment.collect, run.experiment.environment.tool_specs
    valid = [t for group in groups for t in group.valid]
    chosen = [t for t in valid if t.succeeded(run.runner.reward.success_at) or not wanted.successes]
    return [trajectory_row(t) if wanted.form is Form.trajectories else fine_tuning_row(t, tools) for t in chosen]
