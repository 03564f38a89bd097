"""How models write tool calls: one small class per format, text <-> calls. Nothing here knows tokens or templates.

A model's mistake never raises: `parse` puts into `Parsed.error`, in a few words, what is wrong with the text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mtgrpo.runtime.files import is_deeper
from mtgrpo.types import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its arguments

# Added tokens that a model generates.
MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"})

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;]*")
_WRITTEN_FULLY = r'^\{\s*"name"\s*:\s*"[^"\n]*",\s*"(?:parameters|arguments)"'  # after text, which may be an answer
_JSON_CALL = re.compile(rf'<\|python_tag\|>|\A\s*\{{\s*"name"|{_WRITTEN_FULLY}', re.MULTILINE)
_CALL = re.compile(f"<tool_call>|{_JSON_CALL.pattern}", re.MULTILINE)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
_AFTER_VALUE = r"\s*(?:<parameter=[^>\n]*>|(?:</function>\s*)?(?:</?tool_call>|\Z))"  # a value may hold tags itself
_VALUE_END = re.compile(rf"\n?</parameter>(?={_AFTER_VALUE})")
_FIRST_END = re.compile(r"\n?</parameter>")
_PYTHON = {"True": True, "False": False, "None": None}  # as templates write what is no string, list or object
_KINDS: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """Content and calls of a text. With an error there are no calls and `content` is the whole text."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


class Malformed(ValueError):
    """A tool call that cannot be read; the text of the error becomes the tool's reply to the model."""


class ToolFormat(ABC):
    """One way to write tool calls."""

    name: str

    def parse(self, text: str, schemas: Schemas) -> Parsed:
        """Split generated text into content and calls. `schemas` gives types where the format itself has none."""
        try:
            return self._read(text, schemas)
        except Malformed as problem:
            return Parsed(text, error=str(problem))

    @abstractmethod
    def write(self, calls: Sequence[ToolCall]) -> str:
        """The text of these calls, as the model generates them."""

    @abstractmethod
    def _read(self, text: str, schemas: Schemas) -> Parsed:
        """As `parse`, raising Malformed."""


class Tagged(ToolFormat):
    """Calls between `<tool_call>` and `</tool_call>`, any number of them, after (rarely: around) the content."""

    def _read(self, text: str, schemas: Schemas) -> Parsed:
        start = text.find("<tool_call>")
        if start < 0:
            if "</tool_call>" in text:
                raise Malformed("</tool_call> without <tool_call>")
            return Parsed(text)
        calls: list[ToolCall] = []
        content, rest, end = text[:start], "", start
        while start >= 0:
            rest += text[end:start]
            call, end = self._read_call(text, start + len("<tool_call>"), schemas)
            calls.append(call)
            end = _expect("</tool_call>", text, end)
            start = text.find("<tool_call>", end)
        rest += text[end:]
        return Parsed(content + rest if rest.strip() else content, tuple(calls))

    @abstractmethod
    def _read_call(self, text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
        """The call that begins at `start`, and where it ends."""


class Hermes(Tagged):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    name = "hermes"

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>\n{_write_json(call, 'arguments')}\n</tool_call>" for call in calls)

    def _read_call(self, text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
        return _read_json(text, start, ("arguments",))


class XmlTags(Tagged):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen 3 Coder and later."""

    name = "xml"

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>\n{self._write_call(call)}\n</tool_call>" for call in calls)

    def _write_call(self, call: ToolCall) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"<parameter={key}>", shown, "</parameter>"]
        return "\n".join([*lines, "</function>"])

    def _read_call(self, text: str, start: int, schemas: Schemas) -> tuple[ToolCall, int]:
        head = _FUNCTION.match(text, start)
        if head is None:
            raise Malformed("<tool_call> must be followed by <function=NAME>")
        name, end = head.group(1).strip(), head.end()
        if not name:
            raise Malformed("the tool call has no name")
        arguments: dict[str, Any] = {}
        schema = schemas.get(name, {})
        properties: Mapping[str, Any] = schema.get("properties") or {}
        while parameter := _PARAMETER.match(text, end):
            key = parameter.group(1)
            key = key if key in properties else key.strip()
            close = _VALUE_END.search(text, parameter.end()) or _FIRST_END.search(text, parameter.end())
            if close is None:
                raise Malformed("<parameter> is not closed")
            types = _types(properties.get(key), schema)
            arguments[key] = _typed(text[parameter.end() : close.start()], types)
            end = close.end()
        return ToolCall(name, arguments), _expect("</function>", text, end)


class LlamaJson(ToolFormat):
    """`{"name": ..., "parameters": {...}}` at the end of a message, after an optional `<|python_tag|>`: Llama 3."""

    name = "llama3_json"

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_write_json(call, "parameters") for call in calls)

    def _read(self, text: str, schemas: Schemas) -> Parsed:
        found = _JSON_CALL.search(text)
        if found is None:
            return Parsed(text)
        content, body = text[: found.start()], text[found.start() :].removeprefix("<|python_tag|>").strip()
        calls: list[ToolCall] = []
        end = 0
        while not calls or end < len(body):
            call, end = _read_json(body, end, ("parameters", "arguments"))
            calls.append(call)
            end = _after(_SEPARATORS, body, end)
        return Parsed(content if content.strip() else "", tuple(calls))


FORMATS: tuple[ToolFormat, ...] = (Hermes(), XmlTags(), LlamaJson())


def split_thinking(text: str, inside: bool) -> tuple[str, str, str]:
    """(reasoning, the rest, error) of generated text; `inside`: the prompt had already opened `<think>`."""
    before, opened, thoughts = text.partition("<think>")
    call = _CALL.search(text)  # the tags in its arguments are text
    start = call.start() if call else len(text)
    if not opened or len(before) > start or (inside and "</think>" in before):
        if not inside and "</think>" not in text[:start]:
            return "", text, ""
        before, thoughts = "", text
    thoughts, closed, rest = thoughts.partition("</think>")
    if not closed:
        return thoughts.strip("\n"), before, "<think> is not closed"
    return thoughts.strip("\n"), before + rest.lstrip("\n"), ""


def _write_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def _read_json(text: str, start: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """The call written as a JSON object at `start` (after white space), and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, _after(_SPACE, text, start))
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a surrogate pair is no text
        if is_deeper(value):
            raise RecursionError
    except json.JSONDecodeError as problem:
        raise Malformed(f"the tool call is not valid JSON: {problem.msg}") from None
    except (ValueError, RecursionError):  # what Python refuses, or would later, although it is JSON
        raise Malformed("the tool call is not valid JSON: half a character, too long a number or too deep") from None
    if not isinstance(value, dict):
        raise Malformed("the tool call must be a JSON object")
    fields = cast(dict[str, Any], value)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise Malformed("the tool call has no name")
    key = next((key for key in keys if key in fields), None)
    if key is None:
        raise Malformed(f'the tool call has no "{keys[0]}"')
    if not isinstance(fields[key], dict):
        raise Malformed(f'"{key}" must be a JSON object')
    return ToolCall(name, fields[key]), end


def _expect(tag: str, text: str, start: int) -> int:
    begin = _after(_SPACE, text, start)
    if not text.startswith(tag, begin):
        surplus, found, _ = text[begin:].partition(tag)
        missing = not found or "<tool_call>" in surplus
        raise Malformed(f"{tag} is missing" if missing else f"`{surplus.strip()[:40]}` stands before {tag}")
    return begin + len(tag)


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value of one of `types` that `text` means; the text itself where it may be, or where it means none."""
    try:
        value: Any = _PYTHON[text] if text in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    plain = is_deeper(value) or ("string" in types and types.isdisjoint(_KINDS.get(type(value), ())))
    return text if plain else value


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a JSON schema allows, strings where it says nothing; `root` holds what its `$ref` names."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    schema = cast("Mapping[str, Any]", schema)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target: Any = root
        for key in reference.split("/")[1:]:
            target = cast("Mapping[str, Any]", target).get(key) if isinstance(target, Mapping) else None
        return _types(target, {})
    said: Any = schema.get("type") or ()
    types = {said} if isinstance(said, str) else set(said)
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(branch, root)
    return frozenset(types or {"string"})
