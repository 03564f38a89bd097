"""Wrong programs that try to earn the reward of the tests of a task, in real sandboxes: none does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from forgeries import FORGERIES, METHOD, RIGHT, TESTS

from mtgrpo.parts import RunContext
from mtgrpo.rewards import Score, scores
from mtgrpo.rewards.unit_tests import UnitTests
from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

pytestmark = pytest.mark.real


@pytest.fixture
async def reward(tmp_path: Path) -> AsyncGenerator[UnitTests]:
    async with UnitTests(sandbox=Sandbox(timeout_s=2, memory_mb=256)).open(RunContext(tmp_path, print, {})) as running:
        yield running


async def earned(reward: UnitTests, code: str, kind: str) -> Score | Exception:
    message = Message("assistant", f"```python\n{code}{METHOD}\n```")
    task = Task("task/1", (), metadata={"tests": TESTS[kind]})
    [score] = await scores(reward, [Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, message)])])
    return score


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forgery_earns_nothing_and_is_no_failure(name: str, reward: UnitTests) -> None:
    found = await asyncio.gather(*(earned(reward, FORGERIES[name], kind) for kind in TESTS))
    assert found == [Score(0, {"objects": float(kind == "class")}) for kind in TESTS]


@pytest.mark.parametrize("kind", TESTS)
async def test_the_tests_can_be_passed(kind: str, reward: UnitTests) -> None:
    assert await earned(reward, RIGHT, kind) == Score(1, {"objects": float(kind == "class")})


def test_there_are_enough_of_them() -> None:
    assert len(FORGERIES) >= 48
