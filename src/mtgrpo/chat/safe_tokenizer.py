"""Text <-> tokens such that text that was not sampled never becomes a special token, nor gains or loses a space.

An added token is a string that a tokenizer reads as one token wherever it stands: `<|im_end|>`, `<tool_call>`. `escape`
replaces every such string in a content by a marker: its number between two Unicode noncharacters, which chat templates
leave as they are. The result is escaped text. `encode` makes added tokens of what the template itself wrote, and spells
the string of a marker with ordinary tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from mtgrpo.chat.formats import MARKUP
from mtgrpo.messages import tool_to_dict
from mtgrpo.types import Message, ToolCall, ToolSpec

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # Unicode noncharacters
_MARKER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_PIECE = 256  # items that are compared at once


class SafeTokenizer:
    """`escape` contents, render them, `encode` the escaped text; `decode` sampled tokens."""

    def __init__(self, tokenizer: Any) -> None:
        layout = json.loads(tokenizer.backend_tokenizer.to_str())
        layout["truncation"] = layout["padding"] = None
        self._full = Tokenizer.from_str(json.dumps(layout))
        inner = {**layout, **_without_prefix_space(layout)}
        self._inner = self._full if inner == layout else Tokenizer.from_str(json.dumps(inner))
        self._plain = Tokenizer.from_str(json.dumps({**inner, "added_tokens": []}))
        tokens = layout["added_tokens"]
        self.added: dict[str, int] = {token["content"]: token["id"] for token in tokens}
        self._names = {token: string for string, token in self.added.items()}
        self.fences = {token["id"] for token in tokens if not token["normalized"]}  # no other token reaches across one
        prepends = inner["normalizer"] != layout["normalizer"]  # then a normalised token is hardly ever read amid text
        self._read = _finder({token["content"]: False for token in tokens if not (prepends and token["normalized"])})
        escaped = {token["content"]: token["normalized"] for token in tokens if token["content"].strip()}
        escaped |= {_OPEN: False, _CLOSE: False}
        self._escaped = _finder(escaped, self._inner.normalizer)
        self._spelled = [[], *map(self._spell, escaped)]  # by the number in a marker

    def escape(self, text: str, *, sampled: bool = False) -> str:
        """`text` with markers for added tokens; in `sampled` text the markup that models generate stays."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # halves of surrogate pairs, which have no tokens
        encoding = self._escaped.encode(text, add_special_tokens=False)
        escaped, position = "", 0
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number and not (sampled and self._escaped.id_to_token(number) in MARKUP):
                escaped += f"{text[position:start]}{_OPEN}{number}{_CLOSE}"
                position = end
        return escaped + text[position:]

    def escape_all(self, value: Any) -> Any:
        """`escape` on every string in a JSON value."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            items = cast(Mapping[Any, Any], value).items()
            return {self.escape_all(key): self.escape_all(item) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [self.escape_all(item) for item in cast(Sequence[Any], value)]
        return value

    def escape_tool(self, tool: ToolSpec) -> dict[str, Any]:
        """A tool as chat templates take it."""
        row = tool_to_dict(tool)
        return {**row, "function": self.escape_all(row["function"])}

    def escape_message(self, message: Message) -> Message:
        """A message whose texts are escaped; those of an assistant may have been sampled."""
        sampled = message.role == "assistant"
        calls = (ToolCall(self.escape(call.name), self.escape_all(call.arguments)) for call in message.tool_calls)
        texts = self.escape(message.content, sampled=sampled), self.escape(message.reasoning, sampled=True)
        return Message(message.role, *texts, tuple(calls), self.escape(message.name))

    def encode(self, text: str) -> list[int]:
        """The tokens of an escaped text that begins a context."""
        if _OPEN not in text:
            return self._full.encode(text, add_special_tokens=False).ids
        return self.encode_with_spans(text)[0]

    def encode_after(self, before: str, text: str) -> list[int]:
        """The tokens of an escaped text that follows `before`, an added token, or ordinary text where that is ""."""
        if before:
            return self.encode(before + text)[1:]
        return self.encode(text) if self._inner is self._full else self.encode_with_spans(text, continues=True)[0]

    def encode_with_spans(self, text: str, continues: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an escaped text, and for each the characters (from, to) of the escaped text it stands for.

        continues: the text follows ordinary text, so that no space is put before it.
        """
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        position = 0
        for marker in (*_MARKER.finditer(text), None):
            end = marker.start() if marker else len(text)
            for piece, tokenizer in self._pieces(text[position:end], continues or position > 0):
                encoding = tokenizer.encode(piece, add_special_tokens=False)
                tokens += encoding.ids
                spans += [(position + first, position + last) for first, last in encoding.offsets]
                position += len(piece)
            if marker:
                spelled = self._spelled[int(marker.group(1))]
                tokens += spelled
                spans += [marker.span()] * len(spelled)
                position = marker.end()
        return tokens, spans

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow others, special ones included."""
        return self._inner.decode(list(tokens), skip_special_tokens=False)

    def last_added(self, tokens: Sequence[int]) -> str:
        """The last of `tokens` where it is an added one, else ""."""
        return self._names.get(tokens[-1], "") if tokens else ""

    def _pieces(self, text: str, continues: bool) -> list[tuple[str, Tokenizer]]:
        """`text` cut where tokenizers begin to put spaces before words, each piece with the tokenizer for it."""
        if not continues or self._inner is self._full:
            return [(text, self._full)] if text else []
        encoding = self._read.encode(text, add_special_tokens=False)
        number, (_, end) = next(zip(encoding.ids, encoding.offsets, strict=True), (0, (0, 0)))
        cut = 0 if number else end
        return [part for part in ((text[:cut], self._inner), (text[cut:], self._full)) if part[0]]

    def _spell(self, text: str) -> list[int]:
        tokens = self._plain.encode(text, add_special_tokens=False).ids
        if len(text) == 1 or self._names.keys().isdisjoint(tokens):
            return tokens
        half = len(text) // 2  # the model's own vocabulary holds the string whole: break it up
        return self._spell(text[:half]) + self._spell(text[half:])


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items two sequences have in common."""
    start, most = 0, min(len(one), len(other))
    while start < most and one[start : start + _PIECE] == other[start : start + _PIECE]:
        start += _PIECE
    return next((index for index in range(start, most) if one[index] != other[index]), most)


def _finder(strings: Mapping[str, bool], normalizer: Any = None) -> Tokenizer:
    """A tokenizer that finds the longest of `strings`, as the tokens 1, 2, ..., and 0 between them.

    Those that are true are found in the text as `normalizer` writes it. There may be thousands.
    """
    finder = Tokenizer(WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        finder.normalizer = normalizer
    finder.add_tokens([AddedToken(string, normalized=normalized) for string, normalized in strings.items()])
    return finder


def _without_prefix_space(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer that put a space before a text or strip one from it, changed to do neither."""

    def change(part: Any, settings: Mapping[str, Any]) -> Any:
        if isinstance(part, list):
            return [change(inner, settings) for inner in cast("list[Any]", part) if inner["type"] != "Prepend"]
        if not isinstance(part, dict):
            return part
        values = cast("dict[str, Any]", part).items()
        return {key: settings[key] if key in settings else change(value, settings) for key, value in values}

    normalizer = layout["normalizer"]
    return {
        "normalizer": None if normalizer and normalizer["type"] == "Prepend" else change(normalizer, {}),
        "pre_tokenizer": change(layout["pre_tokenizer"], {"prepend_scheme": "never", "add_prefix_space": False}),
        "decoder": change(layout["decoder"], {"prepend_scheme": "never", "start": 0}),
    }
