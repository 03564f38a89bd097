"""What is tried before a model is loaded: a first task, which the environment begins and the reward grades."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from copy import copy
from itertools import islice, takewhile
from time import monotonic

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, When
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import Environment, Opening, copied
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError, TaskError, meant
from mtgrpo.parts import extension
from mtgrpo.parts.extension import is_ours
from mtgrpo.rewards import Reward, scores
from mtgrpo.rollout.conversation import run_rollout
from mtgrpo.rollout.demonstrations import Scripted, unrefused, written
from mtgrpo.tasks import Split, TaskSource, demonstration
from mtgrpo.tasks.rows import Columns
from mtgrpo.types import CallRecord, Completion, Finish, Limits, Message, Sampling, Task, Trajectory, Turn

LONGEST_S = 30.0  # what takes longer is left to the run, which has limits of its own
ROOMY = 100_000  # tokens of a context, far more than what is tried has
FEW = 3  # demonstrations, or turns before a condenser, that are tried
MISTAKES = (ArithmeticError, AttributeError, LookupError, NameError, TypeError)  # what else is raised may pass
LOOKED_AT, LOOKED_AT_S = 2_000, 2.0  # training tasks, which may be held out as well; how long
SOME = 100  # training tasks, one of which has an answer where any has


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
    async with left_to_the_run(None if running else task):
        if begins(environment, running):
            async with environment.conversation(task) as (world, _):
                _suit(experiment, world)
    if not running and reward.works_unopened:
        await scores(reward, [a_conversation(task, [Message("assistant", "")])])


async def _try_own(experiment: Experiment, task: Task, running: bool) -> None:
    """A reward of somebody's own must grade the task's demonstration, or where there is none, its bare answer."""
    environment, reward, alone = experiment.environment, experiment.reward, begins(experiment.environment)
    said: list[Message] = [Message("assistant", task.answer)]
    shown: Sequence[Message] | None = None
    async with left_to_the_run(None if running else task):
        if begins(environment, running):
            async with environment.conversation(task) as (world, _):
                _suit(experiment, world)
                said += (await world.step(said[0])).messages if alone else ()
    async with left_to_the_run():
        shown = demonstration(experiment.task, task, experiment.seed)
    if not ((alone or shown) if running else (alone and reward.works_unopened)):
        return
    what = "the demonstration" if shown else f"the bare answer {task.answer!r:.100}"
    await grade(reward, what, a_conversation(task, shown or said))


async def try_empty_answer(experiment: Experiment, task: Task) -> None:
    """Raise ConfigError where a reward of somebody's own cannot grade an empty answer, where nothing follows one."""
    ends = type(experiment.environment) in (ToolUse, SingleTurn)
    if ends and experiment.reward.works_unopened and not all_ours(experiment.reward):
        async with left_to_the_run():
            await grade(experiment.reward, "an empty answer", a_conversation(task, [Message("assistant", "")]))


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
            await scores(reward, [a_conversation(task, [Message("assistant", "")])])
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


async def grade(reward: Reward, what: str, played: Trajectory) -> None:
    """Raise ConfigError where `reward` cannot grade `what`, which was played."""
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
    alone = begins(environment) and not (experiment.task.opens or agent.active)
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
    once = " (idempotent is False)" if "tools" in own and alone and not environment.replayable else ""
    return f", nor your own {' and '.join(own)} tried{once}" if own else ""


@asynccontextmanager
async def left_to_the_run(begins: Task | None = None) -> AsyncGenerator[None]:
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


def a_conversation(task: Task, messages: Sequence[Message]) -> Trajectory:
    """Of `messages`, without their tokens; all calls were answered."""
    calls = tuple(CallRecord(call.name) for message in messages for call in message.tool_calls)
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(Turn.of(Completion([0], [0.0], [0], Finish.STOP), message, [0], parent=len(turns) - 1))
        elif turns:
            turns[-1].observations = (*turns[-1].observations, message)
    return Trajectory(copied(task), turns=turns, calls=calls)


def begins(environment: Environment, opened: bool = False) -> bool:
    """Whether a conversation may begin to try it: it is ours, and `opened`, or has nothing that has to be."""
    return is_ours(environment) and (opened or not environment.opens)


def all_ours(reward: Reward) -> bool:
    """Whether neither it nor a part of it is the user's own code."""
    return is_ours(reward) and all(map(all_ours, reward.parts))
