"""The warm start: supervised steps on demonstrations, laid out exactly as the policy's own conversations would be."""

import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import torch

from mtgrpo.batch.forest import build_batch
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import STOP_S
from mtgrpo.errors import ConfigError, TaskError
from mtgrpo.parts.extension import explained
from mtgrpo.policy.trainer import Stage
from mtgrpo.record.curve import Curve
from mtgrpo.record.writing import write_summary
from mtgrpo.rollout.demonstrations import laid_out, refused_calls
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.stages.demonstrated import DEMONSTRATION_SEED, MAX_WITHOUT, without_demonstrations
from mtgrpo.stages.evaluate import evaluate_fully
from mtgrpo.stages.restarts import restarting
from mtgrpo.stages.run import Run, most_unasked, open_run
from mtgrpo.stages.saving import Saver, saving
from mtgrpo.tasks import ENDED, Split, TaskSource, TaskStream, demonstration
from mtgrpo.types import Message, Task, Trajectory

UNLEARNED_NATS = 2.0  # loss of a token; one that is learned is far below
MOST_FAILED = 20  # demonstrations in a row that cannot be laid out
LEAST_STEPS = 20  # fewer need not show anything


async def run_sft(experiment: Experiment, folder: Path) -> None:
    """The warm start alone; saves a checkpoint that `model.name=FOLDER` takes."""
    await restarting(experiment.imitating(), folder, lambda again: _imitate(again, folder))


async def _imitate(experiment: Experiment, folder: Path) -> None:
    async with open_run(experiment, folder) as run:
        with saving(run, Curve()) as saver:
            await warm_start(run, saver, alone=True)
            summary = saver.summary
            try:
                summary |= {f"{name}/after": value for name, value in (await evaluate_fully(run)).items()}
            finally:  # also when the evaluation fails
                write_summary(folder, summary)
        run.sinks.note(f"the weights are in {saver.path}")


async def warm_start(run: Run, saver: Saver, alone: bool = False) -> None:
    """Take `sft.steps` optimiser steps on demonstrations, or those that are left of them.

    Its checkpoints are of step 0, that reinforcement learning begins with; `alone`, of its own steps.
    """
    experiment, settings = run.experiment, run.experiment.sft
    begun = saver.state.get("sft", {"step": 0})
    before_s = saver.summary.setdefault("time/sft_s", 0.0)
    if "stream" in saver.state or begun["step"] >= settings.steps:
        return
    began = time.perf_counter() - before_s
    run.sinks.stage("warm start", settings.steps)
    run.trainer.begin(Stage.imitation)
    source = experiment.demonstrated
    stream, imitated = source.stream(Split.train, experiment.seed + DEMONSTRATION_SEED), begun["step"] > 0
    if not settings.demonstrations:
        stream.notes.clear()  # those of the run's own tasks are told
    if run.resumed and imitated:
        run.trainer.load(run.resumed.path, version=0)
        stream.load_state_dict(begun["tasks"])
    examples = demonstrations(source, stream, run.runner, experiment.seed, run.sinks.note, taken=imitated)
    limit, asked = most_unasked(experiment, run.trainer.weights()), experiment.environment.max_context_length
    limit, name = max((limit, f"batch.token_budget={limit}"), (asked, f"environment.max_context_length={asked}"))
    if longest := run.trainer.weights().traits.limit.tokens:
        limit, name = min((limit, name), (longest, f"the {longest} tokens that the model computes exactly"))
    fitting = within(examples, limit, name, run.sinks.note)
    losses: list[float] = []
    for step in range(begun["step"] + 1, settings.steps + 1):
        batch = build_batch([await anext(fitting) for _ in range(settings.batch_size)])
        weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
        metrics = await run.trainer.imitate(batch, weights)
        for notes in (stream.notes, run.trainer.notes):
            run.sinks.tell(notes)
        losses.append(metrics["loss"])
        elapsed_s = saver.summary["time/sft_s"] = time.perf_counter() - began
        run.sinks.log({"sft/loss": metrics["loss"], "sft/lr": metrics["lr"], "time/sft_s": elapsed_s}, step)
        saver.mark(step if alone else 0, sft={"step": step, "tasks": stream.state_dict()})
        if saver.due(step) or step == settings.steps:
            await saver.save()
    if len(losses) >= LEAST_STEPS and losses[-1] > max(UNLEARNED_NATS, 0.9 * losses[0]):
        run.sinks.note(
            f"the warm start has hardly learned: its loss went from {losses[0]:.3f} to {losses[-1]:.3f}; "
            f"sft.optimizer.lr is {settings.optimizer.lr:g}, and weights from scratch want some 0.003"
        )
    await run.engine.load_weights(run.trainer.weights())


async def demonstrations(
    source: TaskSource,
    stream: TaskStream,
    runner: RolloutRunner,
    seed: int,
    note: Callable[[str], None],
    taken: bool = False,
) -> AsyncIterator[Trajectory]:
    """Endless demonstrations of the tasks of `stream`, in the contexts `runner` would have; others in every epoch.

    taken: a call of one before was of a tool. Raises ConfigError where one makes calls, and none so far was. What
    cannot be laid out is left out, which is said once; too many of these in a row are a ConfigError.
    """
    without, failed, noted, told = 0, 0, False, False
    for task in stream:
        messages = demonstration(source, task, seed + stream.epoch)
        if not messages:
            without += 1
            if without == MAX_WITHOUT:
                raise ConfigError(without_demonstrations(source))
            continue
        without = 0
        example = await _laid_out(task, messages, runner)
        if isinstance(example, Exception):
            failed, why = failed + 1, f"that of task {task.id} because of {explained(example)}"
            if not noted:
                noted = True
                note(f"demonstrations that cannot be laid out are left out; {why}")
            if failed == MOST_FAILED:
                raise ConfigError(f"{failed} demonstrations in a row cannot be laid out, {why}") from example
            continue
        failed = 0
        if not told:
            why, takes = refused_calls(example, runner.environment)
            taken = taken or takes
            if why and not taken:
                raise ConfigError(f"{why}; correct it")
            if told := bool(why):
                note(why)
        yield example
    raise ConfigError(ENDED)


async def _laid_out(task: Task, messages: Sequence[Message], runner: RolloutRunner) -> Trajectory | Exception:
    """As in a rollout, tried as often and for as long; or what went wrong in the end."""
    contexts = runner.condenser, runner.limits.context_tokens, runner.sampling.max_new_tokens, runner.attend
    work = functools.partial(laid_out, task, messages, runner.environment, runner.chat, *contexts)
    failure: Exception = (late := TimeoutError(f"it took longer than rollout.timeout_s={runner.timeout_s}"))
    for _ in range(runner.retries + 1):
        try:
            return await run_isolated(work, runner.timeout_s or None, late, grace_s=2 * STOP_S)
        except TaskError as error:
            return error
        except ConfigError:
            raise
        except Exception as error:
            failure = error
    return failure


async def within(
    examples: AsyncIterator[Trajectory], tokens: int, name: str, note: Callable[[str], None]
) -> AsyncIterator[Trajectory]:
    """Demonstrations of up to `tokens`, a limit called `name`. Says when one is left out; ConfigError when all are."""
    left_out = 0
    async for example in examples:
        longest = example.longest_context_tokens
        if longest <= tokens:
            left_out = min(left_out, 1)
            yield example
            continue
        left_out += 1
        if left_out == 1:
            note(f"demonstrations longer than {name} are left out; one has {longest} tokens")
        if left_out == MAX_WITHOUT:
            raise ConfigError(
                f"{MAX_WITHOUT} demonstrations in a row are longer than {name}, the last has {longest} tokens; "
                "raise the limit or choose shorter tasks"
            )
