"""What Python offers beside the command: a whole run, and rollouts for people with an engine of their own."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mtgrpo.advantages import advantages
from mtgrpo.advantages.rewards import comparable, rewards_of
from mtgrpo.algorithms.kl import Place
from mtgrpo.batch.forest import build_batch
from mtgrpo.chat import open_chat
from mtgrpo.config.experiment import LATEST, Experiment
from mtgrpo.config.run_record import claimed
from mtgrpo.engines import Key
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.parts import RunContext
from mtgrpo.parts.extension import awaited, misgiven
from mtgrpo.policy.step import Metrics
from mtgrpo.record.curve import Curve
from mtgrpo.runtime.text import printable
from mtgrpo.runtime.workers import together
from mtgrpo.stages import trainer
from mtgrpo.stages.checks import check, refuse_other_steps
from mtgrpo.stages.restarts import restarting
from mtgrpo.stages.run import make_runner, open_parts
from mtgrpo.types import Attend, Completion, Group, Sample, Sampling, Task


@dataclass(frozen=True)
class Scored:
    """The trajectories of one task that did not fail, and for each of them the advantage of every turn.

    That of a turn is the mean over its tokens, which are all worth the same unless advantage.level=token.
    """

    group: Group
    advantages: list[list[float]]


async def train(experiment: Experiment, folder: str | Path) -> Metrics:
    """A run in `folder`, as `mtgrpo train` does it: warm start, evaluate, train, evaluate. `await` it in a notebook.

    folder: an empty one or none yet; with `experiment.resume="true"` one to go on with. Returns what `summary.json`
    holds. Raises ConfigError before anything is computed, and RunError.
    """
    if not isinstance(experiment, Experiment):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"train takes an experiment, such as mtgrpo.preset('calculator'), got {experiment!r}")
    refuse_other_steps(experiment, Path(folder))
    for note in check(experiment, folder=Path(folder)):
        print(printable(note))
    with claimed(Path(folder), True, experiment.resume == LATEST) as place:
        curve = Curve()
        summary = await restarting(experiment, place, lambda again: trainer.train(again, place, curve))
        curve.draw(place, width=100)
    return summary


async def rollout_with_advantages(
    tasks: Sequence[Task],
    *,
    sample: Sample,
    tokenizer: PreTrainedTokenizerFast | str,
    experiment: Experiment,
    attend: Attend | None = None,
) -> list[Scored]:
    """Run `experiment.rollout.group_size` conversations about each task, score them, compare them.

    sample: continues a list of tokens; many calls are awaited at once, `rollout.max_concurrent` at most. tokenizer: may
    be the name of its model. attend: for condenser=attention. Groups of which too many failed to be compared are left
    out, as in training; turns that training would leave out (algorithm.truncated=mask) have advantage 0.

    Raises EngineError when every conversation failed, and ConfigError where an advantage depends on more than rewards:
    a critic, or a KL penalty that is part of the reward.
    """
    algorithm, estimator = experiment.algorithm, experiment.advantage
    if algorithm.has_critic or (experiment.kl.coef and experiment.kl.place is Place.reward):
        what = "a critic" if algorithm.has_critic else "kl.place=reward"
        raise ConfigError(f"{what} needs the policy's own numbers, which rollout_with_advantages has not: leave it out")
    if experiment.condenser.attends and attend is None:
        raise ConfigError(f"condenser {experiment.condenser.name} goes by attention: give attend=")
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    chat = open_chat(tokenizer, experiment.chat)
    longest = experiment.environment.max_context_length or experiment.batch.tokens

    def conversation(key: Key) -> AbstractAsyncContextManager[Sample]:
        return nullcontext(_checked(sample, len(tokenizer)))

    group_size, extra = experiment.rollout.group_size, experiment.rollout.extra_samples
    with TemporaryDirectory() as folder:
        context = RunContext(Path(folder), print, os.environ)
        async with open_parts(experiment, context) as opened:
            runner = make_runner(opened, chat, conversation, attend, longest)
            finished = await together(runner.run_group(task, group_size, extra) for task in tasks)
    trajectories = [trajectory for group in finished for trajectory in group.trajectories]
    if trajectories and all(trajectory.failed for trajectory in trajectories):
        raise EngineError(f"every conversation failed, the first because of {trajectories[0].reason}")
    groups = comparable(finished, algorithm)
    if not groups:
        return []
    batch = build_batch([trajectory for group in groups for trajectory in group.trajectories])
    rewards = estimator.weigh(rewards_of(groups, algorithm, batch.trajectory, batch.turn))
    per_token = advantages(estimator, algorithm, rewards).advantage
    sums = torch.zeros(len(rewards.per_turn), dtype=torch.float64).index_add(0, rewards.turn, per_token)
    tokens = torch.bincount(rewards.turn, minlength=len(sums)).clamp(min=1)
    per_turn = iter((sums / tokens).tolist())
    return [Scored(group, [[next(per_turn) for _ in t.turns] for t in group.trajectories]) for group in groups]


def _checked(sample: Sample, size: int) -> Sample:
    """Somebody's `sample`, which raises MisgivenError for completions that no engine gives; size: of the vocabulary."""

    async def checked(tokens: Sequence[int], sampling: Sampling) -> Completion:
        sampled: Any = await awaited(sample, tokens, sampling)
        if isinstance(sampled, Completion) and sampled.tokens and all(0 <= token < size for token in sampled.tokens):
            lengths = {len(sampled.tokens), len(sampled.logprobs), len(sampled.versions)}
            if len(lengths) == 1:
                return sampled
        expected = f"give a Completion of one token or more, all below {size}, each with its logprob and version"
        raise misgiven(sample, sampled, expected)

    return checked
