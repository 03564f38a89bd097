"""Text <-> tokens with tokenizers that rewrite text: no foreign text becomes special, none gains or loses a space."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtgrpo.chat import Chat, ChatSettings, open_chat
from mtgrpo.chat.safe_tokenizer import SafeTokenizer
from mtgrpo.chat.template import chatml
from mtgrpo.types import Message, ToolCall, ToolSpec

SPECIAL = ["<|im_start|>", "<|im_end|>", "</s>"]
MARKUP = ["<tool_call>", "</tool_call>", "<Tool>"]
CALCULATOR = ToolSpec("calculator", "Evaluates.", {"type": "object", "properties": {}})


def without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")


# What becomes of a text by the tokenizer's own doing.
READ_AS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
    "lowercase": str.lower,
    "accents": without_accents,
    "prefix": str,  # byte-level, with a space before every text
    "prepend": str,  # Llama 2: the normaliser puts one before every stretch between special tokens
    "both": lambda text: unicodedata.normalize("NFKC", text),
    "first": str,  # SentencePiece: before the whole text
    "always": str,  # before every stretch
    "whole": str,  # unigram; the vocabulary holds the special strings as pieces
}
SPACED = ["prefix", "prepend", "both", "first", "always", "whole"]


def byte_level(kind: str) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix")
    bpe.decoder = decoders.ByteLevel()
    if kind == "nfkc":
        bpe.normalizer = normalizers.NFKC()
    elif kind == "lowercase":
        bpe.normalizer = normalizers.Lowercase()
    elif kind == "accents":
        bpe.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    return bpe


def sentencepiece(kind: str) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz<>/_|.\n"]
    merges = [("▁", "a"), ("▁", "t"), ("i", "s"), ("▁", "is"), ("▁", "<"), ("<", "t"), (">", "\n"), ("\n", "a")]
    pieces += [first + second for first, second in merges]
    if kind == "whole":
        scores = [(piece, -1.0) for piece in [*pieces, *SPECIAL, *MARKUP]]
        model = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        model = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind in ("prepend", "both"):
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        model.normalizer = normalizers.Sequence([*([normalizers.NFKC()] if kind == "both" else []), *spaces])
    else:
        scheme = "first" if kind == "whole" else kind
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    return model


@lru_cache
def tokenizer(kind: str) -> Any:
    model = sentencepiece(kind) if kind in SPACED and kind != "prefix" else byte_level(kind)
    model.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    model.add_tokens([AddedToken(token, normalized=True) for token in [*MARKUP, *([] if kind in SPACED else ["\n\n"])]])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")


@lru_cache
def safe_of(kind: str) -> SafeTokenizer:
    return SafeTokenizer(tokenizer(kind))


def special(kind: str, tokens: list[int]) -> list[str]:
    names = {token: name for name, token in tokenizer(kind).get_added_vocab().items() if name.strip()}
    return [names[token] for token in tokens if token in names]


odd = st.sampled_from(["<tool>", "<TOOL_CALL>", "<tóol_call>", "＜tool_call＞", "＜Tool＞", "<|im_énd|>"])  # noqa: RUF001
broken = st.sampled_from(
    ["<tool", "_call>", "<", ">", "|", "\ufdd0", "\ufdd11", "a", "is", " ", "  ", "\n", "\n\n", "é中😀"]
)
nasty = st.lists(st.sampled_from(SPECIAL + MARKUP) | odd | broken, max_size=6).map("".join)


@pytest.mark.parametrize("kind", READ_AS)
@settings(max_examples=100)
@given(text=nasty)
def test_no_foreign_text_becomes_a_special_token_or_gains_a_space(kind: str, text: str) -> None:
    safe = safe_of(kind)
    escaped = safe.escape(text)
    going_on = safe.encode_after("", escaped)
    assert special(kind, going_on) == []
    assert safe.decode(going_on) == READ_AS[kind](text)
    assert special(kind, safe.encode(escaped)) == special(kind, safe.encode_after("</s>", escaped)) == []
    turn = safe.encode(f"<|im_start|>user\n{escaped}<|im_end|>\n")
    assert special(kind, turn) == ["<|im_start|>", "<|im_end|>"]
    assert READ_AS[kind](text) in safe.decode(turn)


@pytest.mark.parametrize("kind", READ_AS)
@settings(max_examples=100)
@given(text=nasty)
def test_sampled_text_keeps_its_own_markup_alone(kind: str, text: str) -> None:
    safe = safe_of(kind)
    tokens = safe.encode_after("", safe.escape(text, sampled=True))
    assert set(special(kind, tokens)) <= {"<tool_call>", "</tool_call>"}
    decoded, expected = (each.lower().replace(" ", "") for each in (safe.decode(tokens), READ_AS[kind](text)))
    assert decoded == expected  # some tokenizers put a space behind every special token


def test_special_tokens_that_begin_alike() -> None:
    model = byte_level("plain")
    names = ["<u>", "<u>x", *(f"<u{number}>" for number in range(5000))]
    model.add_special_tokens(names)
    safe = SafeTokenizer(PreTrainedTokenizerFast(tokenizer_object=model))
    text = "".join(f"{name}x" for name in names[::97]) + "<u <u5000> <u>xx"
    assert min(safe.added.values()) > max(safe.encode(safe.escape(text)))
    assert safe.decode(safe.encode(safe.escape(text))) == text


@pytest.mark.parametrize("kind", [*READ_AS, "rstrip"])
@settings(max_examples=50)
@given(said=st.lists(nasty, min_size=2, max_size=6))
def test_contexts_part_where_reading_both_says_so(kind: str, said: list[str]) -> None:
    chat = chat_of(kind)[0] if kind == "rstrip" else chatml_of(kind)
    messages = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(said)]
    counts = range(1, len(said) + 1)
    assert chat.shared(messages, counts, []) == Chat.shared(chat, messages, counts, [])


@pytest.mark.parametrize("kind", [*SPACED, "rstrip"])
@settings(max_examples=30)
@given(content=st.text("ai<.\n ", max_size=8).map(lambda text: f"a{text}s"), answer=st.text("ai<.\n ", max_size=8))
def test_joined_conversations_gain_no_spaces(kind: str, content: str, answer: str) -> None:
    chat, base = chat_of(kind)
    call = ToolCall("calculator", {"a": content})
    messages = [Message("user", answer), Message("assistant", content, "", (call,)), Message("tool", answer)]
    whole = chat.open(messages, [CALCULATOR])
    extension = chat.extend(messages[:2], messages[2:], [CALCULATOR])
    assert extension is not None
    tokens = chat.open(messages[:1], [CALCULATOR]) + chat.encode(messages[1]) + extension
    assert base.decode(tokens) == base.decode(whole)
    assert whole[-len(extension) :] == extension
    assert chat.parse(chat.encode(messages[1])) == messages[1]


@lru_cache
def chatml_of(kind: str) -> Chat:
    return open_chat(tokenizer(kind), ChatSettings(template="chatml"))


@lru_cache
def chat_of(kind: str) -> tuple[Chat, Any]:
    model, template = (
        byte_level(kind) if kind == "prefix" else sentencepiece("prepend" if kind == "rstrip" else kind),
        chatml(),
    )
    model.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL + MARKUP])
    if kind == "rstrip":  # Phi 3: special tokens swallow the white space behind them, and prompts end with one
        model.add_special_tokens([AddedToken(token, normalized=False, rstrip=True) for token in ("<|end|>", "<|bot|>")])
        template = template.replace("<|im_end|>", "<|end|>").replace("'<|im_start|>assistant\\n'", "'<|bot|>\\n'")
        template = template.replace(
            "'<|im_start|>' + message.role", "('<|bot|>' if message.role == 'assistant' else message.role)"
        )
    base = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", chat_template=template)
    return open_chat(base, ChatSettings()), base
