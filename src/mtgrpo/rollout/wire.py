"""Text <-> tokens such that text which nobody sampled can never become a special token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from mtgrpo.rollout.formats import MARKUP

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # Unicode noncharacters: they mark, in a text, the place of an escaped string
_MARKER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class Wire:
    """Text to tokens and back.

    `escape` replaces every string that the tokenizer would read as an added token by a marker; the markers pass through
    templates unharmed, and `encode` spells the strings they stand for with ordinary tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        layout = json.loads(tokenizer.backend_tokenizer.to_str())
        layout["truncation"] = layout["padding"] = None
        self._full = Tokenizer.from_str(json.dumps(layout))
        self._normalizer = self._full.normalizer
        self.added: dict[str, int] = {token["content"]: token["id"] for token in layout["added_tokens"]}
        layout["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(layout))
        self._ids = frozenset(self.added.values())
        self._strings = [_OPEN, _CLOSE, *sorted((s for s in self.added if s.strip()), key=len, reverse=True)]
        self._numbers = {string: number for number, string in enumerate(self._strings)}
        self._foreign = _any_of(self._strings)
        self._sampled = _any_of([string for string in self._strings if string not in MARKUP])
        self._spelled: dict[int, list[int]] = {}

    def escape(self, text: str, *, sampled: bool = False) -> str:
        """`text` with markers for added tokens; in `sampled` text the markup that models write is left as it is."""
        pattern = self._sampled if sampled else self._foreign
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # halves of surrogate pairs, which have no tokens
        if self._normalizer is not None and not pattern.search(text):
            normal: str = self._normalizer.normalize_str(text)
            text = normal if pattern.search(normal) else text  # only the normaliser makes it an added token
        return pattern.sub(lambda match: f"{_OPEN}{self._numbers[match.group()]}{_CLOSE}", text)

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

    def encode(self, text: str) -> list[int]:
        """The tokens of an escaped text."""
        if _OPEN not in text:
            return self._full.encode(text, add_special_tokens=False).ids
        return self.encode_with_spans(text)[0]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of an escaped text, and for each the characters (from, to) of the escaped text it stands for."""
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        position = 0
        for marker in (*_MARKER.finditer(text), None):
            end = marker.start() if marker else len(text)
            if position < end:
                encoding = self._full.encode(text[position:end], add_special_tokens=False)
                tokens += encoding.ids
                spans += [(position + first, position + last) for first, last in encoding.offsets]
            if marker:
                spelled = self._spell(int(marker.group(1)))
                tokens += spelled
                spans += [marker.span()] * len(spelled)
                position = marker.end()
        return tokens, spans

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._full.decode(list(tokens), skip_special_tokens=False)

    def _spell(self, number: int) -> list[int]:
        if number not in self._spelled:
            self._spelled[number] = self._encode_plain(self._strings[number])
        return self._spelled[number]

    def _encode_plain(self, text: str) -> list[int]:
        tokens = self._plain.encode(text, add_special_tokens=False).ids
        if len(text) == 1 or self._ids.isdisjoint(tokens):
            return tokens
        half = len(text) // 2  # the model's own vocabulary holds the string whole: break it up
        return self._encode_plain(text[:half]) + self._encode_plain(text[half:])


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items two sequences have in common."""
    differing = (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(other)))


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(string) for string in strings))
