"""Warnings, with the setting to change, from the metrics of one step after another."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import POLICY_ERROR, REFUSED
from mtgrpo.evaluation.findings import TRAINED
from mtgrpo.model.rounding import HARMLESS
from mtgrpo.policy.step import Metrics
from mtgrpo.runtime.resources import memory_left, resident_bytes

PATIENCE = 5  # steps in a row in which something is bad before it is said
COLLAPSED = 0.1  # of the first step's entropy
SUDDEN = 2  # steps within which a fall of success and entropy is said at once
FAR_APART = 10.0  # times the largest difference of log-probabilities in the steps before
PROVEN = "engine/proof_nats"  # in the metrics of servers
TRUNCATED = 0.5  # the share of conversations that a limit cut
CUT_BY = "rollout/truncated/"
WITHOUT_VARIANCE = "train/steps_without_variance"  # in the summary: steps in which no group's rewards differed
SCARCE = 0.08  # the share of the memory that is left when the kernel may soon end the process


def in_vain(summary: Metrics) -> str:
    """What to tell the user of a run in which no step had anything to learn from; "" of any other."""
    steps = summary["train/steps"]
    if not steps or summary.get(WITHOUT_VARIANCE) != steps:
        return ""
    cure = _more_variance(summary.get(TRAINED, 0.0))
    return f"nothing was learned: in no step, of {steps:.0f}, did the rewards of a group differ; choose {cure}"


def foreseen(summary: Metrics, experiment: Experiment) -> str:
    """What to say where the evaluation before training shows that less than one group a step will differ."""
    share = summary.get("eval/groups_with_variance/before", 1.0)
    if share * experiment.rollout.prompts_per_step >= 1:
        return ""
    examples, more = experiment.task.examples, "messages of your own as task.examples"
    if isinstance(examples, int) and experiment.task.demonstrates:
        more = f"task.examples={2 * examples or 4}, or your own messages"
    return (
        f"less than one group a step will have rewards that differ, so little will be learned: of the held-out tasks, "
        f"with {experiment.eval.samples} samples each, {share:.1%} had; try "
        f"{_more_variance(summary['eval/success/before'], more)}"
    )


def _more_variance(success: float, examples: str = "task.examples") -> str:
    """What makes the rewards of a group differ, where this is the share that succeeds; examples: how more are shown."""
    start = "another start (sft.steps, model.name)"
    tasks = "harder tasks" if success > 0.5 else f"easier tasks, more worked examples ({examples}), {start}"
    unpaid = "" if success else "; or see by `mtgrpo show` whether the reward pays what is right"
    return f"{tasks}, a reward with more levels, or rollout.group_size higher{unpaid}"


@dataclass
class Trends:
    """Looks at each step's metrics. What is bad for `PATIENCE` steps in a row is said once, until it has been good."""

    entropy: float = math.nan  # of the first step
    mismatch: float = math.nan  # nats, the largest yet between trainer and servers
    tool_rate: float = 0.0  # the largest yet
    success: float = 0.0  # the largest yet
    _in_a_row: Counter[str] = field(default_factory=Counter[str])
    _before: deque[tuple[float, float]] = field(default_factory=lambda: deque[tuple[float, float]](maxlen=SUDDEN))

    def warnings(self, metrics: Metrics) -> list[str]:
        """What to tell the user after this step."""
        entropy = metrics.get("policy/entropy", math.nan)
        if math.isnan(self.entropy):
            self.entropy = entropy
        success = metrics["reward/success"]
        self.success = max(self.success, success)
        cure = f"choose {_more_variance(success)}"
        if success < self.success / 2:
            cure = f"success was {self.success:.2g} once: set a third of optimizer.lr and go on from before"
        unsolved = success < 0.8  # a policy that solves its tasks may be sure of itself
        best, widest = (max(values, default=0.0) for values in (list(zip(*self._before, strict=True)) or [(), ()]))
        self._before.append((success, 0.0 if math.isnan(entropy) else entropy))
        # Each push proves what a server holds; what happens to it until the next one shows here alone.
        mismatch = metrics.get("policy/mismatch/worst_trajectory", math.nan) if PROVEN in metrics else math.nan
        usual = self.mismatch
        if mismatch > usual or math.isnan(usual):
            self.mismatch = mismatch
        tool_rate = metrics.get("rollout/tool_rate", 0.0)
        self.tool_rate = max(self.tool_rate, tool_rate)
        waited_s = metrics.get("perf/lockstep_s", 0.0)
        left, total = memory_left()
        cut = {name.rpartition("/")[2]: share for name, share in metrics.items() if name.startswith(CUT_BY)}
        limits = [name for name in cut if name not in (POLICY_ERROR, REFUSED)]
        truncated = sum(cut[name] for name in limits)
        bad = {
            "entropy": entropy < COLLAPSED * self.entropy and unsolved,
            "collapse": success < best / 2 and entropy < COLLAPSED * widest,
            "mismatch": mismatch > max(FAR_APART * usual, HARMLESS),
            "tools": tool_rate < COLLAPSED * self.tool_rate and unsolved,
            "variance": metrics["reward/groups_with_variance"] == 0,
            "truncated": truncated > TRUNCATED,
            "memory": left < SCARCE * total,
            "lockstep": waited_s > max(1.0, metrics.get("time/rollout_s", 0.0) / 3),
        }
        texts = {
            "entropy": f"the policy's entropy fell from {self.entropy:.2g} to {entropy:.2g} nats while tasks are not "
            "solved: it explores little; set algorithm.entropy_coef or kl.coef above 0, or optimizer.lr lower",
            "collapse": f"the policy has collapsed: within {SUDDEN} steps its success fell from {best:.2g} to "
            f"{success:.2g} and its entropy from {widest:.2g} to {entropy:.2g} nats; set a third of optimizer.lr and "
            "go on from the last good checkpoint",
            "mismatch": f"in a conversation the servers' log-probabilities differ from the trainer's by {mismatch:.2g} "
            f"nats, in the steps before by at most {usual:.2g}: does somebody else write weights to a server?",
            "tools": f"tools are hardly used any more: in {tool_rate:.1%} of the conversations, once in "
            f"{self.tool_rate:.0%}, while tasks are not solved; go on from the best checkpoint with kl.coef above 0 or "
            "optimizer.lr lower, and see eval.stop",
            "variance": f"in no group do rewards differ, so nothing is learned; {cure}",
            "truncated": f"{truncated:.0%} of the conversations are cut by a limit ({', '.join(limits)}): set it "
            "higher, or 'reward=[...,length]'",
            "memory": f"{left / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are left (this process holds "
            f"{resident_bytes() / 2**30:.1f}), and without any the kernel ends the run; set batch.token_budget, "
            "rollout.max_concurrent or engine.memory_fraction lower",
            "lockstep": f"for {waited_s:.1f} s all conversations waited for the tools of some, so that digits do not "
            "depend on how quick a tool is: trainer.deterministic=false lets them go on",
        }
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name, is_bad in bad.items() if is_bad})
        due = {"memory": 1, "collapse": 1, "mismatch": 1, "lockstep": 2}
        return [texts[name] for name, times in self._in_a_row.items() if times == due.get(name, PATIENCE)]
