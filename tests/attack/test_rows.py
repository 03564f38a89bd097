"""Malformed files: each bad row is named with its line, skipped and counted, or the reason why the run stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import cli
from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Split
from mtgrpo.tasks.jsonl import BadRows, Jsonl
from test_conversation import chat

GOOD = b'{"prompt": "1 + 1?", "answer": "2"}\n'
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "a number": 3,
    "a fraction": 0.5,
    "a list": [],
    "a mapping": {},
    "nested": [[["x"]]],
    "an empty text": "",
}
WRONG = {  # what each key may not be
    "prompt": ("null", "true", "a number", "a fraction", "a list", "a mapping", "nested"),
    "answer": ("true", "a mapping", "nested", "a list"),
    "id": ("true", "a list", "a mapping", "nested"),
}
WRONG_IN_MESSAGE = {
    "role": tuple(VALUES),
    "content": tuple(name for name in VALUES if name != "an empty text"),
    "tool_calls": tuple(name for name in VALUES if name not in ("null", "a list")),
}


def bad_lines() -> Iterator[tuple[str, bytes]]:
    """About a hundred of them, each with what it is."""
    for key, names in WRONG.items():
        for name in names:
            yield f"{key}: {name}", json.dumps({"prompt": "x", "answer": "2", key: VALUES[name]}).encode()
    for key, names in WRONG_IN_MESSAGE.items():
        for name in names:
            message = {"role": "user", "content": "x", key: VALUES[name]}
            yield f"message with {key}: {name}", json.dumps({"messages": [message]}).encode()
    for name, value in VALUES.items():
        yield f"a row that is {name}", json.dumps(value).encode()
        if name != "an empty text":  # a prompt
            yield f"messages: {name}", json.dumps({"messages": value}).encode()
        yield f"a message that is {name}", json.dumps({"messages": [value]}).encode()
        call = {"role": "user", "content": "x", "tool_calls": [value]}
        yield f"a call that is {name}", json.dumps({"messages": [call]}).encode()
        call = {"role": "user", "content": "x", "tool_calls": [{"name": "f", "arguments": value}]}
        if name != "a mapping" and name != "a list":  # dict([]) is an empty mapping
            yield f"arguments that are {name}", json.dumps({"messages": [call]}).encode()
    whole = b'{"prompt": "1 + 1?", "answer": "2"}'
    for length in range(1, len(whole), 4):
        yield f"cut after {length} bytes", whole[:length]
    yield "lists 100,000 deep", b'{"prompt": ' + b"[" * 100_000
    yield "mappings 100,000 deep", b'{"a":' * 100_000
    yield "closed lists 100,000 deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    deep = json.dumps("[" * 100_000 + "]" * 100_000).encode()
    yield (
        "arguments 100,000 deep",
        b'{"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "f", "arguments": ' + deep + b"}]}]}",
    )
    yield "not UTF-8", b'{"prompt": "\xff\xfe"}'
    yield "UTF-16", '{"prompt": "x"}'.encode("utf-16")
    yield "nothing but zeros", b"\0" * 64
    yield "a number of 10,000 digits", b'{"prompt": "x", "answer": ' + b"9" * 10_000 + b"}"
    yield "single quotes", b"{'prompt': 'x'}"
    yield "a comma too many", b'{"prompt": "x",}'
    yield "two objects", b'{"prompt": "x"} {"prompt": "y"}'
    yield "a comment", b'// {"prompt": "x"}'
    yield "a header of a table", b"prompt,answer"
    yield "a page", b"<!DOCTYPE html><html></html>"
    yield "a pointer to a large file", b"version https://git-lfs.github.com/spec/v1"


LINES = dict(bad_lines())


def test_there_are_a_hundred_of_them() -> None:
    assert len(LINES) >= 90


@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
def test_a_bad_row_is_named_and_skipped_or_stops_the_run(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    source = Jsonl(path=str(path), eval_fraction=0)
    stream = source.stream(Split.train, 0)
    assert isinstance(stream, IndexedStream)
    (note,) = stream.notes
    assert note.startswith(
        f"1 of the 3 rows that were checked cannot be used and are skipped; the first: {path}, line 2"
    )
    assert "\n" not in note and len(note) < 700
    assert [next(stream).answer for _ in range(4)] == ["2"] * 4
    assert stream.skipped in (1, 2)  # once in each pass
    with pytest.raises(ConfigError) as refused:
        Jsonl(path=str(path), eval_fraction=0, bad_rows=BadRows.stop).stream(Split.train, 0)
    assert str(refused.value).startswith(f"{path}, line 2")
    path.write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match="line 1"):  # nothing is left
        source.stream(Split.train, 0)


ODD_BUT_GOOD = {
    "half of a pair": b'{"prompt": "\\ud800 x"}',
    "a zero": b'{"prompt": "a\\u0000b"}',
    "a mark of the byte order within": '{"prompt": "\ufeffx"}'.encode(),
    "special tokens": b'{"prompt": "<|im_end|><|im_start|>system"}',
    "NaN for an answer": b'{"prompt": "x", "answer": NaN}',
    "the same key twice": b'{"prompt": "x", "prompt": "y"}',
    "a very long text": b'{"prompt": "' + b"x" * 100_000 + b'"}',
    "nested 100 deep beside it": b'{"prompt": "x", "rest": ' + b"[" * 100 + b"]" * 100 + b"}",
    "no answer": b'{"prompt": "x"}',
    "old line ends": b'{"prompt": "x"}\r',
}


@pytest.mark.parametrize("line", ODD_BUT_GOOD.values(), ids=list(ODD_BUT_GOOD))
def test_an_odd_row_becomes_tokens(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n")
    stream = Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0)
    assert not stream.notes
    assert chat().open(next(stream).messages, ())


def test_a_dry_run_says_which_rows_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 30 + b"[" * 100_000 + b"\n")
    words = ["train", "recipe=jsonl", f"task.path={path}", "model.name=tiny", "--dry-run"]
    cli.run_command(words)
    said = capsys.readouterr().err
    assert f"1 of the 31 rows that were checked cannot be used and are skipped; the first: {path}, line 31" in said
    with pytest.raises(ConfigError, match="line 31: not valid JSON"):
        cli.run_command([*words, "task.bad_rows=stop"])


def test_a_row_of_a_large_file_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtgrpo.tasks.jsonl.CHECKED_BYTES", 10)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 1200 + b"{\n")
    stream = Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0, repeat=False)
    assert isinstance(stream, IndexedStream) and not stream.notes
    assert len(list(stream)) == 1200
    assert stream.skipped == 1
    assert stream.notes[0].startswith(f"what cannot be used is skipped, the first time here: {path}, line 1201")
    again = Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0, repeat=False)
    again.load_state_dict(stream.state_dict())
    assert isinstance(again, IndexedStream) and again.skipped == 1


def test_a_run_that_stops_at_a_bad_row_does_not_pass_it_over_when_it_goes_on(tmp_path: Path) -> None:
    def task_at(index: int) -> Any:
        raise ConfigError(f"row {index}")

    stream = IndexedStream(5, task_at, seed=0)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            next(stream)
        said.append(str(refused.value))
    assert said[0] == said[1]
