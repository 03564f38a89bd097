"""Rewards: a number for each trajectory, or for each turn. One file = one reward: a dataclass with one method."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar, cast

from mtgrpo.errors import ConfigError, PolicyError, TaskError
from mtgrpo.parts import Part, Parts, RunContext, built, extension, named
from mtgrpo.parts.extension import misgiven
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.runtime.workers import Workers, together
from mtgrpo.types import Task, Trajectory

T = TypeVar("T")
spent_s: ContextVar[list[float]] = ContextVar("spent_s")  # what each reward took that was asked within


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory. A float stands for a Score of that total."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])  # parts of the total, logged by name
    turns: Sequence[float] = ()  # a reward for each turn, in addition to the total; () = turns are not judged
    paid: float = 0.0  # the part of the total that the environment paid turn by turn


Given: TypeAlias = float | Score | Exception  # an exception says that this trajectory could not be scored


@dataclass
class Reward(Part, ABC, retries=">= 0"):
    """Base of all rewards. Write `reward`, or `rewards` where siblings are scored together or something is awaited."""

    cpu_heavy = False  # true: `reward` of a pickled copy runs in another process, so that the event loop stays free
    judges_turns = False  # true: its scores have turns, which advantage=turn needs
    compares = False  # true: with the answer that a task has; one that has none is refused
    looks_for: ClassVar[str] = ""  # where it finds the answer in a text, for a note where it is never there; "" = all
    takes_posted = False  # true: it scores by what an agent's program posts (`agent.posts_rewards`)
    _workers = cast("Workers | None", None)

    success_at: float = 1.0  # a trajectory whose reward reaches this counts as a success in evaluations
    retries: int = 1  # further attempts where it raises; then the trajectory counts as failed, not as worth 0

    def __init_subclass__(cls, **bounds: str) -> None:
        super().__init_subclass__(**bounds)
        if cls.rewards is not Reward.rewards and cls.reward is Reward.reward:
            cls.reward = _refuse_alone  # no longer abstract

    @abstractmethod
    def reward(self, trajectory: Trajectory) -> float | Score:
        """The reward of a finished or truncated trajectory; a pure function, never called for failed ones.

        Raise PolicyError where the policy wrote something that cannot be graded: the reward is then 0. Any other
        exception means that this code or the world failed: the trajectory then counts as failed and is not trained.
        """

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        """The rewards of those trajectories of one task that did not fail, at least one, in their order.

        Override it where a reward depends on the siblings, is cheaper for all at once, or awaits something; by default
        each trajectory is scored by itself. An exception in the place of a score fails that trajectory alone.
        """
        workers = self._workers
        score = partial(_timed, self.reward) if workers is None else partial(self._score_elsewhere, workers)
        return await together(attempt(partial(score, trajectory), self.retries) for trajectory in siblings)

    async def _score_elsewhere(self, workers: Workers, trajectory: Trajectory) -> float | Score:
        """As `reward`, in another process. Raises PolicyError for what is nested too deeply to be copied there."""
        settings = copy.copy(self)
        settings._workers = None
        try:
            result, seconds = await workers.run(partial(_with_seconds, settings.reward), trajectory)
            spent_s.get([]).append(seconds)
            return result
        except RecursionError as error:
            try:
                pickle.dumps(trajectory)
            except RecursionError:
                raise PolicyError("a tool call is nested too deeply") from None
            raise error

    @property
    def parts(self) -> Sequence[Reward]:
        """The rewards that it goes by, which say the following for it."""
        return ()

    @property
    def works_unopened(self) -> bool:
        """Whether it can grade a text, one without code, before it is open."""
        return all(part.works_unopened for part in self.parts) if self.parts else not (self.opens or self.cpu_heavy)

    def answer(self, trajectory: Trajectory) -> str:
        """The trajectory's answer, for majority votes: equal answers must be equal texts; "" = no answer."""
        return self.parts[0].answer(trajectory) if self.parts else trajectory.final.strip()

    def note(self, divide_by_std: bool) -> str:
        """A warning for the user before training begins; "" = none.

        divide_by_std: whether advantages are divided by the standard deviation of the siblings' rewards.
        """
        return "; ".join(filter(None, (part.note(divide_by_std) for part in self.parts)))


@asynccontextmanager
async def opened(reward: Reward, context: RunContext) -> AsyncGenerator[Reward]:
    """The open reward, with worker processes where it is `cpu_heavy`."""
    async with reward.open(context) as running:
        if not running.cpu_heavy:
            yield running
            return
        running = copy.copy(running)
        with closing(Workers()) as running._workers:  # pyright: ignore[reportPrivateUsage]
            yield running


def required(task: Task, name: str, reward: str, source: str, kind: type = object) -> Any:
    """`name` of the task's metadata. Raises TaskError where it is empty or no `kind`: `reward` is for `source`."""
    value = task.metadata.get(name)
    if value and isinstance(value, kind):
        return value
    raise TaskError(f"task {task.id} has no `{name}` in its metadata; reward={reward} is for task={source}")


def _refuse_alone(self: Reward, trajectory: Trajectory) -> float:
    raise NotImplementedError(f"{type(self).__name__} scores siblings together")


async def _timed(work: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """What `work` gives; how long it takes, or waits for others, is added to `spent_s`."""
    began, seconds = time.perf_counter(), spent_s.get([])
    spent_s.set([])  # of this task alone: what it asks of other rewards is part of its own time
    try:
        result = work(*arguments)
        return cast(T, await result if inspect.isawaitable(result) else result)
    finally:
        seconds.append(time.perf_counter() - began)


def _with_seconds(work: Callable[[Trajectory], T], trajectory: Trajectory) -> tuple[T, float]:
    began = time.perf_counter()
    return work(trajectory), time.perf_counter() - began


async def attempt(work: Callable[[], T | Awaitable[T]], retries: int, backoff_s: float = 0.0) -> T | Exception:
    """The result of `work`, or the exception of its last attempt (see `run_isolated`). Raises ConfigError at once.

    backoff_s: the wait before the first further attempt, doubled before each of the next.
    """
    failures = 0
    while True:
        try:
            return await run_isolated(work)
        except ConfigError:
            raise
        except Exception as error:
            if failures >= retries or isinstance(error, PolicyError):  # the policy would write the same
                return error
        await asyncio.sleep(backoff_s * 2**failures)
        failures += 1


async def scores(reward: Reward, siblings: Sequence[Trajectory]) -> list[Score | Exception]:
    """The checked score of each sibling, or the exception because of which there is none after all retries.

    An exception also stands for a result that is not finite, or has another number of trajectories or turns. A
    PolicyError becomes a score of 0: the policy must not be able to choose that its trajectory is left out.
    """
    if not siblings:
        return []
    alone = type(reward).rewards is Reward.rewards
    method = reward.reward if alone else reward.rewards
    score = reward.rewards if alone or reward.parts else partial(_timed, reward.rewards)  # the others time themselves
    results: Any = await attempt(lambda: score([trajectory.copy() for trajectory in siblings]), reward.retries)
    if isinstance(results, Exception):
        results = [results] * len(siblings)
    if not isinstance(results, Sequence) or isinstance(results, str) or len(cast(Any, results)) != len(siblings):
        error = misgiven(method, results, f"it is for {len(siblings)} trajectories; give one for each")
        return [error] * len(siblings)
    pairs = zip(cast("Sequence[Any]", results), siblings, strict=True)
    return [checked(result, trajectory, method) for result, trajectory in pairs]


def checked(result: Any, trajectory: Trajectory, method: Any) -> Score | Exception:
    """The result of `method` for a trajectory as a Score, or an exception that says what is wrong with it."""
    if isinstance(result, Exception):
        return Score(0.0) if isinstance(result, PolicyError) else result
    try:
        score = result if isinstance(result, Score) else Score(result)
        parts = {name: _finite(part) for name, part in score.components.items()}
        score = Score(_finite(score.total), parts, tuple(map(_finite, score.turns)), _finite(score.paid))
    except (TypeError, ValueError, OverflowError, AttributeError):
        return misgiven(method, result, "give a finite number, or a Score of finite numbers")
    if len(score.turns) not in (0, len(trajectory.turns)):
        return misgiven(method, score.turns, f"there are {len(trajectory.turns)} turns; give one for each, or none")
    return score


def _finite(amount: Any) -> float:
    """Raises ValueError, or what `isfinite` does, unless it is a finite number."""
    if isinstance(amount, str | bytes) or not math.isfinite(amount):
        raise ValueError("not a finite number")
    return float(amount)


@dataclass
class OfRewards(Reward, ABC):
    """Base of rewards that are computed from other rewards, their parts, which are opened and closed with them."""

    default: ClassVar[Mapping[str, Any]] = {}  # the parts, with settings, where `of` is null

    # [numeric, path/to/file.py:Name], or with settings {numeric: {require_marker: false}}
    of: Annotated[Any, Parts("reward")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        of = self.default if self.of is None else self.of
        self._parts: dict[str, Reward] = {}
        for name, settings in named(of, "reward.of", "numeric: {require_marker: false}").items():
            kind = extension.find_class(__name__, name, Reward)
            part = name.rpartition(":")[2]
            if part in self._parts:
                raise ConfigError(f"reward.of: two are named {part!r}; rename one")
            self._parts[part] = built(f"reward {name}", kind, self._settings(name, settings))
        self.compares = any(part.compares for part in self.parts)
        if not self._parts:
            raise ConfigError("reward.of is empty: name the rewards that this one goes by: 'reward.of=[numeric]'")

    def _settings(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Those of the settings that belong to the part itself."""
        return settings

    @property
    def parts(self) -> Sequence[Reward]:
        return list(self._parts.values())

    def check_machine(self) -> None:
        for part in self.parts:
            part.check_machine()

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        async with AsyncExitStack() as stack:
            running = copy.copy(self)
            running._parts = {n: await stack.enter_async_context(opened(p, context)) for n, p in self._parts.items()}
            yield running

    async def part_scores(self, siblings: Sequence[Trajectory]) -> list[dict[str, Score] | Exception]:
        """For each sibling the score of every part by its name, or the exception of the first part that failed."""
        columns = await together(scores(part, siblings) for part in self.parts)
        rows: Any = [dict(zip(self._parts, row, strict=True)) for row in zip(*columns, strict=True)]
        return [next((score for score in row.values() if isinstance(score, Exception)), row) for row in rows]
