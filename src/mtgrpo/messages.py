"""Messages and tools as the dictionaries of OpenAI's chat completions: in chat templates, data sets, files and HTTP.

{"role": "assistant", "content": "...", "reasoning_content": "...",
 "tool_calls": [{"type": "function", "function": {"name": "...", "arguments": {...}}}]}
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from mtgrpo.errors import ConfigError
from mtgrpo.types import Message, Role, ToolCall, ToolSpec


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message without its empty fields; its content is always there, `error` never."""
    calls = [{"type": "function", "function": call} for call in calls_to_dicts(message)]
    optional = filled(tool_calls=calls, name=message.name, reasoning_content=message.reasoning)
    return {"role": message.role, "content": message.content, **optional}


def calls_to_dicts(message: Message) -> list[dict[str, Any]]:
    """The tool calls of a message."""
    return [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]


def filled(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def tool_to_dict(tool: ToolSpec) -> dict[str, Any]:
    """A tool, with the JSON schema of its arguments."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def spoken(message: Message) -> str:
    """Who says what, and calls which tools, for people."""
    calls = (f" {call.name}({dict(call.arguments)})" for call in message.tool_calls)
    return f"{message.role}: {message.content}{''.join(calls)}"


def message_from_fields(fields: Mapping[str, Any]) -> Message:
    """The message whose fields, by `dataclasses.asdict`, these are."""
    return Message(**dict(fields, tool_calls=tuple(ToolCall(**call) for call in fields["tool_calls"])))


def messages_from(values: Sequence[Any], where: str) -> tuple[Message, ...]:
    """The messages that mappings describe. Raises ConfigError, beginning with `where` and the message's number."""
    return tuple(message_from(value, f"{where}, message {number}") for number, value in enumerate(values, 1))


_NO_CALLS = ("function_call", "tool_call", "toolCalls", "toolcalls")  # what others call them, and mistyped
_A_CALL = '{"name": ..., "arguments": {...}}'


def message_from(value: Any, where: str) -> Message:
    """The message that a mapping with role and content describes. Raises ConfigError, beginning with `where`."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be an object with role and content, got {shown(value)}")
    fields = cast("Mapping[str, Any]", value)
    role, calls, content = (fields.get(name) for name in ("role", "tool_calls", "content"))
    if role not in get_args(Role):
        raise ConfigError(f"{where}: role must be one of {', '.join(get_args(Role))}, got {shown(role)}")
    if other := next((key for key in _NO_CALLS if fields.get(key)), ""):
        raise ConfigError(f"{where}: {other} is not read; here it is tool_calls, a list of calls: {_A_CALL}")
    if not isinstance(calls, list | None):
        raise ConfigError(f"{where}: tool_calls must be a list, got {shown(calls)}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        yaml = content is None and "content" in fields and where.startswith("task.examples")
        hint = '; in YAML # begins a comment: quote it, as content: "#### 12"' if yaml else ""
        raise ConfigError(f"{where}: content must be a string, got {shown(content)}{hint}")
    tool_calls = tuple(_call_from(call, where) for call in cast("list[Any]", calls or []))
    texts = fields.get("reasoning") or fields.get("reasoning_content"), fields.get("name")
    reasoning, name = (text if isinstance(text, str) else "" for text in texts)
    return Message(cast("Role", role), content, reasoning, tool_calls, name)


def _call_from(value: Any, where: str) -> ToolCall:
    """A call as {name, arguments} or {function: {name, arguments}}; the arguments may be JSON text."""
    try:
        function = value.get("function") or value
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments.strip() or "{}")  # OpenAI's calls without arguments have ""
        return ToolCall(str(function["name"]), dict(arguments))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        told = "a tool call has a name and arguments, which are an object or the JSON of one"
        raise ConfigError(f"{where}: {told}, got {shown(value)}") from error


def shown(value: Any) -> str:
    """A value with its type, cut where it is long, for error messages."""
    return f"{type(value).__name__} {reprlib.repr(value)}"
