"""A first task, tried before a model is loaded: does the environment play it, and can the reward grade an answer?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import Environment
from mtgrpo.errors import ConfigError
from mtgrpo.parts import extension
from mtgrpo.rewards import Reward
from mtgrpo.types import Completion, Finish, Message, Task, Trajectory, Turn

LONGEST_S = 30.0  # what takes longer is left to the run, which has limits of its own


async def try_tasks(experiment: Experiment, tasks: Iterable[Task], running: bool) -> None:
    """Raise ConfigError where the first of `tasks` does not suit the environment or the reward.

    running: these are open; else only what works without it is tried. Somebody's own code is never called, and whatever
    else goes wrong is left to the run, which tries again.
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
