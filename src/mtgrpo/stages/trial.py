"""What is tried before a model is loaded: a first task, which the environment begins and the reward grades, and the
first demonstrations, as a warm start would see them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from itertools import chain, islice, takewhile
from time import monotonic
from typing import Any

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, When
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import Environment, Opening
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import OutageError, ToolUse
from mtgrpo.errors import ConfigError, TaskError, meant
from mtgrpo.parts import extension
from mtgrpo.rewards import Reward, Score, scores
from mtgrpo.rollout.conversation import CONDENSE, run_rollout
from mtgrpo.rollout.demonstrations import Scripted, laid_out, refused_calls, unrefused, written
from mtgrpo.tasks import Split, TaskSource, demonstration
from mtgrpo.tasks.rows import Columns
from mtgrpo.types import SUMMARY, UNLIMITED, Completion, Finish, Limits, Message, Sampling, Task, Trajectory, Turn

LONGEST_S = 30.0  # what takes longer is left to the run, which has limits of its own
ROOMY = 100_000  # tokens of a context, far more than what is tried has
FEW = 3  # demonstrations that are tried
MISTAKES = (ArithmeticError, AttributeError, LookupError, NameError, TypeError)  # what else is raised may pass
LOOKED_AT, LOOKED_AT_S = 2_000, 2.0  # training tasks, which may be held out as well; how long
GRADED = 20  # demonstrations, some of which should be right
SOME = 100  # training tasks, one of which has an answer where any has
DEMONSTRATION_SEED = 1_000_000  # demonstrations are of other generated tasks than the rollouts
MAX_WITHOUT = 1000  # tasks in a row without a demonstration before the source counts as having none
Shown = tuple[Task, Sequence[Message]]


async def try_tasks(experiment: Experiment, tasks: Iterable[Task], running: bool) -> None:
    """Raise ConfigError where the first of `tasks` does not suit the environment or the reward.

    running: these are open; else only what works without it is tried. An environment of somebody's own is never called,
    and whatever else goes wrong is left to the run, which tries again.
    """
    task = next(iter(tasks), None)
    if task is not None and not experiment.agent.active:
        await (_try_ours if all_ours(experiment.reward) else _try_own)(experiment, task, running)


async def _try_ours(experiment: Experiment, task: Task, running: bool) -> None:
    """A reward of ours says of an empty answer, while nothing is open, whether such a task is for it."""
    environment, reward = experiment.environment, experiment.reward
    async with _left_to_the_run(None if running else task):
        if _begins(environment, running):
            async with environment.conversation(task) as (world, _):
                _suit(experiment, world)
    if not running and reward.works_unopened:
        await scores(reward, [_conversation(task, [Message("assistant", "")])])


async def _try_own(experiment: Experiment, task: Task, running: bool) -> None:
    """A reward of somebody's own must grade the task's demonstration, or where there is none, its bare answer."""
    environment, reward, alone = experiment.environment, experiment.reward, _begins(experiment.environment)
    said: list[Message] = [Message("assistant", task.answer)]
    shown: Sequence[Message] | None = None
    async with _left_to_the_run(None if running else task):
        if _begins(environment, running):
            async with environment.conversation(task) as (world, _):
                _suit(experiment, world)
                said += (await world.step(said[0])).messages if alone else ()
    async with _left_to_the_run():
        shown = demonstration(experiment.task, task, experiment.seed)
    if not ((alone or shown) if running else (alone and reward.works_unopened)):
        return
    what = "the demonstration" if shown else f"the bare answer {task.answer!r:.100}"
    await _grade(reward, what, _conversation(task, shown or said))


async def try_empty_answer(experiment: Experiment, task: Task) -> None:
    """Raise ConfigError where a reward of somebody's own cannot grade an empty answer, where nothing follows one."""
    ends = type(experiment.environment) in (ToolUse, SingleTurn)
    if ends and experiment.reward.works_unopened and not all_ours(experiment.reward):
        async with _left_to_the_run():
            await _grade(experiment.reward, "an empty answer", _conversation(task, [Message("assistant", "")]))


def _suit(experiment: Experiment, world: Environment) -> None:
    """Raise ConfigError where worked examples of the user's own make calls that none of the tools takes."""
    if type(world) is not ToolUse or not world.tool_specs or isinstance(experiment.task.examples, int):
        return  # other environments may have other tools for each task, or none, as a control
    for call in (call for message in experiment.task.worked for call in message.tool_calls):
        if why := world.refusal(call):
            raise ConfigError(f"task.examples calls {call.name}({', '.join(call.arguments)}): {why}; correct it")


def unanswered(experiment: Experiment, held_out: Sequence[Task], tasks: Iterable[Task]) -> list[str]:
    """What to say where no row has an answer, and the reward may want one: the column may have another name.

    Raises ConfigError where it does want one: it is ours, and no agent may give a reward of its own.
    """
    reward, columns = experiment.reward, getattr(experiment.task, "columns", None)
    if not isinstance(columns, Columns) or not (reward.compares or not all_ours(reward)):
        return []
    for some in (held_out, list(islice(tasks, SOME))):
        if some and not any(task.answer or task.metadata.get("answers") for task in some):
            others, sure = list(some[0].metadata), all_ours(reward) and not experiment.agent.active
            said = (
                f"no row, such as {some[0].id}, has an answer in column {columns.answer!r}, which reward "
                f"{type(reward).__name__} {'wants' if sure else 'may want'}: {meant(columns.answer, others)}set "
                f"task.columns.answer=NAME; beside the prompt there is {', '.join(others) or 'nothing'}"
            )
            if sure:
                raise ConfigError(said)
            return [said]
    return []


async def ungraded(experiment: Experiment, held_out: Sequence[Task], tasks: Iterable[Task]) -> list[str]:
    """What to say where a reward of ours cannot grade some of the first tasks, whose conversations will fail."""
    reward, errors = experiment.reward, list[TaskError]()
    if not (reward.compares and all_ours(reward) and reward.works_unopened) or experiment.agent.active:
        return []
    some = (*held_out[:SOME], *islice(tasks, SOME))  # of few tasks several times
    first = {task.id: task for task in some if task.answer}  # without one, that was said
    for task in first.values():
        try:
            await scores(reward, [_conversation(task, [Message("assistant", "")])])
        except TaskError as error:
            errors.append(error)
    told = f"{len(errors)} of the first {len(first)} tasks cannot be graded, correct them or leave them out"
    return [f"{told}: {errors[0]}"] if errors else []


def trained_too(held_out: Sequence[Task], source: TaskSource) -> list[str]:
    """What to say where some of `held_out` are among the first of the training tasks as well, but for their ids."""
    tasks = source.stream(Split.train, 0, repeat=False)
    first, ends_s = islice(() if tasks.endless and is_ours(source) else tasks, LOOKED_AT), monotonic() + LOOKED_AT_S
    trained = {_content(task) for task in takewhile(lambda _: monotonic() < ends_s, first)}
    both = [task.id for task in held_out if _content(task) in trained]
    if tasks.endless and 2 * len(both) < len(held_out):
        return []  # some come up again by chance
    told = f"{len(both)} of {len(held_out)} held-out tasks are training tasks too, such as {both[0]}" if both else ""
    return [f"{told}: success on these is no measure of others; hold out tasks that differ"] if told else []


def made_anew(held_out: Sequence[Task], source: TaskSource, seed: int) -> list[str]:
    """What to say where a source of somebody's own gives another first task when it is asked again."""
    again = None if is_ours(source) else next(source.stream(Split.eval, seed, repeat=False), None)
    if again is None or _content(again) == _content(held_out[0]):
        return []
    how = 'draw from random.Random(f"{split}/{index}"), not from random itself'
    return [f"task {again.id} is another each time it is made, so no two runs measure the same: {how}"]


def _content(task: Task) -> str:
    return repr((task.messages, task.answer, task.metadata))


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
    told, lengths, taken, first = list[str](), list[int](), False, list(islice(shown, GRADED))
    if not first:
        raise ConfigError(without_demonstrations(source))
    if not _begins(environment):
        return notes + _cut(experiment, first, chat)
    ends_s = asyncio.get_running_loop().time() + LONGEST_S
    for number, (task, messages) in enumerate(_tried(first, shown if type(environment) is ToolUse else ())):
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
                why += "; its row has no metadata, which `mtgrpo collect` writes with collect.form=trajectories"
            sure = isinstance(cause, MISTAKES) and not experiment.sft.demonstrations  # rows may lack what calls need
            if sure or not failed:
                raise ConfigError(f"the demonstration of task {task.id}: {why}; correct it") from error
            told.append(f"the demonstration of task {task.id}: {why}")
    room = max(experiment.batch.context, environment.max_context_length)
    if lengths and min(lengths) > room and not experiment.condenser.active:
        notes.append(
            f"the first {len(lengths)} demonstrations have {min(lengths)} tokens or more, of which none is learned "
            f"from: raise batch.token_budget or environment.max_context_length above {room}"
        )
    notes += [*told[:1], *_cut(experiment, first, chat)]
    return notes + await _paid(experiment, [_conversation(*each) for each in first])


def _tried(first: list[Shown], more: Iterable[Shown]) -> list[Shown]:
    """The first demonstration, and some that make calls, which teachers who guess seldom do."""
    calling = (one for one in chain(first[1:], more) if any(said.tool_calls for said in one[1]))
    chosen = [first[0], *islice(calling, FEW - 1)]
    return [*chosen, *(one for one in first if all(one is not other for other in chosen))][:FEW]


def without_demonstrations(source: TaskSource) -> str:
    """Says that `source` gave none for MAX_WITHOUT tasks in a row."""
    name, cure = type(source).__name__, "set sft.steps=0 or choose a task that has demonstrations"
    cure = cure if is_ours(source) else f"let {name}.demonstration return messages, or set sft.steps=0"
    return f"task {name} gave no demonstration for {MAX_WITHOUT} tasks in a row; {cure}"


def _cut(experiment: Experiment, shown: Sequence[Shown], chat: Chat) -> list[str]:
    """What to say where turns of demonstrations have more tokens than the policy may sample."""
    most, lengths = experiment.sampling.max_new_tokens, list[tuple[int, str]]()
    for task, messages in shown:
        said = [one for one in messages if one.role == "assistant" and one.name != SUMMARY]
        lengths.append((max((len(chat.encode(one)) for one in said), default=0), task.id))
    (longest, name), count = max(lengths), sum(length > most for length, _ in lengths)
    told = f"of {len(shown)} demonstrations {count} have turns longer than sampling.max_new_tokens={most}, as {name}"
    return [f"{told}: what imitates them is cut, which is no success; set it to {longest} or higher"] if count else []


def _lacking(task: Task, messages: Sequence[Message]) -> str:
    """What a demonstration lacks where a tool answers every call, and the policy then goes on; "" = nothing."""
    said, whose = (*task.messages, *messages), f"the demonstration of task {task.id}"
    calls = [call for message in said for call in message.tool_calls if call.name != CONDENSE.name]
    answered = sum(message.role == "tool" for message in said)
    if answered != len(calls):
        return f"{whose} makes {len(calls)} calls and has {answered} answers: a message of role tool belongs after each"
    if messages[-1].role == "assistant":
        return ""
    return f"{whose} ends with a message of role {messages[-1].role}: the policy does not see how to go on from there"


async def _paid(experiment: Experiment, shown: Sequence[Trajectory]) -> list[str]:
    """What to say where the reward takes no demonstration for a success, or one of somebody's own an empty answer."""
    reward, name = experiment.reward, type(experiment.reward).__name__
    if not reward.works_unopened or experiment.agent.active:
        return []
    if reward.looks_for and not any(map(reward.answer, shown)):
        return [f"none of {len(shown)} demonstrations has an answer where it is looked for: {reward.looks_for}"]
    own = not (all_ours(reward) or experiment.sft.demonstrations)
    if not own:  # a row may have no answer
        shown = [one for one in shown if one.task.answer and reward.compares and not reward.parts]
    async with _left_to_the_run():
        paid = list[float]()
        for one in shown:
            paid += [score.total for score in await scores(reward, [one]) if isinstance(score, Score)]
            if paid and paid[-1] >= reward.success_at:  # it may ask somebody, who wants time or money
                break
        if paid and max(paid) < reward.success_at:
            least = f"and reward.success_at, what success takes, is {reward.success_at:g}"
            return [f"reward {name} pays the first {len(paid)} demonstrations at most {max(paid):g}, {least}"]
        for one in shown[:1] if own else ():
            (empty,) = await scores(reward, [_conversation(one.task, [Message("assistant", "")])])
            if isinstance(empty, Score) and empty.total >= reward.success_at:
                return [f"reward {name} pays an empty answer {empty.total:g}, which is a success"]
    return []


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
        await _grade(experiment.reward, "the demonstration", played)
    own_answers = [message for turn in played.turns for message in turn.observations]
    answers = [[one for one in some if one.role == "tool"] for some in (messages, own_answers)]
    other = next(((one, own) for one, own in zip(*answers, strict=False) if one.content != own.content), None)
    if not other:
        return []
    shown, own = (f"{message.content!r:.100}" for message in other)
    return [f"the demonstration of task {task.id} has {shown} where the tool {other[1].name} answers {own}"]


async def _grade(reward: Reward, what: str, played: Trajectory) -> None:
    (score,) = await scores(reward, [played])
    if isinstance(score, Exception):
        why = f"{extension.explained(score)}; correct it, or raise PolicyError where a text cannot be graded"
        raise ConfigError(f"reward {type(reward).__name__} fails for {what} of task {played.task.id}: {why}")


async def try_condenser(condenser: Condenser, task: Task, chat: Chat) -> None:
    """Raise ConfigError where a condenser of somebody's own fails after one of the first turns of `task`."""
    if is_ours(condenser) or condenser.opens:
        return
    said = Message("assistant", "Next.")
    left = [said, Message("user", "Go on.")] * FEW + [said]
    always = copy(condenser)
    always.when, always.max_condensed_tokens = When.every_turn, 0  # so short a conversation may grow

    async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
        if left[:1] == [said]:
            del left[0]
        return written(said, chat)

    async def attend(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        return [1 / len(spans)] * len(spans)

    world, sampling = Scripted(Opening(task.messages), left), Sampling(max_new_tokens=1)
    try:
        async with asyncio.timeout(LONGEST_S):
            unrefused(await run_rollout(task, world, chat, sample, sampling, Limits(ROOMY), always, attend))
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, MISTAKES) and extension.of_own_code(error):
            raise ConfigError(f"condenser {condenser.name} fails: {extension.explained(error)}; correct it") from error


def untried(experiment: Experiment, trains: bool) -> str:
    """Says which parts are the user's own code that only a run, which `trains` or not, calls; "" = none."""
    environment, reward, agent = experiment.environment, experiment.reward, experiment.agent
    alone = _begins(environment) and not (experiment.task.opens or agent.active)
    shown = (
        alone and trains and environment.replayable and experiment.sft.steps and experiment.demonstrated.demonstrates
    )
    tried = {
        "environment": is_ours(environment),
        "tools": shown or not any(":" in str(name) for name in getattr(environment, "tools", None) or ()),
        "agent": not agent.active,
        "reward": all_ours(reward) or (alone and reward.works_unopened),
        "sinks": all(":" not in str(name) for name in experiment.log),
    }
    own = [name for name, known in tried.items() if not known]
    return f", nor your own {' and '.join(own)} tried" if own else ""


@asynccontextmanager
async def _left_to_the_run(begins: Task | None = None) -> AsyncGenerator[None]:
    """What within takes too long or goes wrong is left to the run, but for a wrong setting.

    And but for a mistake in code of the user's own by which a task that `begins` does not. Raises ConfigError.
    """
    try:
        async with asyncio.timeout(LONGEST_S):
            yield
    except ConfigError:
        raise
    except Exception as error:
        if begins and isinstance(error, MISTAKES) and extension.of_own_code(error):
            raise ConfigError(f"task {begins.id} cannot begin: {extension.explained(error)}; correct it") from error


def _conversation(task: Task, messages: Sequence[Message]) -> Trajectory:
    """Of `messages`, without their tokens."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(Turn.of(Completion([0], [0.0], [0], Finish.STOP), message, [0], parent=len(turns) - 1))
        elif turns:
            turns[-1].observations = (*turns[-1].observations, message)
    return Trajectory(task, turns=turns)


def _begins(environment: Environment, opened: bool = False) -> bool:
    """Whether a conversation may begin to try it: it is ours, and `opened`, or has nothing that has to be."""
    return is_ours(environment) and (opened or not environment.opens)


def all_ours(reward: Reward) -> bool:
    """Whether neither it nor a part of it is the user's own code."""
    return is_ours(reward) and all(map(all_ours, reward.parts))


def is_ours(part: object) -> bool:
    """Whether its class is none of the user's own code."""
    module = type(part).__module__
    return module.startswith("mtgrpo.") and not module.startswith(f"{extension.__name__}.")
