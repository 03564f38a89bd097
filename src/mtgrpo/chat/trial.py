"""What a chat template must do: show every message as it was said, and write the same text twice."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from unittest import mock

from transformers.utils import chat_template_utils

from mtgrpo.chat.pieces import PROBE_TOOL, Template
from mtgrpo.chat.safe_tokenizer import shared_length
from mtgrpo.types import Message, Role, ToolCall, ToolSpec

_ODD = "said \n\n  a  b\t{{ x }} {'k': [1]} <b> &amp; \"q\" \\n \u00e9\u4e2d\U0001f600 1.50 end"
_LONG = "word " * 20_000 + "end"
_MOMENTS = (datetime(2026, 5, 17, 8), datetime(2026, 5, 17, 21, 34, 56, 789))  # one day: a date may be shown
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")  # of an object, as Python shows it


def find_fault(template: Template, tools: bool) -> str:
    """What makes a template unusable, "" for nothing. What it refuses is not tried.

    tools: with tools, their calls and replies, too.
    """
    without, offered = [(talk, ()) for talk in _talks()], [(talk, (PROBE_TOOL,)) for talk in [*_talks(), *_calls()]]
    for messages, specs in without + offered if tools else without:
        state = random.getstate()
        once, again = (_at(moment, template, messages, specs) for moment in _MOMENTS)
        if once is None or again is None:
            continue
        hidden = (index for index, message in enumerate(messages) if not _shows(template, once, message))
        index, said = next(hidden, None), "hides or changes"
        if index is None and (once != again or random.getstate() != state or _ADDRESS.search(once)):
            same = once[: shared_length(once, again)]
            index, said = sum(_mark(message) in same for message in messages), "writes each time anew what stands at"
        if index is not None:
            at = f"message {index + 1} ({messages[index].role})" if index < len(messages) else "the end"
            roles = ", ".join(message.role for message in messages[:6]) + ", ..." * (len(messages) > 6)
            return f"it {said} {at} of a conversation of the roles {roles}"
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


def _at(moment: datetime, template: Template, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | None:
    clock = SimpleNamespace(now=lambda: moment)  # the only one that templates can read, by `strftime_now`
    with mock.patch.object(chat_template_utils, "datetime", clock):
        return template.try_render(messages, tools, prompt=True)


def _mark(message: Message) -> str:
    return message.content.split(" ")[0] or str(message.tool_calls[0].arguments["a"])


def _shows(template: Template, text: str, message: Message) -> bool:
    content = template.escape(message).content
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    called = all(str(call.arguments["a"]) in text for call in message.tool_calls)
    return called and (content in text or quoted in text)
