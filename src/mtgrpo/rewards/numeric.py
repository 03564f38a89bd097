"""Is the final number right?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory

_MARKER = "####"
_BOX = r"\boxed{"
_LONGEST = 100  # characters of a number; anything longer is garbage, not worth the arithmetic

# A number stands alone: not inside a longer one, a time, a power or a word, and without an exponent.
_NUMBER = re.compile(
    r"(?<![\d.,:/^])(?P<sign>[-+\u2212]?)\$?"
    r"(?P<value>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:/(?P<divisor>\d+))?"
    r"(?!\d|[.,:/^_]\d|[A-Za-z]|[\u00b2\u00b3\u00b9\u2070-\u2079])"
)
_BEFORE_NUMBER = re.compile(r"[\s$*]*")  # white space, a currency sign, the stars of bold type


@dataclass
class Numeric(Reward):
    """1 when the number that the final message gives equals the answer exactly, else 0.

    It is looked for after the last `####`, else in the last `\\boxed{}`. `$`, `%`, thousands separators and trailing
    zeros do not matter: `$1,200.00` equals `1200`, `1/2` equals `0.5`. Words may follow, but what runs on into letters
    (`20of20`, `20k`) is no number.
    """

    require_marker: bool = True  # false: where there is neither, the last number of the text counts

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises ConfigError when the task's answer is not a number."""
        task = trajectory.task
        answer = stated_number(task.answer, require_marker=True)
        if answer is None:
            answer = _leading_number(task.answer)
        if answer is None:
            raise ConfigError(
                f"task {task.id}: the answer {task.answer[:80]!r} is not a number; choose another column "
                "with task.columns.answer=NAME, or grade text with reward=em"
            )
        return float(stated_number(trajectory.final, self.require_marker) == answer)

    def answer(self, trajectory: Trajectory) -> str:
        """The number of the final message."""
        number = stated_number(trajectory.final, self.require_marker)
        return "" if number is None else str(number)


def stated_number(text: str, require_marker: bool) -> Fraction | None:
    """The number that `text` gives as its answer, as `Numeric` finds it; None where there is none."""
    if _MARKER in text:
        return _leading_number(text.rpartition(_MARKER)[2])
    if _BOX in text:
        return _leading_number(_box_content(text.rpartition(_BOX)[2]))
    if require_marker:
        return None
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _leading_number(text: str) -> Fraction | None:
    start = _BEFORE_NUMBER.match(text)
    return _value(_NUMBER.match(text[start.end() if start else 0 :]))


def _box_content(text: str) -> str:
    """What stands before the closing brace, without LaTeX's spacing and escapes, fractions as a/b."""
    text = re.sub(r"\\[$%!,;]", "", text[: 4 * _LONGEST].replace("%", "").replace("{,}", ","))
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    return text.partition("}")[0]


def _value(match: re.Match[str] | None) -> Fraction | None:
    if match is None or len(match.group()) > _LONGEST:
        return None
    divisor = Fraction(match["divisor"] or 1)
    if divisor == 0:
        return None
    value = Fraction(match["value"].replace(",", "")) / divisor
    return value if match["sign"] in ("", "+") else -value
