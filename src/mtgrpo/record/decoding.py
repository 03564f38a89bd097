"""Tokens of a run as text, each with the characters that it completes; nothing of torch is needed for that."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mtgrpo.errors import ConfigError
from mtgrpo.record.reading import step_of
from mtgrpo.runtime.plain_yaml import read_bounded

_MOST_BYTES = 1 << 26  # of a tokenizer's file
_PENDING = 8  # tokens that may wait for the rest of a character; one has at most four bytes


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run in `folder`, from its newest checkpoint. Raises ConfigError where it has none."""
    found = [path for path in folder.glob("checkpoints/step_*/tokenizer.json") if path.is_file()]
    if not found:
        raise ConfigError(f"{folder} has no checkpoint yet, and so no tokenizer that could show its tokens")
    path = max(found, key=lambda path: step_of(path.parent.name))
    content = read_bounded(path, _MOST_BYTES)
    try:
        return Tokenizer.from_buffer(content)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the library raises nothing narrower, and some of it above Exception
        raise ConfigError(f"{path} is no tokenizer: {error}") from error


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token after those before it; "" for one that ends within a character, which a later one has."""
    found: list[str] = []
    shown = pending = 0  # tokens[shown:pending] is the context in which what is pending is decoded
    before = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[shown:end]), skip_special_tokens=False)
        if text.endswith("\ufffd") and end - pending < _PENDING:
            found.append("")
            continue
        found.append(text[len(before) :])
        shown, pending = pending, end
        before = tokenizer.decode(list(tokens[shown:pending]), skip_special_tokens=False)
    if found and found[-1] == "" and pending < len(tokens):
        found[-1] = tokenizer.decode(list(tokens[shown:]), skip_special_tokens=False)[len(before) :]
    return found


def parted(tokenizer: Tokenizer, tokens: Sequence[int], known: int, sampled: int) -> tuple[str, list[str]]:
    """What of a turn's `tokens` follows the first `known`: the text of its context, and that of each sampled token."""
    start = len(tokens) - sampled
    lead = min(start, _PENDING)
    context = tokenizer.decode(list(tokens[known:start]), skip_special_tokens=False)
    return context, pieces(tokenizer, tokens[start - lead :])[lead:]
