"""Each part of a user's own x each mistake in it: it costs that trajectory, never its siblings, the run or a hang."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mtgrpo import environments
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.rewards import Reward, Score
from mtgrpo.runtime import isolation
from mtgrpo.types import Message, Status, Task, Trajectory
from scripted import ScriptedEngine
from test_async import in_jumping_time
from test_conversation import TASK, make_runner, said

SIZE = 4  # siblings, of which number 1 meets the mistake


class OwnError(BaseException):
    """Not an Exception."""


def gives(value: Any) -> Callable[[], Any]:
    return lambda: value


def raises(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


def recurses() -> int:
    return 1 + recurses()


async def hangs() -> None:
    await asyncio.Event().wait()


async def swallows() -> None:
    """Goes on whatever is asked of it."""
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


RAISED: dict[str, Callable[[], Any]] = {
    "an error": raises(ValueError("bad")),
    "an assertion": raises(AssertionError()),
    "a key that is not there": lambda: {}["answer"],
    "an exit": lambda: sys.exit(0),
    "an exit with a text": lambda: sys.exit("bye"),
    "a cancellation": raises(asyncio.CancelledError()),
    "the end of an iteration": raises(StopIteration()),
    "the end of an asynchronous iteration": raises(StopAsyncIteration()),
    "the end of a generator": raises(GeneratorExit()),
    "an error of its own kind": raises(OwnError("mine")),
    "endless recursion": recurses,
    "no memory": raises(MemoryError()),
    "a time-out": raises(TimeoutError()),
    "a group of errors": raises(ExceptionGroup("two", [ValueError("bad"), OSError("worse")])),
    "a task that was cancelled": raises(asyncio.CancelledError("inner")),
}
GIVEN: dict[str, Callable[[], Any]] = {
    "nothing": gives(None),
    "a text": gives("0.5"),
    "a number as bytes": gives(b"1"),
    "a list": gives([1.0]),
    "a mapping": gives({"reward": 1.0}),
    "a class": gives(Reply),
    "a coroutine that nobody awaited": hangs,
}
OF_STEP: dict[str, Callable[[], Any]] = {
    "a reward that is no number": gives(Reply(done=True, reward="1")),  # pyright: ignore[reportArgumentType]
    "a reward of nothing": gives(Reply(done=True, reward=None)),  # pyright: ignore[reportArgumentType]
    "NaN": gives(Reply(done=True, reward=math.nan)),
    "infinity": gives(Reply(done=True, reward=math.inf)),
    "texts for messages": lambda: Reply(("hello",)),  # pyright: ignore[reportArgumentType]
    "a message of nothing": lambda: Reply((Message("user", None),)),  # pyright: ignore[reportArgumentType]
    "a message of a number": lambda: Reply((Message("user", 3),)),  # pyright: ignore[reportArgumentType]
    "no messages": lambda: Reply(None),  # pyright: ignore[reportArgumentType]
}
OF_START: dict[str, Callable[[], Any]] = {
    "messages alone": gives(TASK.messages),
    "texts for messages": lambda: Opening(("hello",)),  # pyright: ignore[reportArgumentType]
    "a message of nothing": lambda: Opening((Message("user", None),)),  # pyright: ignore[reportArgumentType]
    "names for tools": gives(Opening(TASK.messages, ("search",))),  # pyright: ignore[reportArgumentType]
}
OF_REWARD: dict[str, Callable[[], Any]] = {
    "NaN": gives(math.nan),
    "infinity": gives(math.inf),
    "a score of nothing": gives(Score(None)),  # pyright: ignore[reportArgumentType]
    "a score of NaN": gives(Score(math.nan)),
    "turns of NaN": gives(Score(1.0, turns=[math.nan])),
    "too many turns": gives(Score(1.0, turns=[1.0, 2.0, 3.0])),
    "turns of texts": gives(Score(1.0, turns=["1"])),  # pyright: ignore[reportArgumentType]
    "a component of nothing": gives(Score(1.0, {"length": None})),  # pyright: ignore[reportArgumentType]
    "a number that is too large": gives(10**400),
}
HANGING = {"a hang": hangs, "a hang that swallows its cancellation": swallows}
ENDED: dict[str, Callable[[], Any]] = {**RAISED, **HANGING}


@dataclass
class Mistaken(Environment):
    """One turn each; in one place the second conversation that begins meets the mistake, at every attempt."""

    place: str = "step"
    mistake: Any = None
    begun: Any = field(default_factory=itertools.count)

    async def start(self, task: Task) -> Opening:
        self.number = next(self.begun) % SIZE
        await self.meets("start")
        return self.found if self.met("start") else Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        await self.meets("step")
        return self.found if self.met("step") else Reply(done=True)

    async def stop(self) -> None:
        await self.meets("stop")

    def met(self, place: str) -> bool:
        return self.number == 1 and self.place == place

    async def meets(self, place: str) -> None:
        if self.met(place):
            self.found = self.mistake()
            if asyncio.iscoroutine(self.found):
                self.found = await self.found


CASES = [
    *(("start", name, mistake) for name, mistake in {**ENDED, **GIVEN, **OF_START}.items()),
    *(("step", name, mistake) for name, mistake in {**ENDED, **GIVEN, **OF_STEP}.items()),
    *(("stop", name, mistake) for name, mistake in ENDED.items()),
]


@pytest.mark.parametrize(("place", "name", "mistake"), CASES, ids=[f"{place}: {name}" for place, name, _ in CASES])
def test_a_mistake_of_an_environment_costs_its_trajectory(place: str, name: str, mistake: Callable[[], Any]) -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Mistaken(place=place, mistake=mistake))
    runner = replace(runner, retries=0, timeout_s=60.0)

    async def run() -> list[Trajectory]:
        return (await runner.run_group(TASK, SIZE)).trajectories

    found = in_jumping_time(run())
    assert [t.status for t in found] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert found[1].reason
    assert [t.reward for t in found] == [1.0, 0.0, 1.0, 1.0]


@dataclass
class Misjudges(Reward):
    """Meets the mistake in the conversation of sibling 1."""

    retries: int = 0
    mistake: Any = None

    def reward(self, trajectory: Trajectory) -> float:
        return self.mistake() if trajectory.sample_index == 1 else 1.0


@dataclass
class MisjudgesTogether(Misjudges):
    """The same where siblings are scored together."""

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[float]:
        return [await self.one(sibling) for sibling in siblings]

    async def one(self, sibling: Trajectory) -> Any:
        found = self.reward(sibling)
        return await found if asyncio.iscoroutine(found) else found


@pytest.mark.parametrize("mistake", [*RAISED.values(), *list(GIVEN.values())[:-1], *OF_REWARD.values()],
                         ids=[*RAISED, *list(GIVEN)[:-1], *OF_REWARD])  # fmt: skip
def test_a_mistake_of_a_reward_costs_its_trajectory(mistake: Callable[[], Any]) -> None:
    runner = replace(make_runner(ScriptedEngine(lambda key, turn: said("hello")), Mistaken(place="nowhere")),
                     reward=Misjudges(mistake=mistake))  # fmt: skip

    async def run() -> list[Trajectory]:
        return (await runner.run_group(TASK, SIZE)).trajectories

    found = in_jumping_time(run())
    assert [t.status for t in found] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert found[1].reason.startswith("RewardError: Misjudges: ")


@pytest.mark.parametrize("mistake", ENDED.values(), ids=list(ENDED))
def test_a_mistake_of_a_reward_of_siblings_costs_these(mistake: Callable[[], Any]) -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Mistaken(place="nowhere"))
    runner = replace(runner, reward=MisjudgesTogether(mistake=mistake), score_timeout_s=60.0)

    async def run() -> list[Trajectory]:
        return (await runner.run_group(TASK, SIZE)).trajectories

    assert {t.status for t in in_jumping_time(run())} == {Status.FAILED}


@pytest.mark.parametrize("given", [None, "1111", [1.0], 1.0, {}, [1.0] * 5])
def test_a_reward_of_siblings_that_gives_no_list_of_their_number_costs_these(given: Any) -> None:
    class Odd(Reward):
        async def rewards(self, siblings: Sequence[Trajectory]) -> Any:
            return given

    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Mistaken(place="nowhere"))

    async def run() -> list[Trajectory]:
        return (await replace(runner, reward=Odd()).run_group(TASK, SIZE)).trajectories

    found = in_jumping_time(run())
    assert {t.status for t in found} == {Status.FAILED}
    assert "give one for each" in found[0].reason


def test_what_swallows_its_cancellation_is_ended_within_its_grace() -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await swallows()
        finally:
            ended.append("closed")

    async def run() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError, match="late"):
            await isolation.run_isolated(stubborn, 5.0, TimeoutError("late"))
        took = loop.time() - began
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # nothing is left running
        return took

    assert in_jumping_time(run()) == pytest.approx(5.0 + isolation.GRACE_S)
    assert ended == ["closed"]


@pytest.mark.parametrize("given_up", ["late", "cancelled", "cancelled twice"])
def test_what_is_raised_by_what_was_given_up_is_nobody_s_error(given_up: str) -> None:
    """asyncio would log each as an exception that was never retrieved."""
    logged: list[dict[str, Any]] = []

    async def broken() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            if given_up == "cancelled twice":
                await asyncio.sleep(0.1)
            raise OSError("closed meanwhile")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context))
        if given_up == "late":
            with pytest.raises(TimeoutError, match="late"):
                await isolation.run_isolated(broken, 5.0, TimeoutError("late"))
        else:
            outer = asyncio.create_task(isolation.run_isolated(broken))
            await asyncio.sleep(1)
            outer.cancel()
            await asyncio.sleep(0)
            if given_up == "cancelled twice":
                outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
            await asyncio.sleep(1)
        gc.collect()
        await asyncio.sleep(0)

    in_jumping_time(run())
    assert logged == []


def test_an_interrupted_group_does_not_wait_for_what_swallows_its_cancellation() -> None:
    environment = Mistaken(place="step", mistake=swallows)
    runner = replace(make_runner(ScriptedEngine(lambda key, turn: said("hello")), environment), timeout_s=3600.0)

    async def run() -> float:
        loop = asyncio.get_running_loop()
        group = asyncio.create_task(runner.run_group(TASK, SIZE))
        await asyncio.sleep(1)
        group.cancel()
        began = loop.time()
        await asyncio.wait({group})
        assert group.cancelled()
        return loop.time() - began

    assert in_jumping_time(run()) <= 2 * environments.STOP_S + 1


def test_an_answer_that_is_far_too_long_is_cut_before_it_is_tokenised() -> None:
    @dataclass
    class Long(Environment):
        async def start(self, task: Task) -> Opening:
            return Opening(task.messages)

        async def step(self, message: Message) -> Reply:
            return Reply((Message("user", "head" + "x" * 1_000_000 + "tail"),))

    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Long(max_tool_tokens=100))

    async def run() -> list[Trajectory]:
        return (await runner.run_group(TASK, 1)).trajectories

    (found,) = in_jumping_time(run())
    content = found.turns[0].observations[0].content
    assert len(content) < 2000
    assert content.startswith("headx") and content.endswith("xtail")
    assert "[998408 of 1000008 characters left out]" in content
