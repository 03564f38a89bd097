"""What is tried before a model is loaded: a first task, which the environment begins and the reward grades, and the
first demonstrations, as a warm start would see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice

from mtgrpo.chat import Chat
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import Environment
from mtgrpo.errors import ConfigError
from mtgrpo.parts import extension
from mtgrpo.rewards import Reward
from mtgrpo.rollout.demonstrations import laid_out, unoffered
from mtgrpo.tasks import Split, TaskSource
from mtgrpo.types import Completion, Finish, Message, Task, Trajectory, Turn

LONGEST_S = 30.0  # what takes longer is left to the run, which has limits of its own
FEW = 3  # demonstrations that are tried
DEMONSTRATION_SEED = 1_000_000  # demonstrations are of other generated tasks than the rollouts
MAX_WITHOUT = 1000  # tasks in a row without a demonstration before the source counts as having none


async def try_tasks(experiment: Experiment, tasks: Iterable[Task], running: bool) -> None:
    """Raise ConfigError where the first of `tasks` does not suit the environment or the reward.

    running: these are open; else only what works without it is tried. An environment or a reward of somebody's own is
    never called, and whatever else goes wrong is left to the run, which tries again.
    """
    task = next(iter(tasks), None)
    if task is None or experiment.agent.active:
        return
    if is_ours(experiment.environment) and (running or not experiment.environment.opens):
        await _begun(experiment.environment, task)
    if not running and experiment.reward.works_unopened and all_ours(experiment.reward):
        said = Completion([0], [0.0], [0], Finish.STOP)
        turns = [Turn.of(said, Message("assistant", ""), [0], parent=-1)]
        await experiment.reward.rewards([Trajectory(task, turns=turns)])


def first_demonstrations(source: TaskSource, seed: int) -> Iterator[tuple[Task, tuple[Message, ...]]]:
    """The first few tasks of a warm start that have a demonstration, and that."""
    tasks = islice(source.stream(Split.train, seed + DEMONSTRATION_SEED), MAX_WITHOUT)
    return islice(((task, said) for task in tasks if (said := source.demonstration(task, seed))), FEW)


async def try_demonstrations(experiment: Experiment, chat: Chat) -> None:
    """Raise ConfigError where the environment or its tools cannot begin what is demonstrated, or `chat` not write it.

    Nothing is open yet: what has to be, and whatever else goes wrong, is left to the warm start.
    """
    environment, source = experiment.environment, experiment.demonstrated
    if not experiment.sft.steps or environment.opens or source.opens or not is_ours(environment):
        return
    for task, messages in first_demonstrations(source, experiment.seed):
        try:
            async with asyncio.timeout(LONGEST_S):
                unoffered(await laid_out(task, messages, environment, chat))
        except ConfigError:
            raise
        except Exception as error:
            if not extension.of_own_code(error):
                return
            why = extension.explained(error)
            raise ConfigError(f"the demonstration of task {task.id} cannot begin: {why}; correct it") from error


def untried(experiment: Experiment) -> str:
    """Says which parts are the user's own code, which nothing calls before a run does; "" = none."""
    ours = {"environment": is_ours(experiment.environment), "agent": is_ours(experiment.agent)}
    own = [name for name, known in (ours | {"reward": all_ours(experiment.reward)}).items() if not known]
    return f", nor your own {' and '.join(own)} tried" if own else ""


async def _begun(environment: Environment, task: Task) -> None:
    try:
        async with asyncio.timeout(LONGEST_S), environment.conversation(task):
            pass
    except ConfigError:
        raise
    except Exception:
        return


def all_ours(reward: Reward) -> bool:
    """Whether neither it nor a part of it is the user's own code."""
    return is_ours(reward) and all(map(all_ours, reward.parts))


def is_ours(part: object) -> bool:
    """Whether its class is none of the user's own code."""
    module = type(part).__module__
    return module.startswith("mtgrpo.") and not module.startswith(f"{extension.__name__}.")
