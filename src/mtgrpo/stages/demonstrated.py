"""What is tried of the first demonstrations before a model is loaded, as a warm start would see them."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, cast

from mtgrpo.chat import Chat
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments.tool_use import OutageError, ToolUse
from mtgrpo.errors import ConfigError, TaskError
from mtgrpo.parts import extension
from mtgrpo.parts.extension import is_ours
from mtgrpo.rewards import Reward, Score, scores
from mtgrpo.rollout.conversation import CONDENSE, run_rollout
from mtgrpo.rollout.demonstrations import laid_out, refused_calls, written
from mtgrpo.stages.trial import FEW, LONGEST_S, MISTAKES, a_conversation, all_ours, begins, grade, left_to_the_run
from mtgrpo.tasks import Split, TaskSource, demonstration
from mtgrpo.types import SUMMARY, UNLIMITED, Completion, Limits, Message, Sampling, Task, ToolSpec, Trajectory

GRADED = 20  # demonstrations, some of which should be right
DEMONSTRATION_SEED = 1_000_000  # demonstrations are of other generated tasks than the rollouts
MAX_WITHOUT = 1000  # tasks in a row without a demonstration before the source counts as having none
Shown = tuple[Task, Sequence[Message]]


async def try_demonstrations(experiment: Experiment, chat: Chat) -> list[str]:
    """Raise ConfigError where the environment or its tools cannot begin what is demonstrated, or `chat` not write it.

    Returns what to say of rows that cannot be used, and where some calls are refused.
    Nothing is open yet: what has to be, and whatever else goes wrong, is left to the warm start.
    """
    environment, source = experiment.environment, experiment.demonstrated
    if not experiment.sft.steps or source.opens:
        return []
    stream = source.stream(Split.train, experiment.seed + DEMONSTRATION_SEED)
    notes = list(stream.notes) if experiment.sft.demonstrations else []  # those of the run's own tasks are told
    shown = (
        (task, said) for task in islice(stream, MAX_WITHOUT) if (said := demonstration(source, task, experiment.seed))
    )
    told, lengths, taken, refused = list[str](), list[int](), False, None
    first = list({task.id: (task, said) for task, said in islice(shown, GRADED)}.values())
    if not first:
        raise ConfigError(without_demonstrations(source))
    if not begins(environment):
        return notes + _cut(experiment, first, chat)
    ends_s = asyncio.get_running_loop().time() + LONGEST_S
    further = shown if type(environment) is ToolUse and is_ours(source) else ()
    for number, (task, messages) in enumerate(_tried(first, further)):
        try:
            async with asyncio.timeout_at(ends_s):
                example = await laid_out(task, messages, environment, chat)
                why, takes = refused_calls(example, environment)
                taken = taken or takes
                if why and not taken:
                    raise ConfigError(f"{why}; correct it")
                told += filter(None, [why, _lacking(task, messages)] if type(environment) is ToolUse else [why])
                lengths.append(example.longest_context_tokens)
                if environment.replayable and not experiment.agent.active:
                    told += await _play(experiment, task, messages, chat, graded=number == 0)
        except TaskError as error:  # of a file a row, which the warm start leaves out
            if not experiment.sft.demonstrations:
                raise
            refused = error
            told.append(str(error))
        except ConfigError:
            raise
        except Exception as error:
            failed = isinstance(error, OutageError)  # a tool has
            cause = error.__cause__ if failed and error.__cause__ else error
            late = isinstance(error, TimeoutError)
            if late or not extension.of_own_code(cause) or (failed and isinstance(cause, OSError)):  # out of reach
                break
            why = str(error) if failed else f"it cannot begin: {extension.explained(error)}"
            if isinstance(cause, KeyError) and {"said"} <= task.metadata.keys() <= {"messages", "said", "tools"}:
                why += "; its row has nothing beside `messages`: give it the columns of its task"
            sure = isinstance(cause, MISTAKES) and not experiment.sft.demonstrations  # rows may lack what calls need
            if sure or not failed:
                raise ConfigError(f"the demonstration of task {task.id}: {why}; correct it") from error
            told.append(f"the demonstration of task {task.id}: {why}")
    if refused and not lengths:
        raise refused
    notes += [*_no_room(experiment, lengths), *told[:1], *_cut(experiment, first, chat)]
    return notes + await _paid(experiment, [a_conversation(*each) for each in first])


def _tried(first: list[Shown], more: Iterable[Shown]) -> list[Shown]:
    """The first demonstration, and some that make calls, which teachers who guess seldom do."""
    calling = list(islice((one for one in first[1:] if _calls(one)), FEW - 1))
    if not calling and not _calls(first[0]):
        with suppress(ConfigError):  # of rows that the run may never read
            calling = list(islice(filter(_calls, more), 1))
    chosen = [first[0], *calling]
    return [*chosen, *(one for one in first if all(one is not other for other in chosen))][:FEW]


def _calls(shown: Shown) -> bool:
    return any(said.tool_calls for said in shown[1])


def sent_otherwise(experiment: Experiment, played: Iterable[Trajectory]) -> list[str]:
    """What to say where an agent sends other tools than those whose calls its warm start learned to write."""
    if not (experiment.sft.steps and experiment.agent.active and type(experiment.environment) is ToolUse):
        return []
    learned = {tool.name: _described(tool) for tool in experiment.environment.tool_specs}
    sent = {tool.name: _described(tool) for tool in next((one.tools for one in played if one.turns), ())}
    if sent == learned:
        return []
    told = f"{', '.join(sent) or 'none'}, and environment.tools are {', '.join(learned) or 'none'}"
    if sent.keys() == learned.keys():
        name = next(name for name in sent if sent[name] != learned[name])
        told = f"{sent[name]}, and environment.tools has {learned[name]}"
    cure = "let these have the names, docstrings and arguments that it sends"
    return [f"the agent sends other tools than its warm start learned to call: {told}; {cure}"]


def _described(tool: ToolSpec) -> str:
    """What a function gives of a tool: its name, arguments and docstring."""
    arguments, known = tool.parameters.get("properties") or {}, ("type", "description", "enum")
    if isinstance(arguments, dict):
        schemas = cast("dict[str, Any]", arguments).items()  # the values of which may be true or false
        arguments = {n: {key: s[key] for key in known if key in s} if isinstance(s, dict) else s for n, s in schemas}
    return f"{tool.name}({json.dumps(arguments, ensure_ascii=False)[1:-1]}) {tool.description.strip()!r}"


def without_demonstrations(source: TaskSource) -> str:
    """Says that `source` gave none for MAX_WITHOUT tasks in a row."""
    name, cure = type(source).__name__, "set sft.steps=0 or choose a task that has demonstrations"
    cure = cure if is_ours(source) else f"let {name}.demonstration return messages, or set sft.steps=0"
    return f"task {name} gave no demonstration for {MAX_WITHOUT} tasks in a row; {cure}"


def _no_room(experiment: Experiment, lengths: Sequence[int]) -> list[str]:
    """What to say where all demonstrations are longer than what is learned from."""
    room = max(experiment.batch.context, experiment.environment.max_context_length)
    if not lengths or min(lengths) <= room or experiment.condenser.active:
        return []
    return [
        f"the first {len(lengths)} demonstrations have {min(lengths)} tokens or more, of which none is learned "
        f"from: raise batch.token_budget or environment.max_context_length from {room} to {max(lengths)} or more"
    ]


def _cut(experiment: Experiment, shown: Sequence[Shown], chat: Chat) -> list[str]:
    """What to say where demonstrations have longer turns, or more of them, than the policy may sample."""
    spoken = {task.id: [m for m in messages if m.role == "assistant" and m.name != SUMMARY] for task, messages in shown}
    lengths = [(max((len(chat.encode(one)) for one in said), default=0), name) for name, said in spoken.items()]
    limits = [("turns longer than sampling.max_new_tokens", experiment.sampling.max_new_tokens, lengths)]
    if not experiment.agent.active:
        turns = [(len(said), name) for name, said in spoken.items()]
        limits.append(("more turns than environment.max_turns", experiment.environment.max_turns, turns))
    whose, why = f"of {_counted(len(shown))}", "what imitates them is cut, which is no success"
    return [
        f"{whose} {count} have {what}={most}, as {max(found)[1]}: {why}; set it to {max(found)[0]} or higher"
        for what, most, found in limits
        if (count := sum(number > most for number, _ in found))
    ]


def _lacking(task: Task, messages: Sequence[Message]) -> str:
    """What a demonstration lacks where a tool answers every call, and the policy then goes on; "" = nothing."""
    said, whose = (*task.messages, *messages), f"the demonstration of task {task.id}"
    calls = [sum(call.name != CONDENSE.name for call in message.tool_calls) for message in said]
    answered, cure = sum(message.role == "tool" for message in said), "a message of role tool belongs after each"
    if answered != sum(calls):
        return f"{whose} makes {sum(calls)} calls and has {answered} answers: {cure}"
    for number, count in enumerate(calls):
        if other := next((one.role for one in said[number + 1 :][:count] if one.role != "tool"), None):
            return f"{whose} has a message of role {other} between a call and its answer: {cure}"
    if messages[-1].role == "assistant":
        return ""
    return f"{whose} ends with a message of role {messages[-1].role}: the policy does not see how to go on from there"


def _counted(number: int) -> str:
    return f"{number} demonstration{'s' * (number > 1)}"


async def _paid(experiment: Experiment, shown: Sequence[Trajectory]) -> list[str]:
    """What to say where the reward takes no demonstration for a success, or fails, or pays an empty answer."""
    reward, name = experiment.reward, type(experiment.reward).__name__
    if not reward.works_unopened or experiment.agent.active:
        return []
    own, in_rows = not all_ours(reward), bool(experiment.sft.demonstrations)
    tried = sorted(shown, key=lambda one: not one.calls)  # a mistake may be in what is done with calls
    known = [one for one in tried if one.task.answer]  # a row may have none
    if not own:
        tried = known if reward.compares and not reward.parts else []
    elif in_rows:
        tried = [] if reward.parts else known or tried[:FEW]  # a part of ours refuses a row without an answer
    async with left_to_the_run():
        if reward.looks_for and not any(map(reward.answer, shown)):
            return [f"none of {_counted(len(shown))} has an answer where it is looked for: {reward.looks_for}"]
        paid, failed = await _graded(reward, tried, in_rows)
        if failed and own and in_rows:
            return [f"reward {name} fails for {len(failed)} of {_counted(len(failed) + len(paid))} tried: {failed[0]}"]
        if not known and in_rows:
            return []
        if paid and max(paid) < reward.success_at:
            least = f"and success takes reward.success_at={reward.success_at:g}: what imitates them has none"
            return [f"reward {name} pays the first {_counted(len(paid))} at most {max(paid):g}, {least}"]
        for one in shown[:1] if own and not in_rows else ():
            (empty,) = await scores(reward, [a_conversation(one.task, [Message("assistant", "")])])
            if isinstance(empty, Score) and empty.total >= reward.success_at:
                return [f"reward {name} pays an empty answer {empty.total:g}, which is a success"]
    return []


async def _graded(reward: Reward, tried: Sequence[Trajectory], in_rows: bool) -> tuple[list[float], list[str]]:
    """What `reward` pays those of `tried` up to the first success, and where it fails."""
    paid, failed = list[float](), list[str]()
    for one in tried:
        with suppress(*([TaskError] if in_rows else [])):  # the row lacks what a task has
            (score,) = await scores(reward, [one])
            if isinstance(score, Score):
                paid.append(score.total)
            elif not isinstance(score.__cause__ or score, KeyError):  # so it does here
                failed.append(f"{one.task.id}: {extension.explained(score)}")
        if paid and paid[-1] >= reward.success_at:  # it may ask somebody, who wants time or money
            break
    return paid, failed


async def _play(experiment: Experiment, task: Task, messages: Sequence[Message], chat: Chat, graded: bool) -> list[str]:
    """Let the environment answer what is demonstrated, and where it is `graded` a reward of somebody's own grade that.

    Returns what to say where a tool answers otherwise than the demonstration has it. Raises ConfigError for the reward.
    """
    said = [message for message in messages if message.role == "assistant" and message.name != SUMMARY]
    if any(call.name == CONDENSE.name for message in said for call in message.tool_calls):
        return []  # which the condenser answers
    world: Any = experiment.environment
    world = replace(world, max_turns=len(said), **({"call_retries": 0} if isinstance(world, ToolUse) else {}))

    async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
        return written(said.pop(0), chat)

    played = await run_rollout(task, world, chat, sample, Sampling(max_new_tokens=1), Limits(UNLIMITED))
    graded = graded and not experiment.sft.demonstrations  # whose rows may lack what a reward needs
    if graded and experiment.reward.works_unopened and not all_ours(experiment.reward):
        await grade(experiment.reward, "the demonstration", played)
    own_answers = [message for turn in played.turns for message in turn.observations]
    answers = [[one for one in some if one.role == "tool"] for some in (messages, own_answers)]
    other = next(((one, own) for one, own in zip(*answers, strict=False) if one.content != own.content), None)
    if not other:
        return []
    shown, own = (f"{message.content!r:.100}" for message in other)
    return [f"the demonstration of task {task.id} has {shown} where the tool {other[1].name} answers {own}"]
