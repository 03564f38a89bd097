"""What groups were like, in numbers: the one place that describes them, for evaluation, training and the profile."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from mtgrpo.advantages import varies
from mtgrpo.advantages.rewards import comparable
from mtgrpo.config.experiment import Experiment
from mtgrpo.policy.step import Metrics
from mtgrpo.profile import Profile
from mtgrpo.record.writing import page_of
from mtgrpo.rollout.stream import RolloutBatch
from mtgrpo.runtime.isolation import count_abandoned_threads
from mtgrpo.types import CallOutcome, Group, Status, Trajectory


def _valid(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.valid]


def describe(groups: Sequence[Group], success_at: float, samples: int) -> Metrics:
    """Means over trajectories, failed ones left out; pass@samples is the share of tasks that any sample solves."""
    scored = _valid(groups)
    if not scored:
        return {"failed": 1.0}
    limits = Counter(t.reason for t in scored if t.status is Status.TRUNCATED)
    tools = {
        "tool_error_rate": fmean(t.tool_errors > 0 for t in scored),
        "tool_timeouts": fmean(t.tool_timeouts for t in scored),
        "tool_retries": fmean(t.tool_retries for t in scored),
        "tool_outages": fmean(len(t.outages) for t in scored),
    }
    return {
        "success": fmean(t.succeeded(success_at) for t in scored),
        "reward": fmean(t.reward for t in scored),
        f"pass@{samples}": fmean(any(t.succeeded(success_at) for t in group.valid) for group in groups if group.valid),
        "tool_rate": fmean(t.tool_calls > 0 for t in scored),
        **(tools if not any(t.led_by_agent for t in scored) else {}),  # agents have tools of their own
        "turns": fmean(len(t.turns) for t in scored),
        "sampled_tokens": fmean(t.sampled_tokens for t in scored),
        "truncated": fmean(t.status is Status.TRUNCATED for t in scored),
        **{f"truncated/{limit}": cut / len(scored) for limit, cut in limits.items()},
        "failed": 1 - len(scored) / sum(len(group.trajectories) for group in groups),
    }


def share_that_varies(groups: Sequence[Group], experiment: Experiment) -> float:
    """The share of groups whose rewards differ, as training sees them: the others teach nothing."""
    estimator, algorithm = experiment.advantage, experiment.algorithm
    return fmean(any(varies(g, estimator, algorithm) for g in comparable([group], algorithm)) for group in groups)


def describe_tools(scored: Sequence[Trajectory], success_at: float) -> Metrics:
    """For each tool that was called: calls per conversation, the share of them that failed, how long they took, and the
    success of the conversations that called it and of those that did not. Calls of no tool are counted together.
    """
    calls = [call for t in scored for call in t.calls]
    hallucinated = [call for call in calls if call.outcome is CallOutcome.unknown]
    metrics: Metrics = {"tool/hallucinated": len(hallucinated) / len(scored)} if hallucinated else {}
    of_tools = [call for call in calls if call.name and call.outcome is not CallOutcome.unknown]
    for name in dict.fromkeys(call.name for call in of_tools):
        made = [call for call in of_tools if call.name == name]
        metrics[f"tool/{name}/calls"] = len(made) / len(scored)
        if seen := [call for call in made if call.outcome is not CallOutcome.unseen]:
            metrics[f"tool/{name}/errors"] = fmean(call.outcome is not CallOutcome.answered for call in seen)
            seconds = sorted(call.seconds for call in seen)
            metrics[f"perf/tool/{name}/p50_s"] = seconds[(len(seconds) - 1) // 2]
            metrics[f"perf/tool/{name}/p95_s"] = seconds[(len(seconds) - 1) * 95 // 100]
        for key, called in (("with", True), ("without", False)):
            of = [t.succeeded(success_at) for t in scored if any(call.name == name for call in t.calls) is called]
            if of:
                metrics[f"tool/{name}/success_{key}"] = fmean(of)
    return metrics


def describe_step(
    batch: RolloutBatch, experiment: Experiment, version: int, rollout_s: float, train_s: float
) -> Metrics:
    """What the rollout batch of a training step was like; `version`: of the policy that is trained on it.

    Names under perf/ and time/ are measurements of the machine. Where what arrives (`rollout/arrived_tokens`) is on
    average longer than what is trained (`rollout/sampled_tokens`), long conversations are still waited for.
    """
    groups = batch.groups
    means = describe(groups, experiment.reward.success_at, experiment.rollout.group_size)
    trajectories = [t for group in groups for t in group.trajectories]
    count = max(1, len(trajectories))
    causes = Counter(t.reason.partition(":")[0] for t in trajectories if t.failed)
    return {
        "reward/mean": means.pop("reward", math.nan),
        "reward/success": means.pop("success", math.nan),
        "reward/groups_with_variance": share_that_varies(groups, experiment),
        **_components(trajectories),
        **_turn_rewards(trajectories),
        **_agents(trajectories),
        **{f"rollout/{name}": value for name, value in means.items()},
        "rollout/segments": sum(t.segments for t in trajectories) / count,
        "rollout/retried": sum(t.attempts > 1 for t in trajectories) / count,
        **{f"rollout/failed/{cause}": failed / count for cause, failed in causes.items()},
        "rollout/groups_left_out": float(len(groups) - len(comparable(groups, experiment.algorithm))),
        "rollout/filtered": batch.left_out / len(groups),
        **({"rollout/skipped": float(batch.skipped)} if experiment.curriculum.active else {}),
        **describe_tools(_valid(groups), experiment.reward.success_at),
        **describe_staleness(batch, version),
        **_speed(trajectories, rollout_s + train_s if experiment.rollout.max_staleness else rollout_s),
        "perf/trainer_idle_share": rollout_s / max(1e-9, rollout_s + train_s),
        "time/rollout_s": rollout_s,
        "time/train_s": train_s,
    }


def _components(trajectories: Sequence[Trajectory]) -> Metrics:
    """The means of what rewards are made of, where they are composed; each over the trajectories that have it."""
    names = dict.fromkeys(name for t in trajectories for name in t.components)
    amounts = {name: [t.components[name] for t in trajectories if name in t.components] for name in names}
    return {f"reward/{name}/mean": fmean(amounts[name]) for name in names}


def _agents(trajectories: Sequence[Trajectory]) -> Metrics:
    """What foreign agents sent, per conversation.

    `agent/exact_share` is the share of the turns that follow others whose context is the recorded tokens.
    """
    counts = sum((Counter(t.counts) for t in trajectories), Counter[str]())
    followed = counts["exact"] + counts["drifted"]
    share = {"agent/exact_share": counts["exact"] / followed} if followed else {}
    return {f"agent/{name}": number / len(trajectories) for name, number in counts.items()} | share


def _turn_rewards(trajectories: Sequence[Trajectory]) -> Metrics:
    """The rewards of single turns, where there are any: per turn, and summed over a trajectory."""
    judged = [t.turn_rewards for t in trajectories if t.turn_rewards]
    if not judged:
        return {}
    total = sum(map(sum, judged))
    return {"reward/turn": total / sum(map(len, judged)), "reward/turns_of_trajectory": total / len(judged)}


def describe_staleness(batch: RolloutBatch, version: int) -> Metrics:
    """In weight updates: of groups since their admission, of tokens since they were sampled; and queueing time."""
    versions = [v for group in batch.groups for t in group.trajectories for turn in t.turns for v in turn.versions]
    lengths = [t.sampled_tokens for group in batch.arrived for t in group.trajectories]
    return {
        "rollout/arrived_tokens": sum(lengths) / max(1, len(lengths)),
        "rollout/staleness_max": float(version - min(batch.admitted)),
        "rollout/token_staleness": sum(version - v for v in versions) / max(1, len(versions)),
        "time/queue_s": sum(batch.queue_s) / len(batch.queue_s),
    }


def _speed(trajectories: Sequence[Trajectory], seconds: float) -> Metrics:
    """What conversations waited for, and tokens per second over `seconds`."""
    waited = {
        "queue": sum(t.queued_s for t in trajectories),
        "decode": sum(t.sample_s for t in trajectories),
        "tool": sum(t.tool_s for t in trajectories),
    }
    return {
        **{f"perf/{name}_share": share / max(1e-9, sum(waited.values())) for name, share in waited.items()},
        "perf/conversations_open": (waited["decode"] + waited["tool"]) / seconds,
        "perf/abandoned_calls": float(count_abandoned_threads()),
        "perf/tokens_per_s": sum(t.sampled_tokens for t in trajectories) / seconds,
    }


def describe_conversations(groups: Sequence[Group], settings: Profile) -> Metrics:
    """What a profile says of the conversations of a step: means over those that did not fail, if there are any."""
    trajectories = _valid(groups) or [t for group in groups for t in group.trajectories]
    metrics = {
        "generation_s_per_conversation": fmean(t.sample_s for t in trajectories),
        "tools_s_per_conversation": fmean(t.tool_s for t in trajectories),
    }
    if settings.reward:
        metrics["reward_s"] = sum(group.score_s for group in groups)
    if settings.condensation:
        times = max(1, sum(t.condensed for t in trajectories))
        metrics |= {
            "condensation_s_per_conversation": fmean(t.condense_s for t in trajectories),
            "condensed_per_conversation": fmean(t.condensed for t in trajectories),
            "tokens_before_condensation": sum(t.tokens_before for t in trajectories) / times,
            "tokens_after_condensation": sum(t.tokens_after for t in trajectories) / times,
        }
    return metrics


def describe_failures(groups: Sequence[Group], file: Path | None) -> list[str]:
    """What people should know of conversations that failed and of calls that no tool answered; [] for nothing.

    file: that of the trajectories, where they are kept.
    """

    def see(line: int) -> str:
        return f"; see {page_of(file, line)}" if file else ""

    trajectories = [t for group in groups for t in group.trajectories]
    notes: list[str] = []
    if failed := [(line, t.reason) for line, t in enumerate(trajectories) if t.failed]:
        line, why = failed[0]
        first = f"the first because of {why}"
        notes.append(f"{len(failed)} of {len(trajectories)} conversations failed, {first}{see(line)}")
    if outages := [(line, why) for line, t in enumerate(trajectories) for why in t.outages]:
        line, why = outages[0]
        notes.append(f"calls that no tool answered: {len(outages)}, the first because {why}{see(line)}")
    return notes
