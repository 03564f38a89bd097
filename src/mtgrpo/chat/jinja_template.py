"""A jinja chat template: how it is rendered, what it has a place for, and what makes it unusable.

It gets escaped contents (`safe_tokenizer.py`). What it does is found by rendering short conversations.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from importlib import resources
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jinja2.exceptions import TemplateError
from transformers.utils import chat_template_utils

from mtgrpo.chat.formats import ToolFormat
from mtgrpo.chat.safe_tokenizer import SafeTokenizer, shared_length
from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_to_dict
from mtgrpo.types import Message, Role, ToolCall, ToolSpec

OTHERS = "choose another one with chat.template=chatml or chat.template=PATH"
ANCHOR = "anchorx7q"
USER = Message("user", "hello")
PROBE_TOOL = ToolSpec("probe", "A probe.", {"type": "object", "properties": {"a": {"type": "string"}}})
PROBE_CALL = ToolCall("probe", {"a": ANCHOR})
_ODD = "said \n\n  a  b\t{{ x }} {'k': [1]} <b> &amp; \"q\" \\n \u00e9\u4e2d\U0001f600 1.50 end"
_LONG = "word " * 20_000 + "end"
_MOMENTS = (datetime(2026, 5, 17, 8), datetime(2026, 5, 17, 21, 34, 56, 789))  # one day: a date may be shown
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")  # of an object, as Python shows it


class Template:
    """A jinja chat template; what it renders is escaped text."""

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
        """The conversation as text, with the generation prompt if `prompt`. Raises ConfigError where it refuses."""
        return next(self.render_begun(messages, [len(messages)], tools, prompt=prompt))

    def render_begun(
        self, messages: Sequence[Message], counts: Sequence[int], tools: Sequence[ToolSpec], *, prompt: bool = True
    ) -> Iterator[str]:
        """As `render`, so many of the first `messages` for each of `counts`."""
        written, offered = [self._as_dict(message) for message in messages], list(map(self._safe.escape_tool, tools))
        return (self._render(written[:count], offered, prompt) for count in counts)

    def _render(self, written: Sequence[dict[str, Any]], offered: Sequence[dict[str, Any]], prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                written, offered or None, chat_template=self.source, add_generation_prompt=prompt, tokenize=False
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is somebody's code, and may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            roles = ", ".join(entry["role"] for entry in written)
            refusal = f"the chat template refuses a conversation of the roles {roles}: {kind}{error}"
            raise ConfigError(f"{refusal}; {OTHERS}") from error

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = False
    ) -> str | None:
        """As `render`, but None where it refuses."""
        try:
            return self.render(messages, tools, prompt=prompt)
        except ConfigError:
            return None

    def shows(self, message: Message, text: str) -> bool:
        """Whether `text` holds the content of a message, as it is or as JSON, and the argument `a` of its calls."""
        content = self._safe.escape_message(message).content
        quoted = json.dumps(content, ensure_ascii=False)[1:-1]
        called = all(str(call.arguments["a"]) in text for call in message.tool_calls)
        return called and (content in text or quoted in text)

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


def call_message(count: int, content: str = "") -> Message:
    """An assistant's message with `count` calls."""
    return Message("assistant", content, tool_calls=(PROBE_CALL,) * count)


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


def find_fault(template: Template, tools: bool) -> str:
    """What makes a template unusable, "" for nothing: it must show every message as it was said, twice the same.

    What it refuses is not tried. tools: with tools, their calls and replies, too.
    """
    tried = [(talk, ()) for talk in _talks()]
    if tools:
        tried += [(talk, (PROBE_TOOL,)) for talk in [*_talks(), *_calls()]]
    for messages, specs in tried:
        state = random.getstate()
        once, again = (_render_at(moment, template, messages, specs) for moment in _MOMENTS)
        if once is None or again is None:
            continue
        hidden = (index for index, message in enumerate(messages) if not template.shows(message, once))
        index, deed = next(hidden, None), "hides or changes"
        if index is None and (once != again or random.getstate() != state or _ADDRESS.search(once)):
            same = once[: shared_length(once, again)]
            index, deed = sum(_mark(message) in same for message in messages), "writes each time anew what stands at"
        if index is not None:
            at = f"message {index + 1} ({messages[index].role})" if index < len(messages) else "the end"
            more = ", ..." * (len(messages) > 6)
            roles = ", ".join(message.role for message in messages[:6])
            return f"it {deed} {at} of a conversation of the roles {roles}{more}"
    return ""


def _talks() -> list[list[Message]]:
    turns = [_odd("assistant" if index % 2 else "user", index) for index in range(41)]
    long = [Message(turn.role, f"{turn.content} {_LONG}") for turn in turns[:3]]
    return [turns[:1], turns[:3], [_odd("system", 50), *turns[:3]], turns, long]


def _calls() -> list[list[Message]]:
    user, answer, last = _odd("user", 0), _odd("assistant", 1), _odd("user", 2)
    tried: list[list[Message]] = []
    for content in ("", answer.content):
        for count in (1, 2):
            calls = tuple(ToolCall("probe", {"a": f"said{10 + number}q7x"}) for number in range(count))
            replies = [_odd("tool", 20 + number) for number in range(count)]
            begun = [user, Message("assistant", content, tool_calls=calls), *replies]
            tried += [begun, [*begun, _odd("assistant", 3), last]]
    return tried


def _odd(role: Role, number: int) -> Message:
    return Message(role, f"said{number}q7x {_ODD}", name="probe" if role == "tool" else "")


def _mark(message: Message) -> str:
    return message.content.split(" ")[0] or str(message.tool_calls[0].arguments["a"])


def _render_at(
    moment: datetime, template: Template, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> str | None:
    clock = SimpleNamespace(now=lambda: moment)  # the only one that templates can read, by `strftime_now`
    with mock.patch.object(chat_template_utils, "datetime", clock):
        return template.try_render(messages, tools, prompt=True)
