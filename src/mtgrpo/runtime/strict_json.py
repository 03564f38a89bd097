"""JSON that every reader accepts, of whatever it is given."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

_DEEPEST = 50  # levels of nesting that are kept


def strict_json(value: Any, indent: int | None = None) -> bytes:
    """`value` as UTF-8 JSON that every reader accepts, floats at full precision, on one line unless `indent` is given.

    NaN and infinity become null; other types that JSON lacks become text; what is nested very deeply becomes "...".
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(value, 0), ensure_ascii=False, allow_nan=False, indent=indent)
    for newline in "\x85\u2028\u2029":  # legal in JSON text, but some readers of lines would split there
        text = text.replace(newline, f"\\u{ord(newline):04x}")
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes \udXXX, its JSON escape


def _plain(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(inner, depth + 1) for key, inner in items}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in cast("Sequence[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
