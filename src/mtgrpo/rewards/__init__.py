"""What a trajectory, and each of its turns, is worth. One file = one reward: a dataclass with one method."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, cast

from mtgrpo import extension
from mtgrpo.errors import ConfigError, require
from mtgrpo.extension import misgiven
from mtgrpo.part import Part, RunContext, built, named
from mtgrpo.together import by_itself, together
from mtgrpo.types import Trajectory
from mtgrpo.workers import Workers, open_workers

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """What one trajectory is worth. A float stands for a Score of that total."""

    total: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])  # what it is made of: logged by name
    turns: Sequence[float] = ()  # of each turn, beside the total and what the environment paid; () = not judged
    paid: float = 0.0  # the part of the total that the environment has paid turn by turn


Given: TypeAlias = float | Score | Exception  # an exception: this trajectory could not be scored


@dataclass
class Reward(Part, ABC):
    """Base of all rewards. Write `reward`, or `rewards` where siblings are scored together or something is awaited."""

    cpu_heavy = False  # a picklable copy's `reward` runs in another process, so that nothing else waits for it
    judges_turns = False  # whether its scores have turns, which advantage=turn asks for
    _workers = cast("Workers | None", None)

    success_at: float = 1.0  # a trajectory whose reward reaches this counts as a success in evaluations
    retries: int = 1  # further attempts where it raises; then the trajectory counts as failed, not as worth 0

    def __post_init__(self) -> None:
        require(self, retries=">= 0")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.rewards is not Reward.rewards and cls.reward is Reward.reward:
            cls.reward = _only_together  # no longer abstract

    @abstractmethod
    def reward(self, trajectory: Trajectory) -> float | Score:
        """The worth of a finished or truncated trajectory. Pure; never called for failed ones."""

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        """The worth of each of the siblings of one task that did not fail, in their order; at least one.

        For rewards that depend on the others, are cheaper to find together, or wait for something. By default each by
        itself. An exception in the place of a score fails that trajectory alone.
        """
        if self._workers is None:
            return [await tried(lambda one=one: self.reward(one), self.retries) for one in siblings]
        run, settings = self._workers.run, copy.copy(self)
        settings._workers = None
        work = settings.reward
        return await together(tried(lambda one=one: run(work, one), self.retries) for one in siblings)

    def answer(self, trajectory: Trajectory) -> str:
        """What it answered, spelled so that equal answers are the same text: for majority votes; "" = nothing."""
        return trajectory.final.strip()

    def note(self, divide_by_std: bool) -> str:
        """What the user should know before training begins; "" = nothing.

        divide_by_std: whether advantages are divided by the deviation of the siblings' rewards.
        """
        return ""


@asynccontextmanager
async def opened(reward: Reward, context: RunContext) -> AsyncGenerator[Reward]:
    """The running reward, with its processes where it is `cpu_heavy`."""
    async with reward.open(context) as running:
        if not running.cpu_heavy:
            yield running
            return
        running = copy.copy(running)
        with open_workers() as running._workers:  # pyright: ignore[reportPrivateUsage]
            yield running


def _only_together(self: Reward, trajectory: Trajectory) -> float:
    raise NotImplementedError(f"{type(self).__name__} scores siblings together")


async def tried(work: Callable[[], T | Awaitable[T]], retries: int) -> T | Exception:
    """What `work` gives, or at last raises (see `by_itself`). ConfigError is the user's to mend, and comes through."""
    while True:
        try:
            return await by_itself(work)
        except ConfigError:
            raise
        except Exception as error:
            if not retries:
                return error
        retries -= 1


async def scores(reward: Reward, siblings: Sequence[Trajectory]) -> list[Score | Exception]:
    """What `reward` gives each of the siblings, tried again where it raises; an exception where that did not help.

    So too where it gives what is no finite number, not one for each trajectory or not one for each turn.
    """
    if not siblings:
        return []
    method = reward.reward if type(reward).rewards is Reward.rewards else reward.rewards
    given: Any = await tried(lambda: reward.rewards(siblings), reward.retries)
    if isinstance(given, Exception):
        return [given] * len(siblings)
    if not isinstance(given, Sequence) or isinstance(given, str) or len(cast("Sequence[Any]", given)) != len(siblings):
        return [misgiven(method, given, f"it is for {len(siblings)} trajectories; give one for each")] * len(siblings)
    listed = cast("Sequence[Any]", given)
    return [_checked(one, trajectory, method) for one, trajectory in zip(listed, siblings, strict=True)]


def _checked(given: Any, trajectory: Trajectory, method: Any) -> Score | Exception:
    """What `method` gave for a trajectory as a Score, or what is wrong with it."""
    if isinstance(given, Exception):
        return given
    try:
        score = given if isinstance(given, Score) else Score(given)
        parts = {name: _finite(part) for name, part in score.components.items()}
        score = Score(_finite(score.total), parts, tuple(map(_finite, score.turns)), _finite(score.paid))
    except (TypeError, ValueError, OverflowError, AttributeError):
        return misgiven(method, given, "give a finite number, or a Score of finite numbers")
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
    """Base of rewards that go by other rewards, which are opened and closed with it."""

    default: ClassVar[Mapping[str, Any]] = {}  # the others, with settings, where `of` is null

    of: Any = None  # [numeric, path/to/file.py:Name], or with settings {numeric: {require_marker: false}}

    def __post_init__(self) -> None:
        super().__post_init__()
        of = self.default if self.of is None else self.of
        self._parts: dict[str, Reward] = {}
        for name, settings in named(of, "reward.of", "numeric: {require_marker: false}").items():
            kind = extension.find_class(__name__, name, Reward)
            self._parts[name.rpartition(":")[2]] = built(f"reward {name}", kind, self._settings(name, settings))
        if not self._parts:
            raise ConfigError("reward.of is empty: name the rewards that this one goes by, such as reward.of=[numeric]")

    def _settings(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Those of the given settings that are the other reward's own."""
        return given

    @property
    def parts(self) -> list[Reward]:
        """The others."""
        return list(self._parts.values())

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the others open."""
        async with AsyncExitStack() as stack:
            running = copy.copy(self)
            running._parts = {n: await stack.enter_async_context(opened(p, context)) for n, p in self._parts.items()}
            yield running

    def answer(self, trajectory: Trajectory) -> str:
        """As the first of the others has it."""
        return next(iter(self._parts.values())).answer(trajectory)

    def note(self, divide_by_std: bool) -> str:
        """What each of the others has to say."""
        return "; ".join(text for part in self._parts.values() if (text := part.note(divide_by_std)))

    async def part_scores(self, siblings: Sequence[Trajectory]) -> list[dict[str, Score] | Exception]:
        """What each of the others gives each sibling, by name; an exception where one of them could not."""
        found = await together(scores(part, siblings) for part in self._parts.values())
        return [_by_name(list(self._parts), row) for row in zip(*found, strict=True)]


def _by_name(names: Sequence[str], row: Sequence[Score | Exception]) -> dict[str, Score] | Exception:
    found: dict[str, Score] = {}
    for name, score in zip(names, row, strict=True):
        if isinstance(score, Exception):
            return score
        found[name] = score
    return found
