"""Does the code pass the task's tests?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mtgrpo.rewards import Given, Reward, Score, attempt
from mtgrpo.runtime.workers import together
from mtgrpo.tools.sandbox import Sandboxed
from mtgrpo.tools.unit_tests import last_code_block, objects_in, run_tests
from mtgrpo.types import Trajectory


@dataclass
class UnitTests(Reward, Sandboxed):
    """1 when the last fenced code block of the final message passes the task's tests in a sandbox, else 0.

    The task's metadata have `tests`, code that raises where an answer is wrong, and perhaps `setup`, code that comes
    before the answer's: task=humaneval and task=mbpp. Tests run in a process of their own, which calls the answer's
    functions and gets plain data. Where they make objects of its classes those stay with it, and may lie about
    themselves: the component `objects` is 1 there, else 0.
    """

    @property
    def works_unopened(self) -> bool:
        """It needs its sandbox only for code."""
        return True

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        return await together(attempt(partial(self._passes, trajectory), self.retries) for trajectory in siblings)

    async def _passes(self, trajectory: Trajectory) -> Score:
        objects = objects_in(trajectory.task)  # refused where there are no tests, whatever the answer
        code = last_code_block(trajectory.final)
        passed = code is not None and (await run_tests(self.sandbox, trajectory.task, code)).passed
        return Score(float(passed), {"objects": float(objects)})
