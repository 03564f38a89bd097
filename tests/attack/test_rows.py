"""Malformed files: each bad row is named with its line, skipped and counted, or the reason why the run stops."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import cli
from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Split
from mtgrpo.tasks.jsonl import BadRows, Jsonl
from mtgrpo.tasks.parquet import Parquet
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
        if name not in ("a mapping", "a list", "an empty text"):  # dict([]) is an empty mapping, and so OpenAI's ""
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
    yield "NaN for an answer", b'{"prompt": "x", "answer": NaN}'
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


def test_the_table_counts_them() -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert f"| malformed rows of JSON Lines | {len(LINES)} |" in page
    assert f"| Parquet columns that hold no prompts | {len(COLUMNS)} |" in page
    assert f"| other files called .parquet | {len(FILES)} |" in page


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
    with pytest.raises(ConfigError, match=r"line 1|rows.jsonl is (one JSON array|text in UTF-16)"):  # nothing is left
        source.stream(Split.train, 0)


ODD_BUT_GOOD = {
    "half of a pair": b'{"prompt": "\\ud800 x"}',
    "a zero": b'{"prompt": "a\\u0000b"}',
    "a mark of the byte order within": '{"prompt": "\ufeffx"}'.encode(),
    "special tokens": b'{"prompt": "<|im_end|><|im_start|>system"}',
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


# --- Parquet

PROMPTS = [f"{number} + 1?" for number in range(40)]
COLUMNS: dict[str, list[Any]] = {  # what no prompt can be
    "numbers": [1, 2],
    "fractions": [0.5, 1.5],
    "truths": [True, False],
    "nothing": [None, None],
    "lists of numbers": [[1], [2]],
    "lists of lists": [[["x"]], [["y"]]],
    "mappings": [{"a": 1}, {"a": 2}],
    "messages without a role": [[{"content": "x"}], [{"content": "y"}]],
    "messages of a role that is none": [[{"role": "god", "content": "x"}]] * 2,
    "messages of nothing": [[None], [None]],
    "no messages": [[], []],
    "bytes": [b"x", b"y"],
    "dates": [date(2026, 1, 1)] * 2,
    "times": [datetime(2026, 1, 1, tzinfo=UTC)] * 2,
    "durations": [timedelta(1)] * 2,
    "decimals": [Decimal("1.5")] * 2,
}
FILES = {
    "JSON Lines": GOOD,
    "nothing": b"",
    "the mark of the format alone": b"PAR1",
    "the mark twice": b"PAR1PAR1",
    "a page": b"<!DOCTYPE html><html></html>",
    "a pointer to a large file": b"version https://git-lfs.github.com/spec/v1",
    "zeros": b"\0" * 4096,
    "a footer longer than the file": b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1",
}


def tabled(path: Path, **columns: list[Any]) -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table(columns), path, row_group_size=10)
    return path.read_bytes()


def outcome(path: Path) -> str:
    """What becomes of a Parquet file: refused in one line that names it, or the number of its rows."""
    try:
        stream = Parquet(path=str(path), eval_fraction=0).stream(Split.train, 0, repeat=False)
        return str(len(list(stream)))
    except ConfigError as refused:
        assert str(refused).startswith(str(path)) and "\n" not in str(refused)
        return "refused"


@pytest.mark.parametrize("values", COLUMNS.values(), ids=list(COLUMNS))
def test_a_column_that_holds_no_prompts_is_refused(values: list[Any], tmp_path: Path) -> None:
    tabled(tmp_path / "rows.parquet", prompt=values)
    assert outcome(tmp_path / "rows.parquet") == "refused"


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_what_is_no_parquet_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    assert outcome(tmp_path / "rows.parquet") == "refused"


def test_a_hundred_damaged_parquet_files_are_refused_or_whole(tmp_path: Path) -> None:
    """Cut ones all; of those with one bit flipped, the ones in which the format shows it, and no row is lost."""
    path, draw = tmp_path / "rows.parquet", random.Random(0)
    whole = tabled(path, prompt=PROMPTS, answer=[str(number + 1) for number in range(40)])
    found: Counter[tuple[str, str]] = Counter()
    for number in range(100):
        content, where = bytearray(whole), draw.randrange(len(whole))
        if number % 2:
            content[where] ^= 1 << draw.randrange(8)
        else:
            del content[where:]
        path.write_bytes(content)
        found["flipped" if number % 2 else "cut", outcome(path)] += 1
    assert found["cut", "refused"] == 50
    assert found["flipped", "refused"] + found["flipped", "40"] == 50
    assert found["flipped", "refused"] > 20


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
