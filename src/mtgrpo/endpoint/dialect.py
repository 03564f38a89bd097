"""A dialect: how requests are read, and replies and errors written. One file = one dialect."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from mtgrpo.endpoint import Kind, RefusedError, Reply, Request, Said
from mtgrpo.types import Message, ToolCall, ToolSpec

Body = Mapping[str, Any]
STATUS: Mapping[Kind, int] = {
    "invalid": 400,
    "overflow": 400,
    "key": 401,
    "missing": 404,
    "closed": 409,
    "large": 413,
    "broken": 503,
}


class Dialect(ABC):
    """Pure functions between JSON and the nouns of the endpoint."""

    reply_prefix: ClassVar[str]  # of the ids of replies
    call_prefix: ClassVar[str]  # of the ids of tool calls
    limits: ClassVar[tuple[str, ...]]  # the fields that limit the tokens of the output
    stop: ClassVar[str] = ""  # the field with the stop strings
    fields: ClassVar[frozenset[str]]  # further fields that are read, or that change nothing of what is sampled

    @abstractmethod
    def messages(self, body: Body) -> list[Said]:
        """The conversation. Raises RefusedError."""

    @abstractmethod
    def tools(self, body: Body) -> list[ToolSpec]:
        """The tools. Raises RefusedError."""

    @abstractmethod
    def write(self, reply: Reply, body: Body) -> dict[str, Any]:
        """The response to `body`."""

    @abstractmethod
    def events(self, reply: Reply, body: Body) -> Iterator[bytes]:
        """The same as server-sent events; the last tells the client that it has all."""

    @abstractmethod
    def error(self, kind: Kind, text: str) -> dict[str, Any]:
        """An error; what a stream sends too where it has begun."""

    def read(self, body: Body, retry: int) -> Request:
        """The request in `body`. Raises RefusedError for what is broken or not supported."""
        known = {*self.fields, *self.limits, self.stop, "model", "stream", "tools", "tool_choice"}
        ignored = [name for name, value in body.items() if name not in known and value is not None]
        choice = body.get("tool_choice") or "auto"
        choice = choice.get("type") if isinstance(choice, dict) else choice
        if choice not in ("auto", "none"):
            ignored.append("tool_choice")
        if body.get("n") not in (None, 1):
            raise RefusedError("invalid", f"n={body['n']}: one request has one reply; send it again for another")
        stop = body.get(self.stop) or []
        stops = listed([stop] if isinstance(stop, str) else stop, self.stop, str)
        asked = [body[name] for name in self.limits if body.get(name) is not None]
        if any(not isinstance(limit, int) or limit < 1 for limit in asked):
            raise RefusedError("invalid", f"{' and '.join(self.limits)} must be a positive integer, got {asked[0]!r}")
        messages = self.messages(body)
        if not messages:
            raise RefusedError("invalid", "the request has no messages")
        return Request(
            messages=tuple(messages),
            tools=() if choice == "none" else tuple(self.tools(body)),
            digest=hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest(),
            max_tokens=min(asked, default=None),
            stop=tuple(text for text in stops if text),
            ignored=tuple(ignored),
            retry=retry,
        )


def mapping(value: Any, what: str) -> Body:
    """`value`, a JSON object. Raises RefusedError."""
    if not isinstance(value, dict):
        raise RefusedError("invalid", f"{what} must be an object, got {value!r:.100}")
    return cast("dict[str, Any]", value)


def listed(value: Any, what: str, kind: type = dict) -> list[Any]:
    """`value`, a list of `kind`. Raises RefusedError."""
    entries = cast("list[Any]", value) if isinstance(value, list) else [None]
    if any(not isinstance(entry, kind) for entry in entries):
        names = {dict: "objects", str: "strings"}
        raise RefusedError("invalid", f"{what} must be a list of {names[kind]}, got {value!r:.100}")
    return entries


def words(value: Any, what: str) -> str:
    """`value`, a string; null is the empty one. Raises RefusedError."""
    if value is not None and not isinstance(value, str):
        raise RefusedError("invalid", f"{what} must be a string, got {value!r:.100}")
    return value or ""


def text_of(content: Any, what: str, kinds: Sequence[str] = ("text", "input_text", "output_text", "refusal")) -> str:
    """The text of a content: a string, null, or a list of parts, which are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    found: list[str] = []
    for part in listed(content, what):
        if part.get("type") not in kinds:
            raise RefusedError("invalid", f"{what}: content of type {part.get('type')!r} is not supported, only text")
        found.append(words(part.get("text", part.get("refusal")), what))
    return "\n".join(found)


def call_of(name: Any, arguments: Any) -> ToolCall:
    """The tool call of this name; arguments: an object, or the text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RefusedError("invalid", f"the arguments of a tool call are no JSON: {arguments!r:.100}") from None
    return ToolCall(words(name, "the name of a tool call"), mapping(arguments, "the arguments of a tool call"))


def tool_of(tool: Body, parameters: str) -> ToolSpec:
    """A tool whose JSON schema stands in the field `parameters`."""
    name = words(tool.get("name"), "the name of a tool")
    if not name:
        raise RefusedError("invalid", f"a tool without a name is not supported: {dict(tool)!r:.100}")
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    return ToolSpec(name, words(tool.get("description"), "the description of a tool"), mapping(schema, parameters))


class Conversation:
    """Messages while they are read: who answers which tool call, and what belongs to one message of the model."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self._names: dict[str, str] = {}  # of tools, by the id of the call

    def add(self, role: Any, content: str) -> None:
        """A message without tool calls. Raises RefusedError for an unknown role."""
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant"):
            raise RefusedError("invalid", f"a message has the role {role!r}; known: system, user, assistant, tool")
        self.said.append(Said(Message(role, content)))

    def answer(self, call_id: Any, content: str, name: Any = None) -> None:
        """What a tool answered."""
        known = self._names.get(words(call_id, "the id of a tool call"), "")
        self.said.append(Said(Message("tool", content, name=known or words(name, "the name of a tool"))))

    def assistant(self, content: str, reasoning: str = "", calls: Sequence[tuple[Any, ToolCall]] = ()) -> None:
        """A message of the model; calls: each with its id."""
        ids = tuple(words(call_id, "the id of a tool call") for call_id, _ in calls)
        made = tuple(call for _, call in calls)
        self._names.update((call_id, call.name) for call_id, call in zip(ids, made, strict=True))
        self.said.append(Said(Message("assistant", content, reasoning, made), ids))


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
