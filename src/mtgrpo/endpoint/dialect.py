"""A dialect: how requests are read, and replies and errors written. One file = one dialect."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from mtgrpo.endpoint import Entry, Refusal, RefusedError, TurnReply, TurnRequest, canonical_json
from mtgrpo.runtime.files import is_deeper, strict_json
from mtgrpo.types import Message, ToolCall, ToolSpec

T = TypeVar("T")
Body = Mapping[str, Any]
TYPES: Mapping[type, str] = {dict: "an object", list: "a list", str: "a string"}
MAX_DEPTH = 100  # levels of nesting in what is sent
TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal")  # types of the parts of a content
ERRORS: Mapping[Refusal, tuple[int, str | None, str]] = {  # the status, the code of OpenAI, the type of Anthropic
    "invalid": (400, None, "invalid_request_error"),
    "overflow": (400, "context_length_exceeded", "invalid_request_error"),
    "key": (401, "invalid_api_key", "authentication_error"),
    "missing": (404, None, "not_found_error"),
    "closed": (409, "conversation_closed", "invalid_request_error"),
    "large": (413, "request_too_large", "request_too_large"),
    "broken": (503, None, "api_error"),
}


class Dialect(ABC):
    """Translates between JSON and the nouns of the endpoint; it holds no state."""

    prefixes: ClassVar[tuple[str, str]]  # of the ids of replies, and of tool calls
    limits: ClassVar[tuple[str, ...]]  # the fields that limit the tokens of the output
    stop: ClassVar[str] = ""  # the field with the stop strings
    fields: ClassVar[frozenset[str]]  # further fields that are read, or that change nothing of what is sampled
    tool_types: ClassVar[tuple[str | None, ...]] = ("function", None)  # those that an agent runs itself

    @abstractmethod
    def read_messages(self, body: Body, reader: MessageReader) -> None:
        """Put the conversation into `reader`. Raises RefusedError."""

    @abstractmethod
    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        """The response to `body`."""

    @abstractmethod
    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        """The same as server-sent events; the last tells the client that it has all."""

    def error(self, kind: Refusal, text: str) -> dict[str, Any]:
        """An error, as OpenAI writes it; what a stream sends too where it has begun."""
        name = "server_error" if kind == "broken" else "invalid_request_error"
        return {"error": {"message": text, "type": name, "param": None, "code": ERRORS[kind][1]}}

    def tools(self, body: Body) -> list[ToolSpec]:
        """The tools. Raises RefusedError."""
        specs: list[ToolSpec] = []
        for tool in list_of(body.get("tools") or [], "tools"):
            if (kind := tool.get("type")) not in self.tool_types:
                own = self.tool_types[0]
                raise RefusedError("invalid", f"tools of type {kind!r} run at the provider; give one of type {own!r}")
            tool = typed(tool["function"], dict, "the function of a tool") if "function" in tool else tool
            schema = tool.get("parameters") or tool.get("input_schema") or {"type": "object", "properties": {}}
            name, description = (string(tool.get(field), f"the {field} of a tool") for field in ("name", "description"))
            if not name:
                raise RefusedError("invalid", f"a tool without a name is not supported: {dict(tool)!r:.100}")
            specs.append(ToolSpec(name, description, typed(schema, dict, "the parameters of a tool")))
        return specs

    def read(self, body: Body, retry: int) -> TurnRequest:
        """The request in `body`. Raises RefusedError for what is broken or not supported."""
        known = {*self.fields, *self.limits, self.stop, "model", "stream", "tools", "tool_choice"}
        ignored = [name for name, value in body.items() if name not in known and value is not None]
        choice = body.get("tool_choice") or "auto"
        choice = choice.get("type") if isinstance(choice, dict) else choice
        if choice not in ("auto", "none"):
            ignored.append("tool_choice")
        if body.get("n") not in (None, 1) or body.get("n") is True:
            raise RefusedError("invalid", f"n={body['n']}: one request has one reply; send it again for another")
        stop = body.get(self.stop) or []
        stops = list_of([stop] if isinstance(stop, str) else stop, self.stop, str)
        asked = [body[name] for name in self.limits if body.get(name) is not None]
        if any(not isinstance(limit, int) or isinstance(limit, bool) or limit < 1 for limit in asked):
            raise RefusedError("invalid", f"{' and '.join(self.limits)} must be a positive integer, got {asked[0]!r}")
        reader = MessageReader()
        self.read_messages(body, reader)
        if not reader.messages:
            raise RefusedError("invalid", "the request has no messages")
        return TurnRequest(
            messages=tuple(reader.messages),
            tools=() if choice == "none" else tuple(self.tools(body)),
            digest=hashlib.sha256(canonical_json(body).encode()).hexdigest(),
            max_tokens=min(asked, default=None),
            stop=tuple(text for text in stops if text),
            ignored=tuple(ignored),
            retry=retry,
        )


def parse_json(text: str | bytes, what: str) -> Any:
    """The value that JSON stands for. Raises RefusedError for what is none: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        value: Any = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusedError("invalid", f"{what} is no JSON: {error!s:.200}") from None
    if is_deeper(value, MAX_DEPTH):
        raise RefusedError("invalid", f"{what} is nested more than {MAX_DEPTH} levels deep")
    return value


def typed(value: Any, kind: type[T], what: str) -> T:
    """`value`, which is of this type. Raises RefusedError."""
    if not isinstance(value, kind):
        raise RefusedError("invalid", f"{what} must be {TYPES[kind]}, got {value!r:.100}")
    return value


def list_of(value: Any, what: str, kind: type[Any] = dict) -> list[Any]:
    """`value`, a list of this type. Raises RefusedError."""
    return [typed(entry, kind, f"each of {what}") for entry in typed(value, list, what)]


def string(value: Any, what: str) -> str:
    """`value`, a string; null is the empty one. Raises RefusedError."""
    return "" if value is None else typed(value, str, what)


def text_of(content: Any, what: str) -> str:
    """The text of a content: a string, null, or a list of parts, which are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        told = f"the content of {what} must be a string or a list of parts, got {content!r:.100}"
        raise RefusedError("invalid", told)
    texts: list[str] = []
    for part in list_of(content, what):
        if part.get("type") not in TEXTS:
            raise RefusedError("invalid", f"{what}: content of type {part.get('type')!r} is not supported, only text")
        texts.append(string(part.get("text", part.get("refusal")), what))
    return "\n".join(texts)


def split_by_type(parts: Sequence[Body], *types: str) -> list[list[Body]]:
    """The parts of each of `types`, and last all others."""
    of_types = [[part for part in parts if part.get("type") == kind] for kind in types]
    return [*of_types, [part for part in parts if part.get("type") not in types]]


class MessageReader:
    """Messages while they are read: who answers which tool call, and what belongs to one message of the model."""

    def __init__(self) -> None:
        self.messages: list[Entry] = []
        self._names: dict[str, str] = {}  # of tools, by the id of the call

    def add(self, role: Any, content: str) -> None:
        """A message without tool calls. Raises RefusedError for an unknown role."""
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant"):
            raise RefusedError("invalid", f"a message has the role {role!r}; known: system, user, assistant, tool")
        self.messages.append(Entry(Message(role, content)))

    def answer(self, call_id: Any, content: str, name: Any = None) -> None:
        """What a tool answered."""
        known = self._names.get(string(call_id, "the id of a tool call"), "")
        self.messages.append(Entry(Message("tool", content, name=known or string(name, "the name of a tool"))))

    def assistant(self, content: str, reasoning: str, calls: Sequence[Body]) -> None:
        """A message of the model; calls: as any of the dialects writes them."""
        ids = tuple(string(call.get("call_id", call.get("id")), "the id of a tool call") for call in calls)
        entry = Entry(Message("assistant", content, reasoning, tuple(map(_read_call, calls))), ids)
        self._names.update((call_id, call.name) for call_id, call in entry.calls)
        self.messages.append(entry)


def _read_call(call: Body) -> ToolCall:
    call = typed(call["function"], dict, "the function of a tool call") if "function" in call else call
    arguments = call.get("arguments", call.get("input"))
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"the text {arguments!r:.100} of a tool call's arguments")
    name = string(call.get("name"), "the name of a tool call")
    return ToolCall(name, typed(arguments, dict, "the arguments of a tool call"))


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + (data.encode() if isinstance(data, str) else strict_json(data)) + b"\n\n"
