"""Is the mathematical expression right, however it is written?"""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import TaskError
from mtgrpo.rewards import Reward
from mtgrpo.rewards.numeric import last_number, single_number
from mtgrpo.runtime.isolation import DEATHS, run_forked
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.text import boxed
from mtgrpo.types import Trajectory

MAX_BYTES = 4 * 2**30  # for a number with too many digits
_ODD = re.compile(r"(?<=\d)(?:\\,(?=\d{3}(?!\d))|\.(?=\s*[}$]))")  # a thin space in 1\,200, a point in 72.
# What the library reads in a box alone: of one line a tuple, interval or command of LaTeX, with letters but no words.
_FORMULA = re.compile(
    r"(?=[(\[].*,|\\[a-z])(?:\\text\{[^{}]*\}|\\(?!boxed)[A-Za-z]*+|[A-Za-z](?![A-Za-z])|[ -#&-@\[\]^_{-~])++"
)
_MARKS = re.compile(r"</?[A-Za-z]\w*>|`|~(?=[A-Za-z\\])|(?<=\d)~")  # of tags, code and LaTeX's spaces
_PERCENT = re.compile(r"\\?%")
_DOLLARS = re.compile(r"\$([^$]+)\$")
_RIGHT, _WRONG, _UNREADABLE = 2, 3, 4


@dataclass
class MathVerify(Reward, timeout_s="> 0"):
    """1 when the final message's answer equals the task's answer as mathematics, else 0: math-verify compares them.

    It is looked for after the last `####`, in its line where that has a digit, else in the whole message: what the last
    \\boxed{} holds, else a formula between dollars, or a tuple or LaTeX alone in the line, else the last number. Equal
    are 1/2, \\frac{1}{2} and 0.5, or x = 5 and 5; 60\\% is 60, and 0.6 too; numbers with decimals are compared to six
    digits. It may take long to simplify an expression: that is done in a process of its own, which is stopped at the
    limit.
    """

    compares = cpu_heavy = True

    timeout_s: float = 5.0  # processor time for one message; one that takes longer is worth 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_package("math_verify", "reward=math_verify")

    def answer(self, trajectory: Trajectory) -> str:
        text = _stated(trajectory.final)
        formula = boxed(text) or (_DOLLARS.findall(text) or [""])[-1]
        number = single_number(formula) if formula else last_number(text)
        return "".join((formula or text).split()) if number is None else str(number)

    def reward(self, trajectory: Trajectory) -> float:
        """Raises TaskError when the task's answer is no mathematics."""
        task, text, library = trajectory.task, _stated(trajectory.final), _library()
        verdict = run_forked(lambda: _verdict(library, task.answer, text), self.timeout_s, MAX_BYTES)
        if verdict == _UNREADABLE:
            raise TaskError(
                f"task {task.id}: the answer {task.answer[:80]!r} is neither a number nor a formula; choose another "
                "column with task.columns.answer=NAME, or compare text with reward=em"
            )
        if verdict not in (_RIGHT, _WRONG, *DEATHS):
            raise RuntimeError(f"the process that compares expressions ended with code {verdict}")
        return float(verdict == _RIGHT)


def _stated(text: str) -> str:
    """What states the answer: from the last box on, with numbers as the library reads them."""
    _, marker, behind = text.rpartition("####")
    line = behind.strip().partition("\n")[0].strip("*` ")
    if marker and _FORMULA.fullmatch(line):
        text = f"\\boxed{{{line}}}"
    elif marker and boxed(behind):
        text = behind
    elif marker and re.search(r"\d", line):
        number = None if re.search("[.%]", line) else single_number(line)
        text = line if number is None else f"\\boxed{{{number}}}"
    elif marker:  # which may be that of a heading, with the answer below
        text = text if line and boxed(text) else behind
    return _ODD.sub("", _MARKS.sub(" ", text[max(0, text.rfind("\\boxed")) :])).replace("\u2212", "-")


@functools.cache
def _library() -> Any:
    """math-verify, with all that it imports when it is first used: that is no part of the limit."""
    import math_verify  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it sets no limits of its own
    _verdict(math_verify, "1", "1")
    return math_verify


def _verdict(library: Any, answer: str, text: str) -> int:
    """What `_compared` says, with percent as a hundredth and, where that is not right, as a unit."""
    verdict = _compared(library, _PERCENT.sub("\\\\%", answer), text)
    if verdict == _RIGHT or "%" not in answer + text:
        return verdict
    return min(verdict, _compared(library, _PERCENT.sub("", answer), _PERCENT.sub("", text)))


def _compared(library: Any, answer: str, text: str) -> int:
    try:
        # Where a time limit is given, math-verify would use a signal that cannot stop work inside one operation.
        marked = answer if "$" in answer.replace("\\$", "") or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        gold = library.parse(marked, parsing_timeout=None)
        if not gold:
            return _UNREADABLE
        given = library.parse(text, parsing_timeout=None)
        return _RIGHT if library.verify(gold, given, timeout_seconds=None) else _WRONG
    except Exception:  # sympy raises whatever it likes at expressions that make no sense, or are too large
        return _WRONG
