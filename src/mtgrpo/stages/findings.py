"""What an evaluation found, with intervals: the table that `mtgrpo eval` ends with, and `evaluation.json`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtgrpo.rewards import Reward
from mtgrpo.stages.metrics import succeeded, valid
from mtgrpo.statistics import Estimate, best_of_n, majority_vote, mean_over_tasks, mean_pass_at_k, wilson
from mtgrpo.types import Group, Trajectory

_DIFFICULTY = ("difficulty", "level")  # what data sets call it, in a task's metadata
_MOST = 8  # rows of a breakdown; the others are one


@dataclasses.dataclass(frozen=True)
class Findings:
    """Estimates over tasks, with 95 % intervals, and means that have none."""

    tasks: int
    samples: int  # of every task, at least
    shares: dict[str, Estimate]  # success, pass@k, greedy
    means: dict[str, float]  # the best reward of all samples, the success of a majority vote
    breakdowns: dict[str, dict[str, Estimate]]  # success by turns, calls of tools, difficulty

    @classmethod
    def of(cls, groups: Sequence[Group], reward: Reward, greedy: float) -> Findings:
        """Of an evaluation's groups, of which one trajectory at least did not fail; greedy: success of the other one.

        pass@k and best-of-n are estimated without bias from all samples of a task (`mtgrpo.statistics`).
        """
        of_tasks = [found for group in groups if (found := valid([group]))]
        outcomes = [[float(succeeded(t, reward.success_at)) for t in found] for found in of_tasks]
        samples = min(map(len, outcomes))
        shares = {"success": mean_over_tasks(outcomes)}
        for k in (2**power for power in range(1, samples.bit_length())):
            shares[f"pass@{k}"] = mean_pass_at_k(outcomes, k)
        if samples > 1:
            shares[f"pass@{samples}"] = mean_pass_at_k(outcomes, samples)
        shares["greedy"] = wilson(greedy, len(of_tasks))
        best = [best_of_n([t.reward for t in found], samples) for found in of_tasks]
        votes = [
            majority_vote([reward.answer(t) for t in found], of_task)
            for found, of_task in zip(of_tasks, outcomes, strict=True)
        ]
        means = {f"best reward of {samples}": sum(best) / len(best), "majority vote": sum(votes) / len(votes)}
        ways: dict[str, Callable[[Trajectory], str]] = {"turns": lambda t: str(len(t.turns))}
        if any(t.tool_calls for found in of_tasks for t in found):
            ways["calls of tools"] = lambda t: str(t.tool_calls)
        for name in _DIFFICULTY:
            if any(name in found[0].task.metadata for found in of_tasks):
                ways[name] = lambda t, name=name: str(t.task.metadata.get(name, "not given"))
        broken = {name: _breakdown(of_tasks, reward.success_at, way) for name, way in ways.items()}
        return cls(
            len(of_tasks), samples, shares, means, {name: rows for name, rows in broken.items() if len(rows) > 1}
        )

    def record(self) -> Mapping[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """For people."""
        rows = [(name, str(estimate)) for name, estimate in self.shares.items()]
        rows += [(name, f"{value:.3f}") for name, value in self.means.items()]
        for way, found in self.breakdowns.items():
            rows += [(f"{name} {way}", str(estimate)) for name, estimate in found.items()]
        head = f"{self.tasks} held-out tasks, at least {self.samples} samples of each; 95 % intervals over tasks"
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _breakdown(
    of_tasks: Sequence[Sequence[Trajectory]], success_at: float, way: Callable[[Trajectory], str]
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
    return {name: mean_over_tasks(outcomes) for name, outcomes in named.items() if outcomes}
