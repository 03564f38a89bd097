"""What an evaluation found, with intervals: the table that `mtgrpo eval` ends with, and `evaluation.json`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtgrpo.evaluation import statistics
from mtgrpo.rewards import Reward
from mtgrpo.types import CallOutcome, Group, Trajectory

OTHER_BEFORE = "eval/other_before"  # in the summary: success before was measured with other tasks or settings
NO_TOOLS = "no_tools"  # the name of the control beside the sets of tasks
_DIFFICULTY = ("difficulty", "level")  # what data sets call it, in a task's metadata
TRAINED = "train/success"  # in the summary: of training tasks, the mean over the last steps, the newest weighing most
_HARDLY = 0.05  # a change of success that is not worth a word
_TWO_ERRORS = 1.4  # standard errors of a difference of shares at worst, over the root of their outcomes: 2 sqrt(2) .5
_SEVERAL = 5  # steps: before, training success is of a few tasks alone
_FAR = 0.2  # training success above held-out success: what was learned is of the training tasks
_MAX_PARTS = 8  # rows of a breakdown; the others are one


@dataclass(frozen=True)
class EvaluationGroups:
    """What an evaluation sampled of a set of tasks."""

    sampled: list[Group]  # several samples of each task
    greedy: list[Group]


@dataclass(frozen=True)
class Findings:
    """Estimates over the tasks of a set, with 95 % intervals, and means that have none."""

    tasks: int
    samples: int  # of every task, at least
    shares: dict[str, statistics.Estimate]  # success, which is avg@k, pass@k, greedy
    means: dict[str, float]  # the best reward of all samples, the success of a majority vote
    breakdowns: dict[str, dict[str, statistics.Estimate]]  # success by turns, tools that were called, difficulty

    @classmethod
    def of(cls, groups: EvaluationGroups, reward: Reward) -> Findings:
        """Of groups of which one trajectory at least did not fail.

        pass@k and best-of-n are estimated without bias from all samples of a task (`mtgrpo.evaluation.statistics`).
        """
        by_task = [group.valid for group in groups.sampled if group.valid]
        outcomes = [_outcomes(trajectories, reward.success_at) for trajectories in by_task]
        greedy = [_outcomes(group.valid, reward.success_at) for group in groups.greedy if group.valid]
        samples = min(map(len, outcomes))
        shares = {"success": statistics.mean_over_tasks(outcomes)}
        for k in sorted({2**power for power in range(1, samples.bit_length())} | {samples} - {1}):
            shares[f"pass@{k}"] = statistics.mean_pass_at_k(outcomes, k)
        shares["greedy"] = statistics.mean_over_tasks(greedy)
        best = [statistics.best_of_n([t.reward for t in trajectories], samples) for trajectories in by_task]
        answers = [[reward.answer(t) for t in trajectories] for trajectories in by_task]
        votes = list(map(statistics.majority_vote, answers, outcomes))
        means = {f"best reward of {samples}": sum(best) / len(best), "majority vote": sum(votes) / len(votes)}
        ways: dict[str, Callable[[Trajectory], str]] = {"turns": lambda t: str(len(t.turns)), "tool": _tools}
        for name in _DIFFICULTY:
            if any(name in trajectories[0].task.metadata for trajectories in by_task):
                ways[name] = lambda t, name=name: str(t.task.metadata.get(name, "not given"))
        breakdowns = {name: _break_down(by_task, reward.success_at, way) for name, way in ways.items()}
        several = {name: parts for name, parts in breakdowns.items() if len(parts) > 1}
        return cls(len(by_task), samples, shares, means, several)


def record(findings: Mapping[str, Findings], control: statistics.Comparison | None) -> dict[str, Any]:
    """For JSON: what was found of the run's own tasks, and under `sets` of the others by their names."""
    sets = {name: dataclasses.asdict(of_set) for name, of_set in findings.items() if name}
    tools = {"tools_against_none": dataclasses.asdict(control)} if control else {}
    return {**dataclasses.asdict(findings[""]), **tools, "sets": sets}


def table(findings: Mapping[str, Findings], control: statistics.Comparison | None) -> str:
    """For people; success by turns, tools and difficulty of the run's own tasks alone."""
    blocks: dict[str, dict[str, str]] = {}
    for name, of_set in findings.items():
        shares = {key: str(estimate) for key, estimate in of_set.shares.items()}
        rows = {f"success (avg@{of_set.samples})": shares.pop("success"), **shares}
        rows |= {key: f"{value:.3f}" for key, value in of_set.means.items()}
        blocks[(f"{name}: " if name else "") + f"{of_set.tasks} held-out tasks x {of_set.samples} samples"] = rows
    broken_down = findings[""].breakdowns.items()
    blocks["success by"] = {f"{way} {part}": str(parts[part]) for way, parts in broken_down for part in parts}
    width = max(len(label) for rows in blocks.values() for label in rows)
    lines = ["95 % intervals, over tasks"]
    for head, rows in blocks.items():
        lines += [head, *(f"  {label:<{width}}  {value}" for label, value in rows.items())] if rows else []
    return "\n".join([*lines, *([f"with tools against without: {control}"] if control else [])])


def control(groups: Mapping[str, EvaluationGroups], success_at: float) -> statistics.Comparison | None:
    """How much tools change success, task by task in the order of both; None where nothing was played without them."""
    if NO_TOOLS not in groups:
        return None
    without, with_tools = (
        {str(place): _outcomes(of.valid, success_at) for place, of in enumerate(groups[name].sampled) if of.valid}
        for name in (NO_TOOLS, "")
    )
    return statistics.compare_by_task(without, with_tools)


def what_was_learned(summary: Mapping[str, float], samples: int, lr: float) -> str:
    """Held-out success before and after training with `lr`, and whether `samples` tries at a task found it before.

    A share of n outcomes has a standard error of at most .5 / sqrt(n), and the difference of two, as both are of the
    same tasks, one of at most .7 / sqrt(n). A change below two of these, 1.4 / sqrt(n), is one that chance gives, and
    is called so. n is tasks times samples for sampled success, tasks for greedy success and pass@k. "Sharpening" is
    that pass@k rose by less than half of what sampled success did, by more than chance or as it could not rise.
    The tasks of `eval.sets` get a line each.
    """
    tasks = int(summary["eval/tasks"])
    few = f"{tasks} held-out task{'s' * (tasks > 1)}"
    best = f"pass@{samples}"
    tried = samples > 1 and f"eval/{best}/before" in summary  # which a run that goes on may have with other samples
    names = {"greedy": "greedy", "sampled": "success", **({best: best} if tried else {})}
    found = {label: [summary[f"eval/{name}/{when}"] for when in ("before", "after")] for label, name in names.items()}
    line = ", ".join(f"{label} {before:.3f} -> {after:.3f}" for label, (before, after) in found.items())
    if OTHER_BEFORE in summary:
        return f"held-out success: {line}\nno comparison: before was measured with other tasks or settings than after"
    gains = {label: after - before for label, (before, after) in found.items()}
    sampled = f"sampled {gains['sampled']:+.3f}"
    rose = f"{sampled}, {best} {gains.get(best, 0.0):+.3f}"
    chance = {label: _TWO_ERRORS / math.sqrt(tasks * (samples if label == "sampled" else 1)) for label in gains}
    least = {label: max(_HARDLY, errors) for label, errors in chance.items()}
    if gains["sampled"] < least["sampled"] and gains["greedy"] >= least["greedy"]:
        verdict = "\nonly greedy answers gained"
        if gains["sampled"] >= _HARDLY:
            verdict = f"\ngreedy answers gained; {sampled} is no more than chance gives with {few}"
    elif max(gains["sampled"], gains["greedy"]) < _HARDLY:
        verdict = "\nno gain worth a word"
    elif gains["sampled"] < least["sampled"]:
        verdict = f"\nno more than chance gives with {few}"
    elif not tried or gains[best] < -least[best]:  # which is told below
        verdict = ""
    elif found["greedy"][0] >= found["sampled"][1]:
        verdict = f"\nmostly sharpening: sampled answers came nearer to greedy ones, which were as good before ({rose})"
    elif gains[best] < gains["sampled"] / 2 - (chance[best] if found[best][0] < 1 else 0.0):
        verdict = f"\nmostly sharpening: one try now finds what took {samples} tries before ({rose})"
    elif gains[best] < max(chance[best], gains["sampled"] / 2):
        verdict = f"\nsuccess rose; {few} cannot tell whether {samples} tries found it before ({rose})"
    else:
        verdict = f"\nlearned what {samples} tries did not find before ({rose})"
    if fell := [f"{label} {gain:+.3f}" for label, gain in gains.items() if gain < -least[label]]:
        cure = f"try optimizer.lr={lr / 3:.1g} (a third) or more rollout.prompts_per_step"
        verdict += f"\nworse than before training: {', '.join(fell)} (`mtgrpo show --failures`); {cure}"
    trained = summary.get(TRAINED, 0.0)
    if (above := trained - found["sampled"][1]) > max(_FAR, chance["greedy"]) and summary["train/steps"] >= _SEVERAL:
        verdict += (
            f"\nmemorised, at least in part: training success is {trained:.3f}, {above:.3f} above held-out success; "
            "more training tasks or fewer steps (eval.stop), or these were easier from the start"
        )
    for key, before in summary.items():
        if (of_set := re.fullmatch("(eval/([^/]+)/success)/before", key)) and f"{of_set[1]}/after" in summary:
            verdict += f"\n{of_set[2]}: sampled {before:.3f} -> {summary[f'{of_set[1]}/after']:.3f}"
    return f"held-out success: {line}{verdict}"


def _outcomes(trajectories: Sequence[Trajectory], success_at: float) -> list[float]:
    return [float(trajectory.succeeded(success_at)) for trajectory in trajectories]


def _tools(trajectory: Trajectory) -> str:
    names = {call.name if call.outcome is not CallOutcome.unknown else "" for call in trajectory.calls}
    return ", ".join(sorted(name or "no such tool" for name in names)) or "none"


def _break_down(
    by_task: Sequence[Sequence[Trajectory]], success_at: float, way: Callable[[Trajectory], str]
) -> dict[str, statistics.Estimate]:
    """Success by what `way` says of a trajectory; the largest parts, in the order of their names."""
    parts: dict[str, list[list[float]]] = defaultdict(list)
    for trajectories in by_task:
        of_task: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            of_task[way(trajectory)].append(trajectory)
        for name, inside in of_task.items():
            parts[name].append(_outcomes(inside, success_at))
    by_size = sorted(parts, key=lambda name: -sum(map(len, parts[name])))
    largest = by_size[: _MAX_PARTS - (len(by_size) > _MAX_PARTS)]
    shown = {name: parts[name] for name in sorted(largest, key=lambda name: (len(name), name))}
    if rest := [outcomes for name in by_size[len(largest) :] for outcomes in parts[name]]:
        shown["other"] = rest
    return {name: statistics.mean_over_tasks(outcomes) for name, outcomes in shown.items()}
