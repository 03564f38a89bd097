"""The shapes of what a run's files hold, and what of a file fits them: it may be of anybody, and of any version."""

from typing import Any, cast

from mtgrpo.runtime.text import is_number, printable

Json = dict[Any, Any]  # an object in a file, or its shape
_DEEPEST = 50  # levels of what has no shape of its own
_LARGE, _SMALL = 1e100, 1e-100  # sizes that sums, squares and shares of numbers neither exceed nor fall below

# A shape is a type, object for anything, a list of a shape, or the shapes of fields, `str` for those of other names.
_CALL: Json = {"name": str, "arguments": object}
_MESSAGE: Json = {
    **{"role": str, "content": str, "reasoning": str, "name": str, "error": str, "tool_calls": [_CALL]},
    "tokens": [int],
}
_TURN: Json = {
    **{"new_context_tokens": int, "output_tokens": int, "parent": int, "version_min": int, "version_max": int},
    **{"asked_s": float, "ended_s": float, "finish": str, "auxiliary": bool, "opens_with": [_MESSAGE]},
}
_TIMES: Json = {"queued_s": float, "began_s": float, "sample_s": float, "tool_s": float, "condense_s": float}
_TOOL_USE: Json = {"name": str, "outcome": str, "began_s": float, "seconds": float, "retries": int, "why": str}
TRAJECTORY: Json = {
    **{"task": str, "sample": int, "status": str, "reason": str, "reward": float, "answer": object},
    **{"messages": [_MESSAGE], "tools": object, "turns": [_TURN]},
    **{"components": {str: float}, "turn_rewards": [float], "outages": [str], "output": str, "counts": {str: float}},
    **{"untrained": [_MESSAGE], "group": int, "untrained_because": str, "retried": [str]},
    **{"metadata": object, "times": _TIMES, "calls": [_TOOL_USE]},
    "pushes": [{"version": int, "began_s": float, "ended_s": float}],
}
WHERE_THEY_CHANGE = ("tools", "metadata")  # in a file of trajectories left out of a line where they are as above
FINE_TUNING: Json = {
    "messages": [
        {"role": str, "content": str, "reasoning_content": str, "name": str}
        | {"tool_calls": [{"type": str, "function": _CALL}]}
    ],
    "tools": object,
}
METRICS: Json = {"stage": str, "step": int, str: float}
RESULTS: Json = {str: float}
TEXTS: Json = {str: str}
SETTINGS: Json = {str: object}


def fit(value: Any, shape: Any) -> Any:
    """What of `value` has this shape, without the rest; None where nothing has.

    Texts are printable, and numbers finite, with an integer where that is asked for.
    """
    if shape is object:
        return _plain(value, 0)
    if isinstance(shape, list) and isinstance(value, list):
        (inner,) = cast("list[Any]", shape)
        entries = [fit(entry, inner) for entry in cast("list[Any]", value)]
        return [entry for entry in entries if entry is not None or inner is float]  # whose places count
    if isinstance(shape, dict) and isinstance(value, dict):
        fields, fitting = cast("Json", shape), Json()
        for name, inner in cast("Json", value).items():
            wanted = fields.get(name, fields.get(str)) if isinstance(name, str) else None
            entry = None if wanted is None else fit(inner, wanted)
            if entry is not None or wanted in (object, float):  # what is no number is null, as a run writes it
                fitting[printable(name)] = entry
        return fitting
    if shape is str and isinstance(value, str):
        return printable(value)
    if shape is float and is_number(value) and abs(value) <= _LARGE:
        return value if abs(value) >= _SMALL else 0
    if shape is bool:
        return value if isinstance(value, bool) else None
    whole = shape is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return value if whole else None


def _plain(value: Any, depth: int) -> Any:
    """Of nested data what people can read."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {printable(str(key)): _plain(inner, depth + 1) for key, inner in cast("Json", value).items()}
    if isinstance(value, list):
        return [_plain(inner, depth + 1) for inner in cast("list[Any]", value)]
    if value is None or isinstance(value, float) or is_number(value) or isinstance(value, bool):
        return value
    return "..." if isinstance(value, int) else printable(str(value))  # of an integer that no float can be
