"""What can be known of a run before it opens anything, and without a library that computes: its tasks and its chat."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mtgrpo.advantages import try_out
from mtgrpo.chat import Chat, open_chat
from mtgrpo.config.experiment import LATEST, Experiment
from mtgrpo.errors import ConfigError, UnreachableError
from mtgrpo.evaluation.findings import NO_TOOLS
from mtgrpo.log import chosen
from mtgrpo.model.settings import VALUE_HEAD
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.parallel.launch import read_launch
from mtgrpo.parallel.placement import settle
from mtgrpo.parts import built, named
from mtgrpo.parts.extension import digests, find_class, is_ours, misgiven
from mtgrpo.rewards import Reward
from mtgrpo.rollout.conversation import visible_tools
from mtgrpo.runtime.resources import count_gpus
from mtgrpo.stages.demonstrated import try_demonstrations
from mtgrpo.stages.resume import changed_files
from mtgrpo.stages.trial import made_anew, trained_too, try_condenser, try_empty_answer, try_tasks, unanswered, ungraded
from mtgrpo.tasks import Split, TaskSource, TaskStream
from mtgrpo.types import Message, Task
from mtgrpo.weights.saved import NO_REFERENCE, STATE, Checkpoint, find_newest, newest_of, read_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
EVAL_SEED = 0  # the held-out tasks are the same in every run


def check(experiment: Experiment, spared: bool = False, trains: bool = True, folder: Path | None = None) -> list[str]:
    """Raise ConfigError for whatever the user got wrong, as far as nothing has to be open and no weights be loaded.

    Returns what the user should know of the tasks, and, where hubs are `spared`, what was not checked for that. What
    `trains` needs demonstrations for its warm start. folder: of the run, in which it may go on.
    """
    chosen(experiment.log)
    if not (is_ours(experiment.advantage) and is_ours(experiment.algorithm)):
        try_out(experiment.advantage, experiment.algorithm)
    begun = begun_from(experiment, folder)
    if begun:
        _refuse_other_training(experiment, begun)
    notes = _without_effect(experiment.reward)
    parts = (experiment.task, experiment.environment, experiment.agent, experiment.condenser, experiment.reward)
    for part in (*parts, experiment.engine, experiment.cluster, experiment.model, experiment.chat):
        with _hubs(spared, notes):
            part.check_machine()
    devices = experiment.devices
    asked = devices.train.count or devices.reference.count or experiment.parallel.name not in ("auto", "none")
    if not trains and (asked or experiment.cluster.places):
        raise ConfigError(
            "devices.train, devices.reference, parallel and cluster are for training, and nothing is trained here: "
            "leave them out"
        )
    settle(experiment, read_launch(os.environ), count_gpus())
    with _hubs(spared, notes):
        for source in task_sets(experiment).values():
            if not source.opens:
                held_out_tasks(experiment, source)
        held_out = list[Task]()
        if not experiment.task.opens:
            tasks, held_out = open_tasks(experiment)
            notes += tasks.notes
            for some in (held_out, tasks):
                _unlooped(try_tasks(experiment, some, running=False))
            notes += unanswered(experiment, held_out, tasks) + trained_too(held_out, experiment.task)
            notes += _unlooped(ungraded(experiment, held_out, tasks))
            notes += made_anew(held_out, experiment.task, EVAL_SEED)
            if begun and "stream" in begun.state:
                _refuse_other_data(experiment.task, tasks, begun)
            if experiment.task.system_prompt and not any(m.role == "system" for m in held_out[0].messages):
                raise ConfigError(
                    f"task.system_prompt has no effect: task {type(experiment.task).__name__} does not use it; make a "
                    "task's messages by self.with_prompt((Message('user', ...),)), or leave it out"
                )
        if trains:
            experiment.check_warm_start()
        _, chat = open_tokenizer(experiment)
        longest = experiment.environment.max_context_length or experiment.batch.context
        refuse_too_short(experiment, chat, held_out, longest)
        for task in held_out[:1] if not experiment.agent.active else ():
            _unlooped(try_empty_answer(experiment, task))
            _unlooped(try_condenser(experiment.condenser, task, chat))
        if trains:
            notes += _unlooped(try_demonstrations(experiment, chat))
            _refuse_other_demonstrations(experiment, begun)
        elif (Path(experiment.model.name) / STATE).is_file():
            before = read_checkpoint(Path(experiment.model.name), verify=False).state.get("settings", {})
            notes += changed_files(before)
    return notes


def _without_effect(reward: Reward) -> list[str]:
    """What to say of parts of a reward."""
    parts = [part for part in reward.parts if not is_ours(part) and part.success_at not in (1, reward.success_at)]
    return [
        f"success_at={part.success_at:g} of {type(part).__name__} has no effect beside other rewards: success is a sum "
        f"of reward.success_at={reward.success_at:g}"
        for part in parts
    ]


def begun_from(experiment: Experiment, folder: Path | None, verify: bool = True) -> Checkpoint | None:
    """The checkpoint with which the run in `folder` goes on; None = none. verify: one that is named. ConfigError."""
    if experiment.resume != LATEST:
        return read_checkpoint(Path(experiment.resume), verify) if experiment.resume else None
    return find_newest(folder, note=lambda _: None, looks=True) if folder else None


def refuse_other_steps(experiment: Experiment, folder: Path | None, alone: bool = False) -> None:
    """Raise ConfigError where a run would go on in a `folder` whose checkpoints count other steps than its own would.

    alone: it is a warm start.
    """
    found = begun_from(experiment, folder) if experiment.resume == LATEST else None
    if found and (counted := found.step > 0 and "stream" not in found.state) is not alone:
        what = ("a run that trains", "a warm start")[counted]
        cure = "another, as hydra.run.dir=PATH" + f", and resume={found.path} to go on from there" * counted
        raise ConfigError(f"{found.path.parent.parent} is the folder of {what}: this needs {cure}")


def _imitates(experiment: Experiment, found: Checkpoint) -> bool:
    """Whether the warm start of `found` goes on."""
    return "stream" not in found.state and 0 < found.state.get("sft", {"step": 0})["step"] < experiment.sft.steps


def _refuse_other_training(experiment: Experiment, found: Checkpoint) -> None:
    """Raise ConfigError where what the optimiser keeps is of other weights, or of another kind."""
    learns, model = "stream" in found.state, experiment.model
    if learns and experiment.kl.coef and not found.has_reference:
        raise ConfigError(NO_REFERENCE)
    if not learns and not _imitates(experiment, found):
        return  # reinforcement learning begins, with an optimiser of its own
    option, kind = ("optimizer", experiment.optimizer) if learns else ("sft.optimizer", experiment.sft.optimizer)
    option, kind = f"{option}.kind", kind.kind.value
    other = ""
    if (before := found.state.get("settings", {}).get(option, kind)) != kind:
        other = f"{option} was {before}"
    elif model.lora.rank and "adapter_config.json" not in found.files:
        other = "all weights were trained, not adapters: model.lora.rank was 0"
    elif model.value_head is not (VALUE_HEAD in found.files):
        other = f"model.value_head was {str(not model.value_head).lower()}"
    if other:
        raise ConfigError(f"{found.path}: {other}; leave it so, or begin anew with model.name={found.path} sft.steps=0")


def _refuse_other_demonstrations(experiment: Experiment, begun: Checkpoint | None) -> None:
    """Raise ConfigError where the warm start of `begun` goes on with others than it had."""
    if not (begun and _imitates(experiment, begun)):
        return
    found = begun.state["sft"]
    named = begun.state.get("settings", {}).get("sft.demonstrations")
    try:
        experiment.demonstrated.stream(Split.train, experiment.seed).load_state_dict(found["tasks"])
    except ConfigError as error:
        began = f" began with sft.demonstrations={named}" if named else " has not ended"
        raise ConfigError(
            f"{error}; its warm start{began}: sft.steps={found['step']} ends it there, and model.name={begun.path} "
            "begins another from its weights"
        ) from error


def _refuse_other_data(source: TaskSource, tasks: TaskStream, begun: Checkpoint) -> None:
    """Raise ConfigError where `tasks` are not those with which a run had `begun`."""
    before = begun.state.get("settings", {})
    name = before.get("task", "")
    same = True
    if ".py:" in name and str(Path(name.rpartition(":")[0]).resolve()) not in digests:  # which no record has run
        same = not is_ours(source)
    else:
        with suppress(ConfigError):  # it has another name now
            same = find_class("mtgrpo.tasks", name, TaskSource) in type(source).__mro__
    if not same:
        raise ConfigError(
            f"{begun.path} is of a run with task={name}, and would go on with {type(source).__name__}: type the words "
            "with which it began, which its .hydra/overrides.yaml has, and resume=true; or begin anew from its weights "
            f"with model.name={begun.path} sft.steps=0"
        )
    try:
        tasks.load_state_dict(begun.state["stream"]["tasks"])
    except ConfigError as error:
        told = ((key, before.get(key, "")) for key in ("task", "task.path", "task.train_files"))
        named = [f"{key}={value}" for key, value in told if value not in ("", "[]")]
        began = f"; that run began with {' '.join(named)}" if named else ""
        raise ConfigError(f"{error}{began}") from error


@contextmanager
def _hubs(spared: bool, notes: list[str]) -> Generator[None]:
    """What within lies on a hub that is `spared` is not checked, which `notes` then say."""
    try:
        yield
    except UnreachableError as error:
        if not spared:
            raise
        notes.append(f"not checked: {error}; with --online the hub is asked")


def _unlooped(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, also where there is an event loop already, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def open_tasks(experiment: Experiment) -> tuple[TaskStream, list[Task]]:
    """The training tasks and the held-out ones. Raises ConfigError."""
    tasks = _stream(experiment.task, Split.train, experiment.seed)
    if experiment.trainer.epochs and tasks.endless:
        raise ConfigError(
            f"trainer.epochs={experiment.trainer.epochs}: task {type(experiment.task).__name__} makes endless problems "
            "and has no epochs; set trainer.steps instead"
        )
    if experiment.curriculum.active and tasks.endless:
        raise ConfigError(
            f"curriculum.easy={experiment.curriculum.easy} and curriculum.hard={experiment.curriculum.hard}: task "
            f"{type(experiment.task).__name__} makes endless problems, of which none comes up again; leave them out"
        )
    return tasks, held_out_tasks(experiment, experiment.task)


def task_sets(experiment: Experiment) -> dict[str, TaskSource]:
    """What `eval.sets` names beside the run's own tasks, whose system prompt they take over. Raises ConfigError."""
    wanted = named(experiment.eval.sets or [], "eval.sets", "easy: {task: jsonl, val_files: [easy.jsonl]}")
    sources: dict[str, TaskSource] = {}
    kept = experiment.task.system_prompt or type(experiment.task).system_prompt  # neither: it has none to give
    prompt = {"system_prompt": experiment.task.system_prompt} if kept else {}
    for name, settings in wanted.items():
        if not re.fullmatch(r"[\w-]+", name) or name == NO_TOOLS:
            raise ConfigError(f"eval.sets: {name!r} cannot be the name of a set; give {{NAME: {{task: {name}}}}}")
        kind = find_class("mtgrpo.tasks", str(settings.get("task", name)), TaskSource)
        others = {key: value for key, value in settings.items() if key != "task"}
        sources[name] = built(f"task set {name}", kind, {**prompt, **others})
    return sources


def held_out_tasks(experiment: Experiment, source: TaskSource) -> list[Task]:
    """Those of `source` that an evaluation plays. Raises ConfigError."""
    found = list(itertools.islice(_stream(source, Split.eval, EVAL_SEED, repeat=False), experiment.eval.tasks))
    if not found:
        raise ConfigError(f"task {type(source).__name__} gives no held-out tasks: its stream of Split.eval is empty")
    return found


def _stream(source: TaskSource, split: Split, seed: int, repeat: bool = True) -> TaskStream:
    """The stream of `source`. Raises MisgivenError where that is none."""
    stream = source.stream(split, seed, repeat)
    if not isinstance(stream, TaskStream):  # pyright: ignore[reportUnnecessaryIsInstance]
        how = "give a TaskStream, such as IndexedStream(len(tasks), tasks.__getitem__, seed, repeat)"
        raise misgiven(source.stream, stream, f"for Split.{split.value} too {how}")
    return stream


def open_tokenizer(experiment: Experiment) -> tuple[PreTrainedTokenizerFast, Chat]:
    """The tokenizer, and how it writes conversations with the tools that are known. Raises ConfigError.

    Where the model is a checkpoint, all of that is verified first.
    """
    if (Path(experiment.model.name) / STATE).exists():
        read_checkpoint(Path(experiment.model.name))
    elif newest := newest_of(Path(experiment.model.name)):
        raise ConfigError(f"model.name={experiment.model.name} is a run; its newest checkpoint is {newest}")
    tokenizer = load_tokenizer(experiment.model.name)
    chat = open_chat(tokenizer, experiment.chat)
    if chat.template is not None:
        tokenizer.chat_template = chat.template  # a checkpoint is prompted as it was trained
    chat.open([Message("user", "hello")], visible_tools(experiment.environment.tool_specs, experiment.condenser))
    return tokenizer, chat


def refuse_too_short(experiment: Experiment, chat: Chat, tasks: list[Task], longest: int) -> None:
    """Raise ConfigError where of the first `tasks` not one leaves room for an answer."""
    tools = visible_tools(experiment.environment.tool_specs, experiment.condenser)
    lengths = [] if experiment.agent.active else [len(chat.open(task.messages, tools)) for task in tasks[:20]]
    shortest = min(lengths, default=0)
    if shortest >= longest:
        asked = experiment.environment.max_context_length
        limit = (
            f"environment.max_context_length={asked}"
            if asked
            else f"what model and batch.token_budget allow ({longest})"
        )
        higher = f"set it to {shortest + experiment.sampling.max_new_tokens} or higher"
        raise ConfigError(
            f"{limit} leaves no room for an answer: the prompts of the first {len(lengths)} held-out tasks have "
            f"{shortest} tokens or more; {higher if asked else 'set batch.token_budget higher, or take another model'}"
        )
