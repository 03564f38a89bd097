"""Is the mathematical expression right, however it is written?"""

from __future__ import annotations

import functools
import logging
import signal
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import ConfigError, refuse_without_package, require
from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory
from mtgrpo.workers import OUT_OF_MEMORY, exit_code

_MOST_MEMORY = 4 * 2**30  # bytes, for a number with too many digits
_RIGHT, _WRONG, _UNREADABLE = 2, 3, 4
# Of the limits, and of what a message had the library compute.
_DEATHS = (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)


@dataclass
class MathVerify(Reward):
    """1 when the final message's answer equals the task's answer as mathematics, else 0: math-verify compares them.

    It is looked for after the last `####`, else in the whole message: what the last \\boxed{} holds, else a formula
    between dollars, else the last number. Equal are 1/2, \\frac{1}{2} and 0.5, or x = 5 and 5; numbers with decimals
    are compared to six digits. It may take long to simplify an expression, so that is done in a process of its own,
    which is stopped at the limit.
    """

    cpu_heavy = True

    timeout_s: float = 5.0  # processor time for one message; one that takes longer is worth 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, timeout_s="> 0")
        refuse_without_package("math_verify", "reward=math_verify", "math")

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Waits at most `timeout_s`. Raises ConfigError when the task's answer is no mathematics."""
        task = trajectory.task
        text, library = trajectory.final.rpartition("####")[2], _library()
        found = exit_code(lambda: _verdict(library, task.answer, text), self.timeout_s, _MOST_MEMORY)
        if found == _UNREADABLE:
            raise ConfigError(
                f"task {task.id}: the answer {task.answer[:80]!r} is neither a number nor a formula; choose another "
                "column with task.columns.answer=NAME, or compare text with reward=em"
            )
        if found not in (_RIGHT, _WRONG, *_DEATHS):
            raise RuntimeError(f"the process that compares expressions ended with code {found}")
        return float(found == _RIGHT)


@functools.cache
def _library() -> Any:
    """math-verify, with all that it imports when it is first used: that is no part of the limit."""
    import math_verify  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it sets no limits of its own
    _verdict(math_verify, "1", "1")
    return math_verify


def _verdict(library: Any, answer: str, text: str) -> int:
    try:
        # Where a time limit is given, math-verify would use a signal that cannot stop work inside one operation.
        marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        gold = library.parse(marked, parsing_timeout=None)
        if not gold:
            return _UNREADABLE
        given = library.parse(text, parsing_timeout=None)
        return _RIGHT if library.verify(gold, given, timeout_seconds=None) else _WRONG
    except Exception:  # sympy raises whatever it likes at expressions that make no sense, or are too large
        return _WRONG
