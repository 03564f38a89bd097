"""A chat template, cut once into fixed text and slots, so that a turn joins strings and no template runs.

A chat template writes fixed text around the contents of messages: headers of roles, line breaks, ends of turns.
`TemplatePieces` holds what it writes for one shape of messages: `literals` are the fixed text, `slots` name the content
between two of them, `trims` how the template strips or escapes it. `learn` finds the pieces by rendering marked
contents, and checks them on odd ones. `Template` renders messages, whose contents are escaped (`safe_tokenizer.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from jinja2.exceptions import TemplateError

from mtgrpo.chat.formats import ToolFormat
from mtgrpo.chat.safe_tokenizer import SafeTokenizer
from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_to_dict
from mtgrpo.types import Message, ToolCall, ToolSpec

ANCHOR = "anchorx7q"


class Template:
    """A jinja chat template. It gets escaped contents, so `render` returns escaped text."""

    def __init__(self, tokenizer: Any, source: str, safe: SafeTokenizer) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self._safe = safe
        self.calls_in_content: ToolFormat | None = None  # for calls that the template refuses or drops the content of
        self.shows_reasoning = True
        for key in ("reasoning_content", "reasoning", "thinking", ""):  # "" = written into the content
            self._reasoning_key = key
            if "thoughtx" in (self.try_render([USER, Message("assistant", "text", reasoning="thoughtx")]) or ""):
                return
        self.shows_reasoning = False

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = False) -> str:
        """The conversation as text, with the generation prompt if `prompt`. Raises jinja2's TemplateError."""
        written, offered = [self._as_dict(message) for message in messages], map(self._safe.escape_tool, tools)
        try:
            return self._tokenizer.apply_chat_template(
                written, list(offered) or None, chat_template=self.source, add_generation_prompt=prompt, tokenize=False
            )
        except (TemplateError, MemoryError):
            raise
        except Exception as error:  # a template is somebody's code, and may raise anything
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = False
    ) -> str | None:
        """As `render`, but None where the template raises."""
        try:
            return self.render(messages, tools, prompt=prompt)
        except TemplateError:
            return None

    def render_or_refuse(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool) -> str:
        """As `render`, but raises ConfigError where the template refuses."""
        try:
            return self.render(messages, tools, prompt=prompt)
        except TemplateError as problem:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(
                f"the chat template refuses a conversation of the roles {roles}: {problem}; "
                "choose another one with chat.template=chatml or chat.template=PATH"
            ) from problem

    def escape(self, message: Message) -> Message:
        """A message as the template gets it."""
        return self._safe.escape_message(message)

    def _as_dict(self, message: Message) -> dict[str, Any]:
        message = self._safe.escape_message(message)
        if message.role == "assistant":
            content, calls = message.content, message.tool_calls
            if message.reasoning and not self._reasoning_key:
                content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
            if self.calls_in_content and calls and (content or len(calls) > 1):
                content, calls = "\n".join(filter(None, (content, self.calls_in_content.write(calls)))), ()
            message = replace(message, content=content, tool_calls=calls, name="")
        entry = message_to_dict(message)
        reasoning = entry.pop("reasoning_content", "")
        return {**entry, self._reasoning_key: reasoning} if reasoning and self._reasoning_key else entry


USER = Message("user", "hello")
PROBE_TOOL = ToolSpec("probe", "A probe.", {"type": "object", "properties": {"a": {"type": "string"}}})
PROBE_CALL = ToolCall("probe", {"a": ANCHOR})


def call_message(count: int) -> Message:
    """An assistant's message with `count` calls."""
    return Message("assistant", tool_calls=(PROBE_CALL,) * count)


def missing_for_tools(template: Template) -> str:
    """What a template lacks to be used with tools; "" = nothing."""
    if "A probe." not in (template.try_render([USER], [PROBE_TOOL], prompt=True) or ""):
        return "place for tools"
    reply = template.try_render([USER, call_message(1), Message("tool", "replyx7q", name="probe")]) or ""
    if "replyx7q" not in reply:
        return "place for the replies of tools"
    return "" if ANCHOR in reply else "place for tool calls"


def read_packaged(name: str) -> str:
    """The source of a template that comes with the package."""
    return resources.files("mtgrpo.chat").joinpath(name).read_text("utf-8")


def put_tools_in_prompt(template: Template) -> str:
    """The source of `template`, changed to describe tools in the prompt whatever it did with them."""
    prelude = read_packaged("tools_in_prompt.jinja")
    if prelude in template.source:
        return template.source
    shown = template.try_render([Message("system", "rulesx7q"), USER], prompt=True) or ""
    role = "system" if "rulesx7q" in shown else "user"
    return f"{{%- set prompt_tools_role = '{role}' %}}\n{prelude}{template.source}"


@dataclass(frozen=True, slots=True)
class TemplatePieces:
    """Fixed text around slots: `literals[0] slots[0] literals[1] slots[1] ... literals[-1]`."""

    literals: tuple[str, ...]
    slots: tuple[int, ...]  # the index of the value at each place
    trims: tuple[Callable[[str], str], ...]  # what the template does to each value

    def fill(self, values: Sequence[str]) -> str:
        """The text with `values` in the slots."""
        parts = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            parts.append(self.trims[slot](values[slot]))
            parts.append(literal)
        return "".join(parts)


_TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    str.lstrip,
    str.rstrip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
_PROBES = ("\n \n odd \n \n", " \t\"'{}\\ 1 < 2 &amp; \u00e9\u4e2d\U0001f600 {{ x }} ", '{"a": [1]}', "x")


def learn(write: Callable[[Sequence[str]], str | None], count: int) -> TemplatePieces | None:
    """The pieces that `write` joins with `count` values; None when its text depends on the values in another way."""
    names = [f"slot{index}q7x" for index in range(count)]
    text = write(names)
    if text is None:
        return None
    parts = re.split(r"slot(\d+)q7x", text)
    literals, slots = tuple(parts[::2]), tuple(int(part) for part in parts[1::2])
    trims: list[Callable[[str], str]] = []
    for index in range(count):
        values = [*names[:index], _PROBES[0], *names[index + 1 :]]
        written = write(values)
        tried = (TemplatePieces(literals, slots, (*trims, trim, *[str] * (count - index - 1))) for trim in _TRIMS)
        trims.append(next((pieces.trims[index] for pieces in tried if pieces.fill(values) == written), str))
    pieces = TemplatePieces(literals, slots, tuple(trims))
    for shift in range(len(_PROBES)):
        values = [_PROBES[(index + shift) % len(_PROBES)] for index in range(count)]
        if pieces.fill(values) != write(values):
            return None
    return pieces
