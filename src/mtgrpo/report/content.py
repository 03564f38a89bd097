"""What a report says about runs, whatever it is written in."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtgrpo.config.recipe import read_recipe, recipes
from mtgrpo.evaluation.findings import OTHER_BEFORE
from mtgrpo.evaluation.statistics import Comparison, Estimate, compare_by_task, mean_over_tasks, wilson
from mtgrpo.record.reading import AFTER, BEFORE, RunRecord, conversations, count, flat, of_set, places_of_turns, step_of
from mtgrpo.record.shapes import Json
from mtgrpo.runtime.text import clock, is_number, number, shorten
from mtgrpo.types import EVALUATION, LEARNING

Series = list[tuple[float, float]]  # step, value
Outcomes = Mapping[str, Sequence[float]]  # task -> 1.0 or 0.0 for each of its samples

FIRST = (  # metrics that say how a run went, in the order they are shown; the others follow by name
    *("reward/mean", "reward/success", "eval/success", "eval/greedy"),
    *("policy/loss", "policy/entropy", "policy/kl", "policy/grad_norm", "policy/clip_fraction", "policy/lr"),
    *("reward/groups_with_variance", "rollout/turns", "rollout/sampled_tokens", "rollout/tool_rate"),
    *("rollout/tool_error_rate", "rollout/truncated", "perf/tokens_per_s", "sft/loss"),
)
PARTS = ("recipe", "model.name", "task", "environment", "reward", "algorithm", "advantage", "seed", "trainer.steps")
RESULT = ("held-out", "before", "after", "change")
TIMES = {
    "time/sft_s": "warm start",
    "time/rl_s": "reinforcement learning, without evaluation",
    "time/total_s": "in all",
}
ABOUT_INTERVALS = (
    "In brackets 95 % intervals over tasks; p is of the paired sign-flip test, task by task. "
    "They say nothing of how seeds differ."
)
_EXAMPLES = 2  # of success, and of failure


@dataclass(frozen=True)
class Measurement:
    """One metric of an evaluation, before and after training; where nothing was trained there is no `before`."""

    metric: str
    before: Estimate | None
    after: Estimate | None
    comparison: Comparison | None = None


@dataclass(frozen=True)
class Example:
    """One conversation: what the policy was given, and what then happened."""

    success: bool
    row: Json
    prompt: Sequence[Json]
    said: Sequence[Json]


def parts(runs: Sequence[RunRecord]) -> list[str]:
    """Which parts the runs were made of: a line of those that all share, and one for each run where others differ."""
    shared = [key for key in PARTS if len({run.settings.get(key, "") for run in runs}) == 1]
    others = [key for key in PARTS if key not in shared]
    lines = [_parts(runs[0], shared), *(f"{run.name}: {_parts(run, others)}" for run in runs if others)]
    return [line for line in lines if line]


def _parts(run: RunRecord, keys: Sequence[str]) -> str:
    named = {key: run.settings[key] for key in keys if run.settings.get(key)}
    return ", ".join(f"{key.removesuffix('.name').removeprefix('trainer.')} {value}" for key, value in named.items())


def measurements(run: RunRecord) -> list[Measurement]:
    """Success, pass@k and greedy success with 95 % intervals over the held-out tasks; of other sets as NAME/success.

    Success is a mean over several samples of each task. Where the evaluation left its conversations its interval takes
    account of them, and both evaluations are compared task by task. Otherwise its interval is the one that holds
    whatever the samples of a task have in common: as wide as if there were one of each.
    """
    keys = [key.removeprefix("eval/") for key in run.summary if key.startswith("eval/")]
    names = {key.removesuffix("/before").removesuffix("/after") for key in keys}
    shown = [name for name in names if name.rpartition("/")[2].startswith(("success", "greedy", "pass@"))]
    shown.sort(key=lambda name: (name.rpartition("/")[0], not name.endswith("success"), name))
    measured: list[Measurement] = []
    for name, metrics in itertools.groupby(shown, key=lambda name: name.rpartition("/")[0]):
        before, after = (run.outcomes(of_set(file, name)) for file in (BEFORE, AFTER))
        measured += [_measurement(run, metric, before, after) for metric in metrics]
    return measured


def _measurement(run: RunRecord, name: str, before: Outcomes, after: Outcomes) -> Measurement:
    tasks = len(after) or count(run.settings.get("eval.tasks", ""))

    def estimate(key: str) -> Estimate | None:
        value = run.summary.get(key)
        return wilson(float(value), tasks) if is_number(value) and 0 <= value <= 1 and tasks else None

    first, last = estimate(f"eval/{name}/before"), estimate(f"eval/{name}/after") or estimate(f"eval/{name}")
    if not (name.endswith("success") and after):
        return Measurement(name, first, last)
    if before:
        first = mean_over_tasks(list(before.values()))
    last = mean_over_tasks(list(after.values()))
    return Measurement(name, first, last, compare_by_task(before, after))


def series(run: RunRecord) -> dict[str, Series]:
    """Every metric over the steps of its stage, the most telling first; evaluations stand at the steps of training."""
    curves: dict[str, dict[float, float]] = {}
    trained = 0.0
    for row in run.metrics.rows:
        step, stage = row.get("step"), row.get("stage")
        if not is_number(step):
            continue
        if stage == LEARNING:
            trained = float(step)
        at = trained if stage == EVALUATION else float(step)
        for metric, value in row.items():
            if metric != "step" and is_number(value):
                curves.setdefault(metric, {})[at] = float(value)  # of a step that a resumed run repeats, the last
    return {metric: sorted(curves[metric].items()) for metric in _ordered(curves)}


def curves(runs: Sequence[RunRecord]) -> tuple[list[tuple[str, list[Series | None]]], list[str]]:
    """Every metric that changes, with its series in each run; and `name = value` of those that never do."""
    of_runs = [series(run) for run in runs]
    drawn: list[tuple[str, list[Series | None]]] = []
    constant: list[str] = []
    for metric in _ordered({metric for of_run in of_runs for metric in of_run}):
        lines = [of_run.get(metric) for of_run in of_runs]
        values = {value for line in lines for _, value in line or []}
        if len(values) == 1 and metric not in FIRST[:3]:
            constant.append(f"{metric} = {number(values.pop())}")
        else:
            drawn.append((metric, lines))
    return drawn, constant


def _ordered(metrics: Iterable[str]) -> list[str]:
    rank = {metric: place for place, metric in enumerate(FIRST)}
    return sorted(metrics, key=lambda metric: (rank.get(metric, len(FIRST)), metric))


def configuration(runs: Sequence[RunRecord]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Options and their value in each run, under headings: what differs stands first. An option is listed once."""
    keys = sorted({key for run in runs for key in run.settings})
    values = {key: [run.settings.get(key, "") for run in runs] for key in keys}
    typed = {line.lstrip("+~").partition("=")[0] for run in runs for line in run.overrides}
    of_recipe = {key for run in runs for key in set_by_recipe(run)}
    headings: list[tuple[str, list[str]]] = [
        ("Different between the runs", [key for key in keys if len(set(values[key])) > 1]),
        ("Given on the command line", [key for key in keys if key in typed]),
        ("Set by the recipe", [key for key in keys if key in of_recipe]),
        ("Defaults", keys),
    ]
    # Each option is taken out of `values` by the first heading that has it.
    sections = [(heading, [(key, values.pop(key)) for key in chosen if key in values]) for heading, chosen in headings]
    return [(heading, options) for heading, options in sections if options]


def set_by_recipe(run: RunRecord) -> set[str]:
    """The options that the recipes of a run set, and those that they inherit, as far as they are ours.

    The record may be a stranger's, and name any file of this machine as one.
    """
    names = recipes().keys() & run.settings.get("recipe", "").strip("[]").split(",")
    layers = [layer for name in names for layer in read_recipe(name)]
    return {key for layer in layers for key in (*layer.choices, *flat(layer.values))}


def timing(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Times of the stages, and means over the steps of training of what was measured of the machine."""
    rows = [(label, [clock(run.summary.get(key)) for run in runs]) for key, label in TIMES.items()]
    of_runs = [run.metrics.stage(LEARNING) for run in runs]
    measured = {metric for steps in of_runs for row in steps for metric in row}
    for metric in sorted(metric for metric in measured if metric.startswith(("time/", "perf/", "profile/"))):
        values = [[row[metric] for row in steps if is_number(row.get(metric))] for steps in of_runs]
        if metric.startswith("profile/") and not any(map(any, values)):
            continue
        means = [number(sum(of_run) / len(of_run)) if of_run else "" for of_run in values]
        rows.append((f"{metric}, mean of a step", means))
    return [(label, cells) for label, cells in rows if any(cells)]


def examples(run: RunRecord) -> tuple[str, list[Example]]:
    """Where they come from, and some conversations: successes, then others, each of another task."""
    chosen: dict[bool, dict[str, Example]] = {True: {}, False: {}}
    for _, row in conversations(run.trajectories(run.newest)) if run.newest else ():
        success, task = run.succeeded(row), str(row.get("task"))
        if len(chosen[success]) < _EXAMPLES and task not in chosen[success]:
            chosen[success][task] = _example(row, success)
        if all(len(of_kind) == _EXAMPLES for of_kind in chosen.values()):
            break
    step = step_of(run.newest)
    source = f"step {step:,} of training" if step else "the evaluation after training"
    return source, [*chosen[True].values(), *chosen[False].values()]


def _example(row: Json, success: bool) -> Example:
    messages = [
        {key: shorten(value) if isinstance(value, str) else value for key, value in message.items()}
        for message in row.get("messages", ())
    ]
    start = min(places_of_turns(row), default=len(messages))
    return Example(success, row, messages[:start], messages[start:])


def results(runs: Sequence[RunRecord]) -> list[tuple[int, list[str]]]:
    """All that was measured on held-out tasks: the number of the run, and the cells of RESULT."""
    rows: list[tuple[int, list[str]]] = []
    for place, run in enumerate(runs):
        for measured in measurements(run):
            gained = "none: before was measured otherwise" if OTHER_BEFORE in run.summary else change(measured)
            rows.append((place, [measured.metric, interval(measured.before), interval(measured.after), gained]))
    return rows


def against_first(runs: Sequence[RunRecord]) -> list[str]:
    """What the others differ from the first run in, task by task, where both were measured on the same tasks."""
    lines: list[str] = []
    first = runs[0].outcomes(AFTER)
    for run in runs[1:]:
        other = run.outcomes(AFTER)
        if comparison := compare_by_task(first, other):
            shared = len(first.keys() & other.keys())
            lines.append(f"{run.name} against {runs[0].name}, success on {shared} tasks: {comparison}")
    return lines


def interval(estimate: Estimate | None) -> str:
    """Mean and interval in per cent; "" for none."""
    return f"{estimate.mean:.1%} ({estimate.low:.1%} to {estimate.high:.1%})" if estimate else ""


def change(measurement: Measurement) -> str:
    """How much was gained, in percentage points, and how sure that is; "" where one of the two is missing."""
    before, after = measurement.before, measurement.after
    if measurement.comparison:
        return str(measurement.comparison)
    return f"{100 * (after.mean - before.mean):+.1f} points" if before and after else ""


def states(runs: Sequence[RunRecord]) -> list[str]:
    """What is to be known of the runs that have not ended well."""
    lines: list[str] = []
    for run in runs:
        if not run.summary:
            learning = run.metrics.stage(LEARNING)
            steps = f"after {number(learning[-1].get('step'))} steps of training" if learning else "before training"
            last = run.notes[-1] if run.notes else ""
            lines.append(f"{run.name}: no summary.json: it runs, or it ended {steps}. {last}")
    return lines


def thinned(runs: Sequence[RunRecord]) -> list[str]:
    """What curves leave out."""
    lines: list[str] = []
    for run in runs:
        metrics, drawn = run.metrics, len(run.metrics.rows) + run.metrics.unreadable
        if drawn < metrics.total:
            lines.append(f"{run.name}: {drawn:,} of {metrics.total:,} rows are drawn, evenly chosen.")
        if metrics.unreadable:
            lines.append(f"{run.name}: {metrics.unreadable:,} of the rows looked at could not be read.")
    return lines


def versions(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What computed, and its version in each run."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return [(name, [run.versions.get(name, "") for run in runs]) for name in names]
