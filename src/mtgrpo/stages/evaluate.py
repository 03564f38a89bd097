"""Measure a policy, or collect what it says: the same rollouts as in training, no update."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtgrpo.config.experiment import Experiment, Form
from mtgrpo.config.run_record import MEASURED
from mtgrpo.errors import POLICY_ERROR, REFUSED, ConfigError, RunError
from mtgrpo.evaluation.findings import NO_TOOLS, EvaluationGroups, Findings, control, record, table
from mtgrpo.journal import Journal
from mtgrpo.policy.step import Metrics
from mtgrpo.record.reading import AFTER, BEFORE, GREEDY, of_set, read_object
from mtgrpo.record.shapes import TEXTS
from mtgrpo.record.writing import fine_tuning_row, open_rows, trajectory_row, write_summary, write_trajectories
from mtgrpo.rewards import Reward
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.runtime.files import strict_json, write_whole
from mtgrpo.runtime.workers import together
from mtgrpo.stages.checks import EVAL_SEED
from mtgrpo.stages.demonstrated import sent_otherwise
from mtgrpo.stages.metrics import describe, describe_failures, share_that_varies
from mtgrpo.stages.resume import differences, settings_of
from mtgrpo.stages.run import Run, open_run
from mtgrpo.tasks import Split
from mtgrpo.types import COLLECTING, EVALUATION, Group, Status, Task, Trajectory

_MOST_FAILED = 20  # tasks in a row
_NOTABLE = 0.1  # the share of conversations that limits cut
_GROUPS = {"max_new_tokens": "sampling", "max_condensed_tokens": "condenser", "max_requests": "agent"} | dict.fromkeys(
    ("max_trajectory_tokens", "max_trajectory_tool_tokens"), "rollout"
)  # of the options that are limits; of the others it is environment
_SHARE = 8  # beside training, an evaluation has one of so many conversations
Play = Callable[[RolloutRunner, Task, int], Coroutine[Any, Any, Group]]  # so many samples of a task


class AllFailedError(RunError):
    """Every conversation of an evaluation failed: there is nothing to measure. The message gives a reason."""


async def evaluate(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    samples: int,
    name: str = "",
    play: Play = RolloutRunner.run_group,
    tell: Callable[[list[str]], None] = list.clear,
) -> Metrics:
    """Sampled at temperature 1, `samples` per task: success (mean over samples), pass@k, tool use, turns, length.

    name: of the set that `tasks` are; "" = the run's own. tell: of what people should know. Raises AllFailedError.
    """
    groups = await _groups(runner, "eval", name, tasks, samples, play)
    tell(_notes(name, groups, runner.reward))
    return _named(name, describe(groups, runner.reward.success_at, samples))


async def evaluate_during(run: Run) -> Metrics:
    """One sample of every task of every set. Raises AllFailedError.

    Where rollouts run ahead of training, it runs beside both: few of the conversations at once are its own, and the
    policy moves under it. `eval/version` is then the mean version of the policy that sampled its tokens.
    """
    rollout = run.experiment.rollout
    slots = asyncio.Semaphore(max(1, rollout.max_concurrent // (_SHARE if rollout.max_staleness else 1)))
    versions: list[int] = []

    async def play(runner: RolloutRunner, task: Task, samples: int) -> Group:
        async with slots:
            group = await runner.run_group(task, samples)
        versions.extend(version for t in group.trajectories for turn in t.turns for version in turn.versions)
        return group

    metrics: Metrics = {}
    for name, runner, tasks in _task_sets(run):
        with _outage_of(name, run):
            metrics |= await evaluate(runner, tasks, 1, name, play, run.sinks.tell)
    return metrics | ({"eval/version": sum(versions) / max(1, len(versions))} if rollout.max_staleness else {})


async def evaluate_fully(run: Run, name: str = AFTER) -> Metrics:
    """The measurement before and after training: sampled and greedy, logged as a stage of its own.

    The sampled conversations are kept as `name`, BEFORE or AFTER, the greedy ones beside them. Raises AllFailedError.
    """
    return (await _measure(run, name))[0]


async def _measure(
    run: Run, file: str, play: Play = RolloutRunner.run_group
) -> tuple[Metrics, dict[str, EvaluationGroups]]:
    """The metrics, and what was sampled of each set."""
    samples, success_at = run.experiment.eval.samples, run.runner.reward.success_at
    sets, ended = list(_task_sets(run)), 0
    total = (samples + 1) * sum(len(tasks) for *_, tasks in sets)
    run.sinks.stage(EVALUATION, total)
    metrics: Metrics = {}
    played: dict[str, EvaluationGroups] = {}

    async def counted(runner: RolloutRunner, task: Task, samples: int) -> Group:
        nonlocal ended
        group = await play(runner, task, samples)
        ended += samples
        run.sinks.progress(ended)
        return group

    for name, runner, tasks in sets:
        sampled, greedy = list[Group](), list[Group]()
        with _outage_of(name, run):
            sampled = await _groups(runner, "eval", name, tasks, samples, counted)
            kept = write_trajectories(run.folder, of_set(file, name), sampled)
            run.sinks.tell(_notes(name, sampled, runner.reward, kept))
            if file == BEFORE and not name:
                run.sinks.tell(sent_otherwise(run.experiment, (t for group in sampled for t in group.valid)))
        with _outage_of(name, run):  # also where the other could not be: taken up again, all have their numbers
            greedy = await _groups(runner, "greedy", name, tasks, 1, counted)
            write_trajectories(run.folder, of_set(GREEDY[file], name), greedy)
        if not (sampled and greedy):
            continue
        described = describe(sampled, success_at, samples) | {"greedy": describe(greedy, success_at, 1)["success"]}
        if samples > 1:
            described["groups_with_variance"] = share_that_varies(sampled, run.experiment)
        metrics |= _named(name, described)
        played[name] = EvaluationGroups(sampled, greedy)
    run.sinks.log(metrics, total)
    return metrics, played


def _task_sets(run: Run) -> Iterator[tuple[str, RolloutRunner, list[Task]]]:
    """What an evaluation plays: names of sets of tasks, "" the run's own, and who plays them."""
    yield "", run.runner, run.held_out
    if run.experiment.eval.no_tools and (without := run.runner.environment.without_tools()):
        yield NO_TOOLS, dataclasses.replace(run.runner, environment=without), run.held_out
    for name, tasks in run.sets.items():
        yield name, run.runner, tasks


@contextmanager
def _outage_of(name: str, run: Run) -> Generator[None]:
    """Tell where a further set could not be measured; without the run's own tasks there is no evaluation."""
    try:
        yield
    except AllFailedError as error:
        if not name:
            raise
        run.sinks.note(f"evaluation of {name}: not measured: {error}")


async def _groups(
    runner: RolloutRunner, scope: str, name: str, tasks: Sequence[Task], samples: int, play: Play
) -> list[Group]:
    runner = runner.at(f"{scope}/{name}" if name else scope, temperature=0.0 if scope == "greedy" else 1.0)
    played = Counter[str]()
    groups = await together(play(runner.again(task, played), task, samples) for task in tasks)
    if not any(group.valid for group in groups):
        reason = groups[0].trajectories[0].reason
        part = "greedy conversation" if scope == "greedy" else "conversation"
        raise AllFailedError(f"every {part} of the evaluation failed, the first because of {reason}")
    return groups


def _notes(name: str, groups: Sequence[Group], reward: Reward, file: Path | None = None) -> list[str]:
    """What people should know of an evaluation of the set `name` beside its numbers; its trajectories are in `file`."""
    measured, valid = sum(bool(group.valid) for group in groups), [t for group in groups for t in group.valid]
    notes = describe_failures(groups, file)
    if measured < len(groups):
        notes.append(f"of {len(groups)} tasks {measured} could be measured: its numbers are of those")
    elif len(valid) < (played := sum(len(group.trajectories) for group in groups)):
        notes.append(f"of {played} conversations {len(valid)} could be measured: its numbers are of those")
    valid = [] if name == NO_TOOLS else valid  # a control, of which no success is expected
    looks_for = reward.looks_for or next((part.looks_for for part in reward.parts), "")
    graded = [t for t in valid if t.given is None]  # by the reward, not by an agent
    if looks_for and graded and not any(map(reward.answer, graded)):
        notes.append(f"none of {len(graded)} conversations has an answer where it is looked for: {looks_for}")
    if any(t.reward for t in valid) and (best := max(t.reward for t in valid)) < reward.success_at:
        least = f"and reward.success_at, what success takes, is {reward.success_at:g}"
        notes.append(f"no success: the best reward is {best:g}, {least}")
    emptied = [t for t in valid if _saw_task_alone(t)]
    if len(emptied) > _NOTABLE * len(valid):
        tokens = sum(t.tokens_before for t in emptied) / sum(t.condensed for t in emptied)
        higher = "environment.max_context_length, condenser.max_condensed_tokens or condenser.keep_last_n_steps"
        told = f"in {len(emptied)} of {len(valid)} conversations the condenser left nothing but system prompt and task"
        notes.append(f"{told}, of contexts of {tokens:.0f} tokens: set {higher} higher")
        valid = []  # whose limits are no cure
    cut = Counter(t.reason for t in valid if t.status is Status.TRUNCATED)
    cut -= Counter({POLICY_ERROR: len(valid), REFUSED: len(valid)})  # which are no limits
    if cut.total() > _NOTABLE * len(valid) and not any(t.succeeded(reward.success_at) for t in valid):
        options = ", ".join(f"{_GROUPS.get(limit, 'environment')}.{limit}" for limit in cut)
        higher = f"set {options} higher, or where more room would not help (look at some with `mtgrpo show`)"
        told = f"{cut.total()} of {len(valid)} conversations are cut: {higher}"
        notes.append(f"no success: {told}, choose another start (sft.steps, model.name)")
    return [f"evaluation{name and f' of {name}'}: {note}" for note in notes]


def _saw_task_alone(trajectory: Trajectory) -> bool:
    """Whether a condensed context was that of the first turn again, so that the model knew nothing of its steps."""
    turns = trajectory.turns
    return trajectory.condensed > 0 and any(t.parent < 0 and t.new_context == turns[0].new_context for t in turns[1:])


def _named(name: str, metrics: Metrics) -> Metrics:
    return {f"eval/{name}/{key}" if name else f"eval/{key}": value for key, value in metrics.items()}


async def run_evaluation(experiment: Experiment, folder: Path) -> None:
    """Measure the model as it is; writes `summary.json` and `evaluation.json` in `folder`.

    What one that was ended has left there is taken back. Raises RunError where held-out success is below
    `eval.fail_under`, when all is written.
    """
    async with open_run(experiment, folder, trains=False) as run:
        with _recorded(run) as (recorded, play):
            metrics, played = await _measure(recorded, AFTER, play)
        write_summary(folder, metrics)
        findings = {name: Findings.of(groups, run.runner.reward) for name, groups in played.items()}
        tools = control(played, run.runner.reward.success_at)
        path = folder / "evaluation.json"
        write_whole(path, strict_json(record(findings, tools), indent=2) + b"\n")
        run.sinks.note(f"{table(findings, tools)}\nalso in {path}")
    if (success := metrics["eval/success"]) < (least := experiment.eval.fail_under):
        raise RunError(f"held-out success is {success:.3f}, below eval.fail_under={least:g}")


def _files(folder: Path) -> dict[str, str]:
    """What tells whether a model's files are still the same: size and time of each; {} for a name on the hub."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return {file.name: f"{(state := file.stat()).st_size} bytes, {state.st_mtime_ns}" for file in files}


@contextmanager
def _recorded(run: Run) -> Generator[tuple[Run, Play]]:
    """The run with every turn in its journal, and how groups are played that are not there yet.

    Raises ConfigError where the journal is of an evaluation with other settings.
    """
    journal, numbers = Journal(None if run.experiment.agent.active else run.folder / "journal"), itertools.count()
    name = run.experiment.model.name
    settings = {**settings_of(run.folder), "model.name": name, "model.files": str(_files(Path(name)))}
    begun = run.folder / MEASURED
    if begun.is_file():
        if not (recorded := read_object(begun, TEXTS)):
            raise ConfigError(f"{begun} does not say with which settings its evaluation began; take another folder")
        if other := differences(recorded, settings):
            raise ConfigError(f"{run.folder} has an evaluation with other settings, take another folder: {other[0]}")
        journal.go_on(0, 0, set())
        run.sinks.tell(journal.notes)
    else:
        write_whole(begun, strict_json(settings))
    journal.begin(0)

    async def play(runner: RolloutRunner, task: Task, samples: int) -> Group:
        number = next(numbers)
        admitted = journal.admitted(number)
        if admitted is None:
            journal.add(admitted=number, version=0, scope=runner.scope, task=task.id)
        elif (admitted["scope"], admitted["task"]) != (runner.scope, task.id):
            raise ConfigError(
                f"the data has changed: {admitted['task']} ({admitted['scope']}) was where {task.id} ({runner.scope}) "
                "is; take another folder"
            )
        group = journal.group(number, task)
        if group is None:
            group = await runner.run_group(task, samples)
            if len(group.valid) == len(group.trajectories):
                journal.add(finished=number, group=group)
        return group

    opened = journal.recording(run.runner.open_conversation, run.experiment.environment.replayable)
    try:
        yield dataclasses.replace(run, runner=dataclasses.replace(run.runner, open_conversation=opened)), play
    finally:
        journal.close()
        run.sinks.tell(journal.notes)


async def run_collection(experiment: Experiment, folder: Path) -> None:
    """Write what the model says into `folder`, task by task, as `experiment.collect` says.

    Raises AllFailedError where the first tasks that are played at once all fail, or later so many in a row; what is
    written by then stays.
    """
    async with open_run(experiment, folder, trains=False) as run:
        wanted, experiment = run.experiment.collect, run.experiment
        split, seed = (Split.eval, EVAL_SEED) if wanted.held_out else (Split.train, experiment.seed)
        tasks = experiment.task.stream(split, seed, repeat=False)  # each once
        runner, path, at_once = run.runner.at("collect"), folder / wanted.file, experiment.rollout.prompts_per_step
        done, written, failed, played = 0, 0, 0, Counter[str]()
        run.sinks.stage(COLLECTING, wanted.tasks)
        with open_rows(path, wanted.form is Form.messages) as write:
            # As many tasks at once as a training step has, so that few conversations are held.
            while chosen := list(itertools.islice(tasks, min(at_once, wanted.tasks - done))):
                groups = await together(runner.again(task, played).run_group(task, wanted.samples) for task in chosen)
                run.sinks.tell(describe_failures(groups, None))
                rows = _rows(run, groups)
                write(rows)
                written += len(rows)
                done += len(chosen)
                metrics = describe(groups, runner.reward.success_at, wanted.samples)
                run.sinks.log({f"collect/{key}": value for key, value in metrics.items()}, done)
                for group in groups:
                    failed = 0 if group.valid else failed + 1
                if failed and (failed == done or failed >= _MOST_FAILED):
                    which = f"tasks {done - failed + 1} to {done}" if failed > 1 else f"task {done}"
                    reason = groups[-failed:][0].trajectories[0].reason
                    raise AllFailedError(f"every conversation of {which} failed, by {reason}")
        write_summary(folder, {"collect/tasks": done, "collect/conversations": written})
        run.sinks.note(f"{written} conversations of {done} tasks are in {path}")


def _rows(run: Run, groups: list[Group]) -> list[dict[str, Any]]:
    wanted = run.experiment.collect
    valid = [t for group in groups for t in group.valid]
    chosen = [t for t in valid if t.succeeded(run.runner.reward.success_at) or not wanted.successes]
    return [trajectory_row(t) if wanted.form is Form.trajectories else fine_tuning_row(t) for t in chosen]
