"""What is open during a run: the model, the engine that samples from it, the runner, the tasks, the log."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtgrpo.chat import Chat, open_chat
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Key, RunningEngine
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sinks, open_sinks, sink_class
from mtgrpo.model.attention import describe_attention
from mtgrpo.model.load import load_model, load_tokenizer
from mtgrpo.model.traits import check_length, traits
from mtgrpo.rollout.conversation import Limits, told_tools
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.tasks import Split, TaskStream
from mtgrpo.types import Attend, Message, Sample, Task

EVAL_SEED = 0  # the held-out tasks are the same in every run


@dataclass(frozen=True)
class Run:
    """Everything that the stages of a run share."""

    experiment: Experiment
    folder: Path
    sinks: Sinks
    tokenizer: PreTrainedTokenizerFast
    chat: Chat
    model: PreTrainedModel
    engine: RunningEngine
    runner: RolloutRunner
    tasks: TaskStream
    held_out: list[Task]


@dataclass(frozen=True)
class Inputs:
    """What can be opened, and found wanting, before a model is loaded."""

    tokenizer: PreTrainedTokenizerFast
    chat: Chat
    tasks: TaskStream
    held_out: list[Task]


def check(experiment: Experiment) -> Inputs:
    """Open the tasks and the tokenizer. Raises ConfigError for whatever the user got wrong; loads no weights."""
    for name in experiment.log:
        sink_class(name)
    tasks = experiment.task.open(Split.train, experiment.seed)
    if experiment.trainer.epochs and tasks.endless:
        raise ConfigError(
            f"trainer.epochs={experiment.trainer.epochs}: task {type(experiment.task).__name__} makes endless problems "
            "and has no epochs; set trainer.steps instead"
        )
    evaluated = experiment.task.open(Split.eval, EVAL_SEED, repeat=False)
    held_out = list(itertools.islice(evaluated, experiment.eval.tasks))
    tokenizer = load_tokenizer(experiment.model.name)
    chat = open_chat(tokenizer, experiment.chat)
    if chat.template is not None:
        tokenizer.chat_template = chat.template  # a checkpoint is prompted as it was trained
    chat.open([Message("user", "hello")], told_tools(experiment.environment.tool_specs, experiment.condenser))
    return Inputs(tokenizer, chat, tasks, held_out)


@contextmanager
def open_run(experiment: Experiment, folder: Path) -> Generator[Run]:
    """Load the model and open everything else; closes the log at the end."""
    inputs = check(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    sinks = open_sinks(experiment.log, folder)
    try:
        model = load_model(experiment.model, experiment.seed)
        model.generation_config.eos_token_id = list(inputs.chat.stop_ids)  # and ends its turns so
        longest = longest_context(experiment, model)
        engine = experiment.engine.start(model, experiment.deterministic, longest)
        for note in (*inputs.chat.notes, describe_attention(model)):
            sinks.note(note)
        sinks.tell(engine.notes)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it for garbage takes longer than some training steps
        yield Run(
            experiment=experiment,
            folder=folder,
            sinks=sinks,
            tokenizer=inputs.tokenizer,
            chat=inputs.chat,
            model=model,
            engine=engine,
            runner=make_runner(experiment, inputs.chat, engine.conversation, engine.attend, longest),
            tasks=inputs.tasks,
            held_out=inputs.held_out,
        )
    finally:
        gc.unfreeze()
        sinks.close()


def longest_context(experiment: Experiment, model: PreTrainedModel) -> int:
    """How long a conversation may grow, in tokens. Raises ConfigError when more is asked for than the model can do."""
    asked, own = experiment.environment.max_context_length, traits(model).longest
    if not own and not asked:
        raise ConfigError("the model's configuration names no longest context: set environment.max_context_length")
    check_length(model, asked)
    return asked or min(own, experiment.batch.token_budget)


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
        open_conversation=open_conversation,
        attend=attend,
        slots=asyncio.Semaphore(experiment.rollout.max_concurrent),
    )
