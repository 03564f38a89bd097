"""Are the calls those that were asked for?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.types import ToolCall, Trajectory

_TYPES = {"integer": int, "number": float, "boolean": bool, "array": list, "object": dict}  # all else is text
_LEFT_OUT = re.compile(r"[ ,./\-_*^]")  # of texts, before they are compared


@dataclass
class FunctionCalls(Reward):
    """1 when the last message calls just the functions in the task's `calls`, in any order, else 0: BFCL's AST match.

    `calls` is a list of {FUNCTION: {ARGUMENT: [ACCEPTED VALUES]}}, `tools` the functions: task=bfcl. An argument may be
    left out where "" is accepted. Texts are compared in lower case without spaces and ,./-_*^; a whole number does for
    one with decimals, no other type for another.
    """

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises ConfigError where the task has no calls."""
        task = trajectory.task
        wanted: Any = task.metadata.get("calls")
        if not isinstance(wanted, list) or not wanted:
            raise ConfigError(f"task {task.id} has no `calls` in its metadata; reward=function_calls is for task=bfcl")
        schemas = {tool["name"]: tool["parameters"] for tool in task.metadata["tools"]}
        message = next((turn.message for turn in reversed(trajectory.turns) if not turn.auxiliary), None)
        left = list(message.tool_calls) if message and not message.error else []
        for one in cast("list[dict[str, Any]]", wanted):
            [(name, accepted)] = one.items()
            match = next((call for call in left if call.name == name and _fits(call, accepted, schemas[name])), None)
            if match is None:
                return 0.0
            left.remove(match)
        return float(not left)


def _fits(call: ToolCall, accepted: Mapping[str, Sequence[Any]], schema: Mapping[str, Any]) -> bool:
    if not call.arguments.keys() >= set(schema.get("required", ())):
        return False
    kinds = {name: one.get("type", "string") for name, one in schema["properties"].items()}
    return _has_keys(call.arguments, accepted) and all(
        name in kinds and _accepted(value, kinds[name], accepted[name]) for name, value in call.arguments.items()
    )


def _has_keys(given: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]]) -> bool:
    """Whether all that must be given is, and nothing else."""
    return given.keys() <= accepted.keys() and all(n in given or "" in values for n, values in accepted.items())


def _accepted(value: Any, kind: str, values: Sequence[Any]) -> bool:
    """Whether an argument is one of the accepted `values`, and of the type `kind` or of theirs."""
    if kind == "number" and type(value) is int:
        value = float(value)
    kinds = {_TYPES.get(kind, str), *(type(one) for one in values if one != "")}
    return type(value) in kinds and any(_alike(value, one) for one in values)


def _alike(value: Any, one: Any) -> bool:
    """Whether a value is the accepted `one`; that of an object has a list of accepted values for each key."""
    if isinstance(value, dict) and isinstance(one, dict):
        given, accepted = cast("dict[str, Any]", value), cast("dict[str, Any]", one)
        matches = (any(_alike(inner, each) for each in accepted[name]) for name, inner in given.items())
        return _has_keys(given, accepted) and all(matches)
    if isinstance(value, list) and isinstance(one, list):
        items, others = cast("list[Any]", value), cast("list[Any]", one)
        return len(items) == len(others) and all(map(_alike, items, others))
    if isinstance(value, str) and isinstance(one, str):
        return _standard(value) == _standard(one)
    return isinstance(value, bool) is isinstance(one, bool) and value == one


def _standard(text: str) -> str:
    return _LEFT_OUT.sub("", text).lower().replace("'", '"')
