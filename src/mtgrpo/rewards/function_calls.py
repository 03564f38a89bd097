"""Are the calls those that were asked for?"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtgrpo.rewards import Reward, required
from mtgrpo.types import ToolCall, Trajectory

_TYPES = {"integer": int, "number": float, "boolean": bool, "array": list, "object": dict}  # all else is text
_LEFT_OUT = re.compile(r"[ ,./\-_*^]")  # of texts, before they are compared


@dataclass
class FunctionCalls(Reward):
    """1 when the last message calls just the functions in the task's `calls`, in any order, else 0: BFCL's AST match.

    `calls` is a list of {FUNCTION: {ARGUMENT: [ACCEPTED VALUES]}}, `tools` the functions: task=bfcl. An argument may be
    left out where "" is accepted. Texts are compared in lower case without spaces and ,./-_*^. No type does for
    another, nor within an array, but a whole number as an argument does for one with decimals.
    """

    def reward(self, trajectory: Trajectory) -> float:
        """Raises TaskError where the task has no calls."""
        task = trajectory.task
        wanted: list[dict[str, Any]] = required(task, "calls", "function_calls", "bfcl", list)
        schemas = {tool["name"]: tool["parameters"] for tool in task.metadata["tools"]}
        message = next((turn.message for turn in reversed(trajectory.turns) if not turn.auxiliary), None)
        calls = list(message.tool_calls) if message and not message.error else []
        for wanted_call in wanted:
            [(name, accepted)] = wanted_call.items()
            fits = (call.name == name and _fits(call, accepted, schemas[name]) for call in calls)
            if (position := next((n for n, fit in enumerate(fits) if fit), None)) is None:
                return 0.0
            del calls[position]
        return float(not calls)


def _fits(call: ToolCall, accepted: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> bool:
    types: Mapping[str, Any] = schema["properties"]
    has_keys = call.arguments.keys() >= set(schema.get("required", ())) and _has_keys(call.arguments, accepted)
    return has_keys and all(
        name in types and _accepted(value, types[name], accepted[name]) for name, value in call.arguments.items()
    )


def _has_keys(values: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> bool:
    """Whether there is all that must be, and nothing else."""
    return values.keys() <= accepted.keys() and all(name in values or "" in ok for name, ok in accepted.items())


def _accepted(value: Any, schema: Mapping[str, Any], values: Sequence[Any]) -> bool:
    """Whether an argument is one of the accepted `values`, and of its schema's type or of theirs."""
    kinds = _kinds(schema)
    kind = type(value) if type(value) in kinds else kinds[0]
    if kind is float and type(value) is int and abs(value) < 2**1023:  # beyond that it is no number with decimals
        value = float(value)
    theirs = next((type(option) for option in values if option != ""), kind)
    if type(value) not in (kind, theirs):
        return value is None and None in values
    if theirs is not kind:  # such as a variable in the place of a number
        return value in values
    if isinstance(value, list) and "items" in schema:
        types, inner = {*map(type, value)}, _kinds(schema["items"])
        lists = [option for option in values if isinstance(option, list)]
        values = [option for option in lists if types <= {*inner, *map(type, option[:1])}]
    return any(_alike(value, option) for option in values)


def _kinds(schema: Mapping[str, Any]) -> list[type]:
    """The types of a schema."""
    named = schema.get("type") or ""
    listed: list[Any] = named if isinstance(named, list) else [named]
    return [_TYPES.get(name, str) for name in listed if name != "null"] or [str]


def _alike(value: Any, option: Any) -> bool:
    """Whether a value is the accepted `option`; that of an object has a list of accepted values for each key."""
    if isinstance(value, dict) and isinstance(option, dict):
        matches = (any(_alike(field, each) for each in option[name]) for name, field in value.items())
        return _has_keys(value, option) and all(matches)
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(map(_alike, value, option))
    if isinstance(value, str) and isinstance(option, str):
        return _standard(value) == _standard(option)
    return isinstance(value, bool) is isinstance(option, bool) and value == option


def _standard(text: str) -> str:
    return _LEFT_OUT.sub("", text).lower().replace("'", '"')
