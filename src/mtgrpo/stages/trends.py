"""Warnings, with the setting to change, from the metrics of one step after another."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from mtgrpo.policy.step import Metrics
from mtgrpo.resources import memory_left, resident_bytes

PATIENCE = 5  # steps in a row in which something is bad before it is said
COLLAPSED = 0.1  # of the first step's entropy
TRUNCATED = 0.5  # the share of conversations that a limit cut
WITHOUT_VARIANCE = "train/steps_without_variance"  # in the summary: steps in which no group's rewards differed
SCARCE = 0.08  # the share of the memory that is left when the kernel may soon end the process
_MORE_VARIANCE = (
    "choose easier or harder tasks, a reward with more levels, rollout.group_size higher, or a longer warm start"
)


def in_vain(summary: Metrics) -> str:
    """What to tell the user of a run in which no step had anything to learn from; "" of any other."""
    steps = summary["train/steps"]
    if not steps or summary.get(WITHOUT_VARIANCE) != steps:
        return ""
    return f"nothing was learned: in no step, of {steps:.0f}, did the rewards of a group differ; {_MORE_VARIANCE}"


@dataclass
class Trends:
    """Looks at each step's metrics. What is bad for `PATIENCE` steps in a row is said once, until it has been good."""

    entropy: float = math.nan  # of the first step
    _in_a_row: Counter[str] = field(default_factory=Counter[str])

    def warnings(self, metrics: Metrics) -> list[str]:
        """What to tell the user after this step."""
        entropy, truncated = metrics.get("policy/entropy", math.nan), metrics.get("rollout/truncated", 0.0)
        if math.isnan(self.entropy):
            self.entropy = entropy
        unsolved = metrics["reward/success"] < 0.8  # a policy that solves its tasks may be sure of itself
        left, total = memory_left()
        limits = [name.rpartition("/")[2] for name in metrics if name.startswith("rollout/truncated/")]
        found = {
            "entropy": entropy < COLLAPSED * self.entropy and unsolved,
            "variance": metrics["reward/groups_with_variance"] == 0,
            "truncated": truncated > TRUNCATED,
            "memory": left < SCARCE * total,
        }
        texts = {
            "entropy": f"the policy's entropy fell from {self.entropy:.2g} to {entropy:.2g} nats while tasks are not "
            "solved: it explores little; set algorithm.entropy_coef or kl.coef above 0, or optimizer.lr lower",
            "variance": f"in no group do rewards differ, so nothing is learned; {_MORE_VARIANCE}",
            "truncated": f"{truncated:.0%} of the conversations are cut by a limit ({', '.join(limits)}): set it "
            "higher, or reward=[...,length]",
            "memory": f"{left / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are left (this process holds "
            f"{resident_bytes() / 2**30:.1f}), and without any the kernel ends the run; set batch.token_budget, "
            "rollout.max_concurrent or engine.memory_fraction lower",
        }
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name, bad in found.items() if bad})
        due = {"memory": 1}
        return [texts[name] for name, times in self._in_a_row.items() if times == due.get(name, PATIENCE)]
