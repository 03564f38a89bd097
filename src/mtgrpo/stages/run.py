"""What is open during a run: the model, the engine that samples from it, the runner, the tasks, the log."""

import asyncio
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mtgrpo.chat import Chat
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Key, RunningEngine
from mtgrpo.engines.auto import served
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sinks, open_sinks
from mtgrpo.memory import check_cache, planned
from mtgrpo.model.load import device_of_process
from mtgrpo.parallel.cluster.ray import Ray
from mtgrpo.parallel.launch import read_launch
from mtgrpo.parallel.placement import arrange, settle
from mtgrpo.parts import RunContext
from mtgrpo.record.reading import read_settings
from mtgrpo.record.writing import write_versions
from mtgrpo.rewards import opened
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.runtime.resources import keep_freed_memory
from mtgrpo.stages.checks import held_out_tasks, open_tasks, open_tokenizer, refuse_too_short, task_sets
from mtgrpo.stages.policy_trainer import PolicyTrainer, trainer_config
from mtgrpo.stages.resume import take_up
from mtgrpo.stages.threads import settle_threads
from mtgrpo.stages.trial import try_tasks
from mtgrpo.stages.watchdog import open_watchdog
from mtgrpo.tasks import TaskStream
from mtgrpo.types import Attend, Limits, Sample, Task
from mtgrpo.weights.saved import Checkpoint
from mtgrpo.weights.source import WeightSource

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what asks a run to end


@dataclass(frozen=True)
class Run:
    """Everything that the stages of a run share."""

    experiment: Experiment  # its parts are open
    folder: Path
    sinks: Sinks
    tokenizer: PreTrainedTokenizerFast
    chat: Chat
    trainer: PolicyTrainer
    engine: RunningEngine
    runner: RolloutRunner
    tasks: TaskStream
    held_out: list[Task]
    sets: dict[str, list[Task]]  # further ones that evaluations play, by name
    resumed: Checkpoint | None = None  # from which the run goes on


@asynccontextmanager
async def open_parts(experiment: Experiment, context: RunContext) -> AsyncGenerator[Experiment]:
    """The experiment with its parts open; they are closed in reverse order, whatever happens."""
    async with AsyncExitStack() as stack:
        yield replace(
            experiment,
            task=await stack.enter_async_context(experiment.task.open(context)),
            environment=await stack.enter_async_context(experiment.environment.open(context)),
            agent=await stack.enter_async_context(experiment.agent.open(context)),
            condenser=await stack.enter_async_context(experiment.condenser.open(context)),
            reward=await stack.enter_async_context(opened(experiment.reward, context)),
        )


@asynccontextmanager
async def open_run(experiment: Experiment, folder: Path, trains: bool = True) -> AsyncGenerator[Run]:
    """Open everything and load the model. All is closed in reverse order, by error, Ctrl-C and SIGTERM too.

    A run that is resumed has the weights of its checkpoint; its record is cut back to there. On a GPU a run that
    `trains` notes what it will need of the memory, and is refused where that is too much.
    """
    folder.mkdir(parents=True, exist_ok=True)
    early = [f"run: {folder}"]  # notes from before there are sinks
    async with AsyncExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        resumed = take_up(experiment.resume, folder, early.append) if trains else None
        stack.enter_context(settle_threads(experiment, resumed, early.append))
        if not torch.cuda.is_available():
            keep_freed_memory()
        write_versions(folder, torch.get_num_threads())
        step = resumed.state.get("budget", {}).get("steps", 0) if resumed else 0
        context = RunContext(folder, early.append, os.environ, read_settings(folder), step)
        sinks = await stack.enter_async_context(open_sinks(experiment.log, context))
        sinks.tell(early)
        context = replace(context, note=sinks.note)
        experiment = await stack.enter_async_context(open_parts(experiment, context))
        tasks, held_out = open_tasks(experiment)
        sources = {n: await stack.enter_async_context(s.open(context)) for n, s in task_sets(experiment).items()}
        sinks.tell(tasks.notes)
        await try_tasks(experiment, held_out, running=True)
        sets = {name: held_out_tasks(experiment, source) for name, source in sources.items()}
        tokenizer, chat = open_tokenizer(experiment)
        start = None
        if isinstance(settings := experiment.cluster, Ray):
            experiment, start = await _open_cluster(experiment, settings, folder, stack, sinks.note, bool(resumed))
        else:
            experiment = _with_engine(experiment, trains, sinks.note)
        train, reference = experiment.devices.train.numbers or [0], experiment.devices.reference.numbers
        config = trainer_config(experiment, list(chat.stop_ids), resumed, folder)
        trainer = PolicyTrainer(config, train, reference, start)
        stack.callback(trainer.close)
        longest = longest_context(experiment, trainer.weights())
        refuse_too_short(experiment, chat, held_out, longest)
        engine = experiment.engine.start(trainer.weights(), experiment.deterministic, longest, folder)
        stack.push_async_callback(engine.close)
        if not engine.shares_weights:
            await engine.load_weights(trainer.weights())
        for notes in (list(chat.notes), trainer.notes, engine.notes):
            sinks.tell(notes)
        slowest_s = max(experiment.rollout.timeout_s, experiment.rollout.score_timeout_s)  # nothing need move meanwhile
        limit_s = experiment.watchdog_s and max(experiment.watchdog_s, slowest_s + 600 if slowest_s else 0)
        watchdog = stack.enter_context(open_watchdog(limit_s, folder, engine, lambda: trainer.places))
        trainer.connect(watchdog.moved, gives_way=engine.shares_weights)
        conversation = watchdog.sampling(engine.conversation)
        attend = engine.attend if experiment.engine.attends else None
        runner = make_runner(experiment, chat, conversation, attend, longest, folder)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it for garbage takes longer than some training steps
        stack.callback(gc.unfreeze)
        opened = experiment, folder, sinks, tokenizer, chat, trainer, engine, runner, tasks, held_out, sets, resumed
        yield Run(*opened)


def _with_engine(experiment: Experiment, trains: bool, note: Callable[[str], None]) -> Experiment:
    """`experiment` with its engine, and what memory has a say in, settled. ConfigError where there is not enough."""
    experiment, placement, why = arrange(experiment, read_launch(os.environ), torch.cuda.device_count())
    if why:
        note(why)
    if torch.cuda.is_available():  # that of this process trains, or where other processes do, samples
        torch.cuda.set_device((placement.train if placement.ranks == 1 else placement.rollout or placement.train)[0])
    if not (trains and torch.cuda.is_available()):
        check_cache(experiment, device_of_process())
        if placement.several:
            note(placement.describe(experiment.parallel))
        return experiment
    free, total = torch.cuda.mem_get_info(device_of_process())
    experiment, tables = planned(experiment, placement, total, taken=total - free)
    for table in tables:
        note(table)
    return experiment


async def _open_cluster(
    experiment: Experiment, settings: Ray, folder: Path, stack: AsyncExitStack, note: Callable[[str], None], again: bool
) -> tuple[Experiment, Callable[[Sequence[int], Path], Any]]:
    """`experiment` with an engine that the cluster places, and what starts its ranks. again: it had begun before.

    Raises ConfigError where there is no room for it.
    """
    from mtgrpo.cluster.ray import open_cluster  # noqa: PLC0415  a package that may be absent

    chosen, why = experiment.engine.chosen(experiment.model)
    wanted = experiment.devices.rollout.num or 0
    engine = served(chosen, experiment.model).placed(range(wanted), shared=False)
    ranks, servers = experiment.devices.train.num or 1, 0 if engine.url else engine.replicas
    cluster = await stack.enter_async_context(open_cluster(settings, folder, ranks + servers))
    cluster.check_room(ranks, servers, engine.tensor_parallel, again)
    parallel, placement = settle(experiment, read_launch(os.environ), cluster.gpus)
    for text in filter(None, (why, placement.describe(parallel), cluster.describe())):
        note(text)
    engine.elsewhere = cluster.server
    devices = placement.settled(experiment.devices, launched=True)
    return replace(experiment, engine=engine, parallel=parallel, devices=devices), cluster.ranks


@contextmanager
def _ended_by_signals() -> Generator[None]:
    """Ctrl-C, SIGTERM (a machine asks the run to end) and SIGHUP (its terminal is gone) cancel the run, which saves.

    They arrive between two steps of the event loop, so that no update is cut in two. The second ends waiting for what
    does not close; after it, Ctrl-C ends the process wherever it is. SIGTERM counts once a second: `timeout` and others
    send it to the process and to its group.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or threading.current_thread() is not threading.main_thread():  # signals are for the main thread
        yield
        return
    asked, first_s = 0, 0.0

    def end(number: signal.Signals) -> None:
        nonlocal asked, first_s
        if asked and number == signal.SIGTERM and time.monotonic() - first_s < 1:
            return
        asked, first_s = asked + 1, first_s or time.monotonic()
        if asked > 1:
            loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    before = {number: signal.getsignal(number) for number in ENDING}
    heard = [number for number in ENDING if before[number] is not signal.SIG_IGN]  # nohup, or `&` in a shell
    for number in heard:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)


def longest_context(experiment: Experiment, source: WeightSource) -> int:
    """How long a conversation may grow, in tokens.

    Raises ConfigError when more is requested than the model can do, or than the engine can do with it.
    """
    asked, traits = experiment.environment.max_context_length, source.traits
    limit = traits.limit if experiment.engine.has_windows else traits.limit_without_windows
    if not limit.tokens and not asked:
        raise ConfigError("the model's configuration names no longest context: set environment.max_context_length")
    limit.check(asked)
    if asked > experiment.batch.tokens and not source.cuts_trees:
        raise ConfigError(
            f"environment.max_context_length={asked}: padded rows of that length do not fit "
            f"batch.token_budget={experiment.batch.tokens}; set batch.token_budget to at least {asked}"
        )
    return asked or min(limit.tokens, most_unasked(experiment, source))


def most_unasked(experiment: Experiment, source: WeightSource) -> int:
    """Tokens of the longest context that is trained where no length is asked for; a padded row is within the budget."""
    batch = experiment.batch
    return batch.context if source.cuts_trees else min(batch.context, batch.tokens)


def make_runner(
    experiment: Experiment,
    chat: Chat,
    conversation: Callable[[Key], AbstractAsyncContextManager[Sample]],
    attend: Attend | None,
    longest_context: int,
    folder: Path | None = None,
) -> RolloutRunner:
    """Bind the parts of a conversation together; `conversation` and `attend` are an engine's, `folder` the run's."""

    def open_conversation(scope: str, task: str, sample_index: int) -> AbstractAsyncContextManager[Sample]:
        return conversation(Key(experiment.seed, scope, task, sample_index))

    return RolloutRunner(
        environment=experiment.environment,
        agent=experiment.agent,
        chat=chat,
        reward=experiment.reward,
        sampling=experiment.sampling,
        limits=Limits(
            context_tokens=longest_context,
            sampled_tokens=experiment.rollout.max_trajectory_tokens,
            tool_tokens=experiment.rollout.max_trajectory_tool_tokens,
        ),
        condenser=experiment.condenser,
        retries=experiment.rollout.retries,
        timeout_s=experiment.rollout.timeout_s,
        score_timeout_s=experiment.rollout.score_timeout_s,
        faults=functools.partial(experiment.faults.during, experiment.seed),
        open_conversation=open_conversation,
        attend=attend,
        folder=folder,
        slots=asyncio.Semaphore(experiment.rollout.max_concurrent),
    )
