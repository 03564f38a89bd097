"""What is open during a run: the model, the engine that samples from it, the runner, the tasks, the log."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtgrpo.chat import Chat, open_chat
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Key, RunningEngine
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sinks, open_sinks, sink_class
from mtgrpo.memory import plan
from mtgrpo.model.attention import describe_attention, uses_forest
from mtgrpo.model.load import load_model, load_tokenizer
from mtgrpo.model.traits import check_length, traits
from mtgrpo.part import RunContext, opens
from mtgrpo.record.versions import write_versions
from mtgrpo.rewards import opened
from mtgrpo.rollout.conversation import Limits, visible_tools
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.tasks import Split, TaskStream
from mtgrpo.types import Attend, Message, Sample, Task

EVAL_SEED = 0  # the held-out tasks are the same in every run


@dataclass(frozen=True)
class Run:
    """Everything that the stages of a run share."""

    experiment: Experiment  # its parts are open
    folder: Path
    sinks: Sinks
    tokenizer: PreTrainedTokenizerFast
    chat: Chat
    model: PreTrainedModel
    engine: RunningEngine
    runner: RolloutRunner
    tasks: TaskStream
    held_out: list[Task]


def check(experiment: Experiment) -> None:
    """Raise ConfigError for whatever the user got wrong, as far as nothing has to be open and no weights be loaded."""
    for name in experiment.log:
        sink_class(name)
    if not opens(experiment.task):
        open_tasks(experiment)
    open_tokenizer(experiment)


def open_tasks(experiment: Experiment) -> tuple[TaskStream, list[Task]]:
    """The training tasks and the held-out ones. Raises ConfigError."""
    tasks = experiment.task.stream(Split.train, experiment.seed)
    if experiment.trainer.epochs and tasks.endless:
        raise ConfigError(
            f"trainer.epochs={experiment.trainer.epochs}: task {type(experiment.task).__name__} makes endless problems "
            "and has no epochs; set trainer.steps instead"
        )
    evaluated = experiment.task.stream(Split.eval, EVAL_SEED, repeat=False)
    return tasks, list(itertools.islice(evaluated, experiment.eval.tasks))


def open_tokenizer(experiment: Experiment) -> tuple[PreTrainedTokenizerFast, Chat]:
    """The tokenizer, and how it writes conversations with the tools that are known. Raises ConfigError."""
    tokenizer = load_tokenizer(experiment.model.name)
    chat = open_chat(tokenizer, experiment.chat)
    if chat.template is not None:
        tokenizer.chat_template = chat.template  # a checkpoint is prompted as it was trained
    chat.open([Message("user", "hello")], visible_tools(experiment.environment.tool_specs, experiment.condenser))
    return tokenizer, chat


@asynccontextmanager
async def open_parts(experiment: Experiment, context: RunContext) -> AsyncGenerator[Experiment]:
    """The experiment with its parts open; they are closed in reverse order, whatever happens."""
    async with AsyncExitStack() as stack:
        yield replace(
            experiment,
            task=await stack.enter_async_context(experiment.task.open(context)),
            environment=await stack.enter_async_context(experiment.environment.open(context)),
            condenser=await stack.enter_async_context(experiment.condenser.open(context)),
            reward=await stack.enter_async_context(opened(experiment.reward, context)),
        )


@asynccontextmanager
async def open_run(experiment: Experiment, folder: Path, trains: bool = True) -> AsyncGenerator[Run]:
    """Open everything and load the model. All is closed in reverse order, by error, Ctrl-C and SIGTERM too.

    On a GPU a run that `trains` notes what it will need of the memory, and is refused where that is too much.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_versions(folder)
    early: list[str] = []  # notes of the sinks themselves, before there are any
    async with AsyncExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        context = RunContext(folder, early.append, os.environ)
        sinks = await stack.enter_async_context(open_sinks(experiment.log, context))
        sinks.tell(early)
        context = replace(context, note=sinks.note)
        experiment = await stack.enter_async_context(open_parts(experiment, context))
        tasks, held_out = open_tasks(experiment)
        tokenizer, chat = open_tokenizer(experiment)
        if trains and torch.cuda.is_available():
            planned = plan(experiment, torch.cuda.get_device_properties(0).total_memory, "cuda")
            sinks.note(planned.describe())
            experiment = planned.experiment
        model = load_model(experiment.model, experiment.seed)
        model.generation_config.eos_token_id = list(chat.stop_ids)  # and ends its turns so
        longest = longest_context(experiment, model)
        engine = experiment.engine.start(model, experiment.deterministic, longest)
        stack.push_async_callback(engine.close)
        for note in (*chat.notes, describe_attention(model)):
            sinks.note(note)
        sinks.tell(engine.notes)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it for garbage takes longer than some training steps
        stack.callback(gc.unfreeze)
        yield Run(
            experiment=experiment,
            folder=folder,
            sinks=sinks,
            tokenizer=tokenizer,
            chat=chat,
            model=model,
            engine=engine,
            runner=make_runner(experiment, chat, engine.conversation, engine.attend, longest),
            tasks=tasks,
            held_out=held_out,
        )


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """SIGTERM, which is how a machine asks a run to end, does what Ctrl-C does: the run is cancelled, then closed."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or threading.current_thread() is not threading.main_thread():  # signals are for the main thread
        yield
        return
    asked = False

    def terminate() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    except asyncio.CancelledError:
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def longest_context(experiment: Experiment, model: PreTrainedModel) -> int:
    """How long a conversation may grow, in tokens. Raises ConfigError when more is requested than the model can do."""
    asked, own = experiment.environment.max_context_length, traits(model).longest
    if not own and not asked:
        raise ConfigError("the model's configuration names no longest context: set environment.max_context_length")
    check_length(model, asked)
    if asked > experiment.batch.tokens and not uses_forest(model):
        raise ConfigError(
            f"environment.max_context_length={asked}: padded rows of that length do not fit "
            f"batch.token_budget={experiment.batch.tokens}; set batch.token_budget to at least {asked}"
        )
    return asked or min(own, experiment.batch.tokens)


def make_runner(
    experiment: Experiment,
    chat: Chat,
    conversation: Callable[[Key], AbstractAsyncContextManager[Sample]],
    attend: Attend | None,
    longest_context: int,
) -> RolloutRunner:
    """Bind the parts of a conversation together; `conversation` and `attend` are an engine's."""

    def open_conversation(scope: str, task: str, sample_index: int) -> AbstractAsyncContextManager[Sample]:
        return conversation(Key(experiment.seed, scope, task, sample_index))

    return RolloutRunner(
        environment=experiment.environment,
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
        open_conversation=open_conversation,
        attend=attend,
        slots=asyncio.Semaphore(experiment.rollout.max_concurrent),
    )
