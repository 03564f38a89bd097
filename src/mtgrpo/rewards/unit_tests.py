"""Does the code pass the task's tests?"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from mtgrpo.part import RunContext
from mtgrpo.rewards import Given, Reward, tried
from mtgrpo.together import together
from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.tools.unit_tests import last_code_block, run_tests, tests_of
from mtgrpo.types import Trajectory


@dataclass
class UnitTests(Reward):
    """1 when the last fenced code block of the final message passes the task's tests in a sandbox, else 0.

    The task's metadata have `tests`, code that raises where an answer is wrong, and perhaps `setup`, code that comes
    before the answer's: task=humaneval and task=mbpp. Tests run after the answer's code, in the same process: leaving
    early does not help, but an object that says it equals everything passes.
    """

    sandbox: Sandbox = field(default_factory=Sandbox)

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With a sandbox that was tried. Raises ConfigError where it does not work."""
        running = copy.copy(self)
        running.sandbox = await self.sandbox.opened()
        yield running

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        """1.0 or 0.0 for each. Raises ConfigError where the task has no tests."""
        return await together(tried(lambda one=one: self._passes(one), self.retries) for one in siblings)

    async def _passes(self, trajectory: Trajectory) -> float:
        tests_of(trajectory.task)  # refused where there are none, whatever the answer
        code = last_code_block(trajectory.final)
        if code is None:
            return 0.0
        return float((await run_tests(self.sandbox, trajectory.task, code)).passed)
