"""What goes wrong in a part stays with that part: Ctrl-C is heard, siblings go on, nothing hangs or is left running."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from heavy_rewards import Elsewhere, Hangs, Leaves, LeavesItsProcess, Niceness, Poisoned
from mtgrpo import environments
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.code_repair import CodeRepair
from mtgrpo.environments.function_calls import FunctionCalls
from mtgrpo.environments.guess_number import GuessNumber
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.user_simulator import UserSimulator
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Reward, Score, opened, scores
from mtgrpo.rewards.composed import Composed
from mtgrpo.rewards.ground_truth import GroundTruth
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.runtime import workers
from mtgrpo.stages.evaluate import evaluate
from mtgrpo.stages.metrics import _components
from mtgrpo.tools.schema import ArgumentCheck, ToolError
from mtgrpo.types import Finish, Message, Status, Task, ToolSpec, Trajectory, Turn
from scripted import ScriptedEngine
from test_conversation import TASK, make_runner, said


@dataclass
class BadStop(Environment):
    """Its conversations wait, and so do their ends, which then fail."""

    waits_in: str = "step"

    async def start(self, task: Task) -> Opening:
        self.reached = asyncio.Event()
        reached.append(self.reached)
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        if self.waits_in == "step":
            self.reached.set()
            await asyncio.Event().wait()
        return Reply(done=True)

    async def stop(self) -> None:
        if self.waits_in == "stop":
            self.reached.set()
            await asyncio.sleep(0.05)
        raise OSError("the server is away")


reached: list[asyncio.Event] = []


@pytest.mark.parametrize("waits_in", ["step", "stop"])
async def test_a_stop_that_raises_does_not_swallow_a_cancellation(waits_in: str) -> None:
    reached.clear()
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), BadStop(waits_in=waits_in), retries=1)
    running = asyncio.ensure_future(runner.run_one(TASK, 0))
    while not reached:
        await asyncio.sleep(0)
    await reached[0].wait()
    running.cancel()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert len(reached) == 1  # and the conversation is not run again


# --- rewards


def told(text: str) -> Trajectory:
    return Trajectory(TASK, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


async def test_a_trajectory_that_ends_its_process_fails_alone(tmp_path: Path) -> None:
    siblings = [told("poison"), told("b"), told("c"), told("d")]
    async with opened(Poisoned(retries=0), RunContext(tmp_path, print, os.environ)) as reward:
        first, *rest = await scores(reward, siblings)
        assert rest == [Score(1.0)] * 3
        assert isinstance(first, BrokenProcessPool)
        assert await scores(reward, [told("e")]) == [Score(1.0)]


async def test_a_task_that_a_reward_cannot_grade_fails_alone() -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("#### 4")), SingleTurn())
    runner = replace(runner, reward=Numeric())
    good, bad = [await runner.run_group(replace(TASK, answer=answer), 2) for answer in ("4", "about 4")]
    assert [trajectory.reward for trajectory in good.trajectories] == [1.0, 1.0]
    assert {trajectory.status for trajectory in bad.trajectories} == {Status.FAILED}
    assert "the answer 'about 4' is not a number" in bad.trajectories[0].reason


@pytest.mark.parametrize("kind", [CodeRepair, FunctionCalls, GuessNumber, UserSimulator])
async def test_a_task_that_an_environment_cannot_begin_fails_alone(kind: type[Environment]) -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("#### 4")), kind())
    (bad,) = (await runner.run_group(TASK, 1)).trajectories
    assert bad.status is Status.FAILED
    assert bad.reason.startswith("TaskError: ")
    assert TASK.id in bad.reason


@pytest.mark.parametrize("kind", [Leaves, LeavesItsProcess])
async def test_a_reward_cannot_end_the_run(kind: type[Reward], tmp_path: Path) -> None:
    async with opened(kind(), RunContext(tmp_path, print, os.environ)) as reward:
        left, cancelled, good = await scores(reward, [told("exit"), told("cancel"), told("a")])
    assert (type(left), str(left)) == (RuntimeError, "SystemExit: 3")
    assert (type(cancelled), str(cancelled)) == (RuntimeError, "CancelledError")
    assert good == Score(1.0)


# --- what is underway when something fails


@dataclass
class Strict(Environment):
    """Refuses the task "bad"; the others go on until they are cancelled."""

    name = ""

    async def start(self, task: Task) -> Opening:
        if task.id == "bad":
            await asyncio.sleep(0.01)
            raise ConfigError("a bad task")
        self.name = task.id
        underway.add(task.id)
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        await asyncio.sleep(10)
        return Reply(done=True)

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        underway.discard(self.name)


underway: set[str] = set()


async def test_an_evaluation_that_fails_leaves_nothing_running() -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Strict())
    with pytest.raises(ConfigError, match="a bad task"):
        await evaluate(runner, [replace(TASK, id="good"), replace(TASK, id="bad")], 1)
    assert not underway


async def test_a_part_that_fails_leaves_no_other_part_running() -> None:
    class Refuses(Reward):
        async def rewards(self, siblings: object) -> list[float]:
            await asyncio.sleep(0)
            raise ConfigError("a bad answer")

    class Asks(Reward):
        async def rewards(self, siblings: object) -> list[float]:
            underway.add("good")
            try:
                await asyncio.sleep(10)
            finally:
                underway.discard("good")
            return []

    composed = Composed(of=["numeric"])
    composed._parts = {"refuses": Refuses(), "asks": Asks()}
    with pytest.raises(ConfigError, match="a bad answer"):
        await composed.rewards([told("a")])
    assert not underway


def test_components_may_differ_from_trajectory_to_trajectory() -> None:
    made_of = [{"a": 1.0, "b": 2.0}, {}, {"a": 0.0}, {"c": 5.0}]
    found = _components([Trajectory(TASK, components=components) for components in made_of])
    assert found == {"reward/a/mean": 0.5, "reward/b/mean": 2.0, "reward/c/mean": 5.0}


# --- tools


DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("of_a", "given", "message"),
    [
        (False, 1, "any does not take 1"),
        ({"multipleOf": 0.01}, float("inf"), "a number is too large"),
        ({"$ref": "#/$defs/list"}, DEEP, "the arguments are nested too deeply"),
    ],
)
def test_arguments_that_cannot_be_checked_are_the_mistake_of_the_model(of_a: Any, given: Any, message: str) -> None:
    lists = {"type": "array", "items": {"$ref": "#/$defs/list"}}
    check = ArgumentCheck(ToolSpec("any", "Any.", {"properties": {"a": of_a}, "$defs": {"list": lists}}), closed=False)
    with pytest.raises(ToolError, match=message):
        check({"a": given})


def test_a_schema_that_refers_to_nothing_is_refused() -> None:
    for reference in ("#/$defs/nowhere", "https://example.org/schema"):
        spec = ToolSpec("odd", "Odd.", {"properties": {"a": {"items": {"$ref": reference}}}})
        with pytest.raises(ConfigError, match=re.escape(f"nothing at $ref '{reference}'")):
            ArgumentCheck(spec, closed=False)
    enum = {"properties": {"$ref": {"enum": [{"$ref": "#/no/reference"}]}}}
    ArgumentCheck(ToolSpec("even", "Even.", enum), closed=False)


async def test_payments_count_once_with_answers_of_a_file_too() -> None:
    trajectory = told("a")
    trajectory.turns[0].paid = 2.0
    assert await scores(GroundTruth(of=["environment"]), [trajectory]) == [Score(2.0, {"environment": 2.0}, paid=2.0)]


async def test_parts_of_several_rewards_keep_their_components() -> None:
    class Made(Reward):
        def reward(self, trajectory: Trajectory) -> Score:
            return Score(1.0, {"length": 0.5})

    composed = Composed(of=["numeric"])
    composed._parts = {"made": Made()}
    assert await scores(composed, [told("a")]) == [Score(1.0, {"made": 1.0, "made/length": 0.5})]


def test_a_success_of_one_of_several_rewards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward numeric: success_at=0\.5 has no effect"):
        Composed(of={"numeric": {"success_at": 0.5}})


async def test_a_reward_that_takes_long_runs_elsewhere_though_it_opens_something(tmp_path: Path) -> None:
    composed = Composed(of=["numeric"])
    composed._parts = {"elsewhere": Elsewhere()}
    for reward in (Elsewhere(), composed):
        async with opened(reward, RunContext(tmp_path, print, os.environ)) as running:
            (found,) = await scores(running, [told("a")])
        assert isinstance(found, Score)
        assert found.total != os.getpid()
        assert 1 in found.components.values()


# --- what hangs


async def test_scoring_that_hangs_fails(tmp_path: Path) -> None:
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Leads())
    async with opened(Hangs(), RunContext(tmp_path, print, os.environ)) as reward:
        quick = replace(runner, reward=reward, score_timeout_s=1.0)
        (failed,) = (await quick.run_group(replace(TASK, id="bad"), 1)).trajectories
        assert failed.status is Status.FAILED
        assert failed.reason.endswith("TimeoutError: it took longer than rollout.score_timeout_s=1.0")
        found = await replace(quick, score_timeout_s=0.0).run_group(TASK, 2)
        assert [t.reward for t in found.trajectories] == [1.0, 1.0]


GIVEN_UP = """
import asyncio, os, time
from pathlib import Path
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Reward, opened, scores
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

class Waits(Reward):
    cpu_heavy = True

    def reward(self, trajectory):
        time.sleep(float(trajectory.task.answer))
        return 1.0

def told(answer):
    return Trajectory(Task("one", (), answer), turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", ""))])

async def main():
    async with opened(Waits(), RunContext(Path("."), print, os.environ)) as reward:
        await scores(reward, [told("0")])  # the processes have begun
        many = [asyncio.create_task(scores(reward, [told("1000")])) for _ in range(20)]
        await asyncio.sleep(0.1)
        for one in many:
            one.cancel()
        await asyncio.gather(*many, return_exceptions=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_scoring_that_is_given_up_says_nothing(tmp_path: Path) -> None:
    """Neither the thread of the processes nor the event loop has an error that nobody asked for."""
    (tmp_path / "given_up.py").write_text(GIVEN_UP)
    done = subprocess.run([sys.executable, tmp_path / "given_up.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_what_takes_long_gives_way_to_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "NICE", 3)
    async with opened(Niceness(), RunContext(tmp_path, print, os.environ)) as reward:
        assert await scores(reward, [told("hello")]) == [Score(min(os.nice(0) + 3.0, 19.0))]  # the most there is


@dataclass
class Leads(Environment):
    """One turn; its end may hang."""

    hangs: bool = False

    async def start(self, task: Task) -> Opening:
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        return Reply(done=True)

    async def stop(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()


async def test_a_stop_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "STOP_S", 0.05)
    runner = make_runner(ScriptedEngine(lambda key, turn: said("hello")), Leads(hangs=True), retries=0)
    found = await asyncio.wait_for(runner.run_one(TASK, 0), 5)
    assert found.status is Status.FAILED
    assert found.reason.startswith("TimeoutError")
