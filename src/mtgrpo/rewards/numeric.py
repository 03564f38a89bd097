"""Is the final number right?"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from mtgrpo.errors import TaskError
from mtgrpo.rewards import Reward
from mtgrpo.runtime.text import boxed
from mtgrpo.types import Trajectory

_MARKER = "####"
_BOX = r"\boxed"
_MAX_NUMBER = 100  # characters of a number; anything longer is garbage, not worth the arithmetic
_MAX_STATEMENT = 1000  # characters of what states it, on either side

_CURRENCY = r"$\u00a2-\u00a5\u20a0-\u20cf"
_SIGN = r"[-+\u2010\u2011\u2013\u2212\ufe63\uff0d]"
_OPENING = rf"[\s*_`\"'(\[{{\u201c\u2018{_CURRENCY}]*+"
_DECIMAL = r"(?:[1-9]\d{0,2}(?:,\d{3})++(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)"

# LaTeX and tags in plain characters, one after the other.
_REWRITTEN = [
    (re.compile(r"</?\w+>"), " "),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"), "\u00b0"),
    (re.compile(r"\\(?:[,;: ()\[\]]|(?:quad|qquad|left|right|displaystyle)(?![A-Za-z]))"), " "),
    (re.compile(r"~(?=[A-Za-z\\])|(?<=\d)~"), " "),  # before a number it would mean about
    (re.compile(r"\\(?:text\w*|math\w+|mbox|boxed|fbox|boldsymbol)\s*(?=\{)|\\(?=[$%])"), ""),
    (re.compile(r"\\[cdt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))"), r" \1\2/\3\4 "),
]
_VULGAR = re.compile(r"[\u00bc-\u00be\u2150-\u215e\u2189]")  # 1/2 in one character
_STATED = re.compile(
    rf"(?:[A-Za-z\s*_$(){{}}\"']*+[=:])*+{_OPENING}"  # a name, as in "x =" or "Total:"
    rf"(?P<sign>{_SIGN}?){_OPENING}(?:[A-Z]{{1,3}}+(?=[{_CURRENCY}]))?+[{_CURRENCY}\s]*+"
    r"(?:(?P<whole>\d++)\s++(?=\d++\s*+/\s*+\d++(?!\.)))?+"
    rf"(?P<value>{_DECIMAL})(?:\s*+/\s*+(?P<below>{_SIGN}?)(?P<divisor>{_DECIMAL}))?"
    r"(?P<behind>.*)",
    re.DOTALL,
)

# Behind the number may stand a unit and punctuation, not what makes another number of it: digits, operators, "million".
_RUNS_ON = re.compile(r"[!^]|_[^\W_]|_\{|\*++[^\W\d_]|\s*+/(?!\s*+[^\W\d_])")
_EXPONENT = re.compile(r"(?<=[A-Za-z])(\}?)(?:\^?[23]|\^\{[23]\}|[\u00b2\u00b3])(?!\d)")  # of a unit: m^2, cm3
_SENTENCE_END = re.compile(r"[.;!?]\s")
_WORD = re.compile(r"[^\W\d_]++(?:-[^\W\d_]++)*+")
_NO_UNIT = re.compile(  # numbers and operators in words; variables, constants and magnitudes in letters
    r"(?i:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|half|halves|thirds|(?:four|fif|six|seven|eigh|nin|ten)ths"
    r"|(?:dozen|hundred|thousand|(?:m|b|tr)illion|lakh|crore)s?|(?:hundred|thousand|million)ths|mil|ml?n|bl?n|tn"
    r"|plus|minus|or|squared|cubed|factorial|pi|inf|infinity)|[xyzXYZnieEkKMBT\u03c0]"
)

# Where the last number of a text may begin: behind a word, which does not run on into digits, or a mark.
_BEFORE_LAST = re.compile(r"(?<![\\A-Za-z\d])[A-Za-z]++(?![\d_])|(?![A-Za-z])[^\W\d_]|[,;:.!?](?=\s)|=|\s(?=\()")
_AFTER_LAST = re.compile(r"[,;:.!?](?=\s)|\n")
_DASH = re.compile(rf"\s*+(?:{_SIGN}|[\u2014*\u2022])\s")  # a bullet, or between clauses


@dataclass
class Numeric(Reward):
    """1 when the number that the final message gives equals the answer exactly, else 0.

    It is looked for in the line after the last `####`, but in the last `\\boxed{}` where that gives none or no `####`
    stands. There must be one number: an integer, a decimal, a fraction or a mixed number. `$`, `%`, thousands signs,
    trailing zeros, a name before it (`x =`, `Total:`) and a unit behind it do not matter: `$1,200.00` equals `1200`,
    `1/2` equals `0.5`, `9 apples` equals `9`. Nothing is calculated or converted; what is no single number is worth 0:
    `9*9`, `9 or 8`, `9 million`, `20k`, `3 of 4`.
    """

    compares = True
    looks_for = (
        "reward=numeric reads the number behind #### or in \\boxed{}; say so in the prompt, set "
        "reward.require_marker=false to take the last number of the text, or compare texts by reward=em"
    )

    require_marker: bool = True  # false: where there is neither, the last number of the text counts

    def reward(self, trajectory: Trajectory) -> float:
        """Raises TaskError when the task's answer is not a number."""
        task = trajectory.task
        marked = stated_number(task.answer, require_marker=True)
        answer = single_number(task.answer.strip()) if marked is None else marked
        if answer is None:
            raise TaskError(
                f"task {task.id}: the answer {task.answer[:80]!r} is not a number; choose another column "
                "with task.columns.answer=NAME, or grade text with reward=em"
            )
        return float(stated_number(trajectory.final, self.require_marker) == answer)

    def answer(self, trajectory: Trajectory) -> str:
        number = stated_number(trajectory.final, self.require_marker)
        return "" if number is None else str(number)


def stated_number(text: str, require_marker: bool) -> Fraction | None:
    """The number that `text` gives as its answer, as `Numeric` finds it; None where there is none."""
    _, marker, behind = text.rpartition(_MARKER)
    line, _, below = behind.lstrip().partition("\n")
    if marker and ((number := single_number(line)) is not None or not boxed(below, 2 * _MAX_STATEMENT)):
        return number
    if _BOX in text:
        return single_number(boxed(text, 2 * _MAX_STATEMENT))
    return None if require_marker else last_number(text)


def last_number(text: str) -> Fraction | None:
    """The last number among the words of `text`, with what belongs to it."""
    digit = re.search(r"\d", text[::-1])
    if digit is None:
        return None
    last = len(text) - digit.start()
    begin = max(text.rfind("\n", 0, last) + 1, last - _MAX_STATEMENT)
    for word in _BEFORE_LAST.finditer(text, begin, last):
        begin = word.end()
    dash = _DASH.match(text, begin) if text[begin - 1 : begin] != "=" else None
    end = _AFTER_LAST.search(text, last, last + _MAX_STATEMENT)
    return single_number(text[dash.end() if dash else begin : end.start() if end else last + _MAX_STATEMENT])


def single_number(text: str) -> Fraction | None:
    """The number that the whole of `text` is, but for its name, its unit and marks; None where it is no single one."""
    if len(text) > 2 * _MAX_STATEMENT:
        return None
    for pattern, plain in _REWRITTEN:
        text = pattern.sub(plain, text)
    text = _VULGAR.sub(lambda sign: f" {unicodedata.normalize('NFKC', sign[0])}", text).replace("\u2044", "/")
    parts = _STATED.match(text)
    if parts is None or len(parts["value"] + (parts["divisor"] or "")) > _MAX_NUMBER or _alters(parts["behind"]):
        return None
    value, divisor = (Fraction((parts[name] or "1").replace(",", "")) for name in ("value", "divisor"))
    if parts["whole"]:
        if len(parts["whole"]) > _MAX_NUMBER or value >= divisor or parts["below"]:
            return None
        value += int(parts["whole"]) * divisor
    minuses = sum((parts[name] or "+") != "+" for name in ("sign", "below"))
    return (-1) ** minuses * value / divisor if divisor else None


def _alters(behind: str) -> bool:
    """Whether what stands behind a number, with no space between, makes something else of it."""
    rest = _EXPONENT.sub(r"\1", behind)
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
    return (
        _RUNS_ON.match(behind) is not None
        or behind[:1].swapcase() != behind[:1]  # a letter of a script that has capitals
        or any(sign in "\\^\u2030\u2031" or unicodedata.category(sign) == "Sm" for sign in rest)
        or any(unicodedata.numeric(sign, None) is not None for sign in rest)
        or any(map(_NO_UNIT.fullmatch, _WORD.findall(sentence)))
    )
