"""Numbers, times, texts and curves, for people at a terminal; what stands in a text."""

import math
import re
import shutil
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from textwrap import fill
from typing import TextIO, TypeGuard

_BARS = "▁▂▃▄▅▆▇█"
_MOST = 3000  # characters of a text that are shown


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number, as metrics are; NaN and infinity are null in a run's files."""
    most = sys.float_info.max  # an integer may be larger than any float
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def number(value: object) -> str:
    """A number for people; "" for none."""
    if not is_number(value):
        return ""
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= size < 1e9 else f"{value:.3g}" if size < 1e-3 or size >= 1e9 else f"{value:.4g}"


def clock(seconds: object) -> str:
    """A time as h:mm:ss, or m:ss below an hour; "" for none."""
    if not is_number(seconds):
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def shorten(text: str) -> str:
    """At most 3,000 characters of it, and how many are left out."""
    return text if len(text) <= _MOST else f"{text[:_MOST]} ... ({len(text) - _MOST:,} more characters)"


def boxed(text: str, most: int | None = None) -> str:
    """What the last \\boxed{} of `text` holds; "" where there is none, or none that closes within `most` characters.

    Braces behind a backslash are signs, which need no counterpart.
    """
    _, box, inside = text.rpartition("\\boxed")
    inside = inside.lstrip()[:most]
    braces = [found for found in re.finditer(r"\\.|[{}]", inside, re.DOTALL) if found[0] in "{}"]
    depths = accumulate(1 if brace[0] == "{" else -1 for brace in braces)
    end = next((brace.start() for brace, depth in zip(braces, depths, strict=True) if not depth), 0)
    return inside[1:end].strip() if box and inside.startswith("{") else ""


def head_and_tail(text: str, most: int) -> str:
    """At most about `most` characters of it, from its two ends, and between them how many are left out."""
    if len(text) <= most:
        return text
    cut = f"\n[{len(text) - most} of {len(text)} characters left out]\n"
    return text[: most // 2] + cut + text[len(text) - most // 2 :]


def printable(text: str) -> str:
    """With characters that control a terminal or turn the direction of writing spelled out."""
    if "".join(text.split("\n")).replace("\t", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def show(text: str) -> None:
    """Print for the person at the terminal."""
    print(_fitted(printable(text), sys.stdout), flush=True)


def complain(text: str) -> None:
    """Tell the person at the terminal what is wrong. The text may quote what somebody else wrote."""
    print(_fitted(f"mtgrpo: {printable(text)}", sys.stderr), file=sys.stderr)


def _fitted(text: str, out: TextIO) -> str:
    """With lines that are longer than a terminal's broken between words; paths and commands stay in one piece."""
    if not out.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))


def sparkline(values: Sequence[float], width: int) -> str:
    """`values`, finite, in at most `width` characters, each the mean of its share; "" for none."""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    shares = [values[start:end] for start, end in pairwise(edges)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else math.inf
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
