"""What an evaluation found, with intervals: the table that `mtgrpo eval` ends with, and `evaluation.json`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtgrpo.rewards import Reward
from mtgrpo.stages.metrics import succeeded, valid
from mtgrpo.stages.run import NO_TOOLS
from mtgrpo.statistics import (
    Comparison,
    Estimate,
    Interval,
    best_of_n,
    compare,
    majority_vote,
    mean_over_tasks,
    mean_pass_at_k,
    wilson,
)
from mtgrpo.types import Group, Outcome, Trajectory

_DIFFICULTY = ("difficulty", "level")  # what data sets call it, in a task's metadata
_MOST = 8  # rows of a breakdown; the others are one


@dataclass(frozen=True)
class Played:
    """What an evaluation sampled of a set of tasks."""

    sampled: list[Group]  # several samples of each task
    greedy: list[Group]


@dataclass(frozen=True)
class Findings:
    """Estimates over the tasks of a set, with 95 % intervals, and means that have none."""

    tasks: int
    samples: int  # of every task, at least
    shares: dict[str, Estimate]  # success, which is avg@k, pass@k, greedy
    means: dict[str, float]  # the best reward of all samples, the success of a majority vote
    breakdowns: dict[str, dict[str, Estimate]]  # success by turns, tools that were called, difficulty

    @classmethod
    def of(cls, played: Played, reward: Reward, interval: Interval = wilson) -> Findings:
        """Of groups of which one trajectory at least did not fail.

        pass@k and best-of-n are estimated without bias from all samples of a task (`mtgrpo.statistics`).
        """
        of_tasks = [found for group in played.sampled if (found := valid([group]))]
        outcomes = [outcomes for _, outcomes in _outcomes(played.sampled, reward.success_at)]
        samples = min(map(len, outcomes))
        shares = {"success": mean_over_tasks(outcomes, interval=interval)}
        for k in sorted({2**power for power in range(1, samples.bit_length())} | {samples} - {1}):
            shares[f"pass@{k}"] = mean_pass_at_k(outcomes, k, interval=interval)
        greedy = [outcomes for _, outcomes in _outcomes(played.greedy, reward.success_at)]
        shares["greedy"] = mean_over_tasks(greedy, interval=interval)
        best = [best_of_n([t.reward for t in found], samples) for found in of_tasks]
        votes = [
            majority_vote([reward.answer(t) for t in found], of_task)
            for found, of_task in zip(of_tasks, outcomes, strict=True)
        ]
        means = {f"best reward of {samples}": sum(best) / len(best), "majority vote": sum(votes) / len(votes)}
        ways: dict[str, Callable[[Trajectory], str]] = {"turns": lambda t: str(len(t.turns)), "tool": _tools}
        for name in _DIFFICULTY:
            if any(name in found[0].task.metadata for found in of_tasks):
                ways[name] = lambda t, name=name: str(t.task.metadata.get(name, "not given"))
        broken = {name: _breakdown(of_tasks, reward.success_at, way, interval) for name, way in ways.items()}
        return cls(
            len(of_tasks), samples, shares, means, {name: rows for name, rows in broken.items() if len(rows) > 1}
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """For people: what was estimated, and the estimate."""
        for name, estimate in self.shares.items():
            yield (f"success (avg@{self.samples})" if name == "success" else name), str(estimate)
        yield from ((name, f"{value:.3f}") for name, value in self.means.items())

    def broken_down(self) -> Iterator[tuple[str, str]]:
        """For people: success by what conversations were like."""
        for way, found in self.breakdowns.items():
            yield from ((f"{way} {name}", str(estimate)) for name, estimate in found.items())


def record(found: Mapping[str, Findings], control: Comparison | None) -> dict[str, Any]:
    """For JSON: what was found of the run's own tasks, and under `sets` of the others by their names."""
    sets = {name: dataclasses.asdict(each) for name, each in found.items() if name}
    tools = {"tools_against_none": dataclasses.asdict(control)} if control else {}
    return {**dataclasses.asdict(found[""]), **tools, "sets": sets}


def table(found: Mapping[str, Findings], control: Comparison | None, interval: str = "wilson") -> str:
    """For people; success by turns, tools and difficulty of the run's own tasks alone."""
    blocks = {
        (f"{name}: " if name else "") + f"{each.tasks} held-out tasks x {each.samples} samples": list(each.rows())
        for name, each in found.items()
    }
    blocks["success by"] = list(found[""].broken_down())
    width = max(len(label) for rows in blocks.values() for label, _ in rows)
    lines = [
        f"{head}\n" + "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)
        for head, rows in blocks.items()
        if rows
    ]
    compared = [f"with tools against without: {control}"] if control else []
    return "\n".join([f"95 % intervals ({interval}), over tasks", *lines, *compared])


def control(played: Mapping[str, Played], success_at: float) -> Comparison | None:
    """How much tools change success, task by task; None where nothing was played without them."""
    if NO_TOOLS not in played:
        return None
    without, given = (dict(_outcomes(played[name].sampled, success_at)) for name in (NO_TOOLS, ""))
    both = [task for task in without if task in given]
    return compare([without[task] for task in both], [given[task] for task in both]) if both else None


def _outcomes(groups: Sequence[Group], success_at: float) -> Iterator[tuple[str, list[float]]]:
    """Tasks, and 1 or 0 for every trajectory that did not fail; tasks without one are left out."""
    for group in groups:
        if found := valid([group]):
            yield group.task.id, [float(succeeded(t, success_at)) for t in found]


def _tools(trajectory: Trajectory) -> str:
    """Which tools it called."""
    names = {call.name if call.outcome is not Outcome.unknown else "" for call in trajectory.calls}
    return ", ".join(sorted(name or "no such tool" for name in names)) or "none"


def _breakdown(
    of_tasks: Sequence[Sequence[Trajectory]],
    success_at: float,
    way: Callable[[Trajectory], str],
    interval: Interval,
) -> dict[str, Estimate]:
    """Success by what `way` says of a trajectory; the largest parts, in the order of their names."""
    parts: dict[str, list[list[float]]] = defaultdict(list)
    for found in of_tasks:
        inside: dict[str, list[float]] = defaultdict(list)
        for trajectory in found:
            inside[way(trajectory)].append(float(succeeded(trajectory, success_at)))
        for name, outcomes in inside.items():
            parts[name].append(outcomes)
    by_size = sorted(parts, key=lambda name: -sum(map(len, parts[name])))
    kept = by_size[:_MOST] if len(by_size) <= _MOST else by_size[: _MOST - 1]
    rest = [outcomes for name in by_size if name not in kept for outcomes in parts[name]]
    named = {name: parts[name] for name in sorted(kept, key=lambda name: (len(name), name))} | {"other": rest}
    return {name: mean_over_tasks(outcomes, interval=interval) for name, outcomes in named.items() if outcomes}
