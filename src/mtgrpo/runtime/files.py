"""Files: written whole or not at all, read line by line; JSON, and tables in Parquet."""

import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.packages import refuse_without_package

MAX_LINE_BYTES = 1 << 24  # a conversation of a million tokens takes half
PROJECT = Path(sys.prefix).parent  # where `make setup` has put this Python's environment
_MAX_NESTING = 50  # levels of nesting that are kept


def find_near(name: str) -> Path:
    """Where a path leads from the working folder or, where nothing is there, from the project's."""
    path = Path(name).expanduser()
    return PROJECT / path if not path.exists() and (PROJECT / path).exists() else path


@contextmanager
def put_whole(path: Path, durable: bool = True) -> Generator[Path]:
    """Where to write a file or a folder that then appears at `path`: whole, or not at all.

    durable: it is on the disk then, whatever happens to the machine, which takes milliseconds.
    A file that is at `path` already is replaced; where a folder is there that holds anything, OSError is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        partial = place / path.name
        yield partial
        if durable:
            sync_all(partial)
        os.replace(partial, path)
        if durable:
            _sync(path.parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write_whole(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file, or replace it; see `put_whole`."""
    with put_whole(path, durable) as partial:
        partial.write_bytes(content)


def sync_all(place: Path) -> None:
    """Have a file, or a folder and all in it, on the disk."""
    for written in (*place.rglob("*"), place):
        _sync(written)


def _sync(place: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Line(NamedTuple):
    """A line of a file."""

    number: int  # from 1
    offset: int  # bytes before it
    text: bytes  # with its end; b"" in place of more than MAX_LINE_BYTES


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file; none where there is no file, nor of a pipe, which would be waited for.

    The last line may lack its end: it is being written, or the disk was full.
    """
    if not path.is_file():
        return
    with path.open("rb", buffering=1 << 20) as file:
        number = offset = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number, start, piece = number + 1, offset, text
            offset += len(piece)
            while len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
                text, piece = b"", file.readline(MAX_LINE_BYTES + 1)
                offset += len(piece)
            yield Line(number, start, text)


def read_line(path: Path, offset: int) -> bytes:
    """The line that begins there, as `read_lines` gives it."""
    with path.open("rb") as file:
        file.seek(offset)
        text = file.readline(MAX_LINE_BYTES + 1)
    return text if len(text) <= MAX_LINE_BYTES or text.endswith(b"\n") else b""


def read_last_lines(path: Path, size: int) -> list[bytes]:
    """The whole lines among the last `size` bytes of a file, without their ends; [] where there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        lines = file.read(size).split(b"\n")
    return lines[1 if start else 0 : -1]  # the first may be cut, the last is being written


def refuse_other_format(path: Path, first: bytes) -> None:
    """Raise ConfigError, by the first line of a file, where it is none of lines of JSON."""
    if path.suffix == ".csv":
        program = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]"
        names = f"< {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.csv.jsonl')))}"
        raise ConfigError(f'{path} is no JSON: python -c "{program}" {names}')
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        cure = f"iconv -f UTF-16 -t UTF-8 {path} > new.jsonl"
        raise ConfigError(f"{path} is text in UTF-16, lines of JSON are UTF-8: {cure}")
    if first.startswith(b"\x1f\x8b"):
        raise ConfigError(f"{path} is compressed: gunzip -c {path} > new.jsonl")
    begun = first.strip()
    if begun.startswith(b"[") and (not begun.endswith(b"]") or len(first) == path.stat().st_size):
        raise ConfigError(f"{path} is one JSON array, in place of an object per line: jq -c '.[]' {path} > new.jsonl")


def parse_json(text: bytes, where: str) -> Any:
    """The JSON value on a line. Raises ConfigError, beginning with `where`, where there is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        cure = "; iconv -f LATIN1 -t UTF-8 FILE > new.jsonl" * isinstance(error, UnicodeDecodeError)
        what = f"not valid JSON ({error}): {text[:80]!r}{cure}" if text else f"longer than {MAX_LINE_BYTES:,} bytes"
        raise ConfigError(f"{where}: {what}") from error


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object on a line. Raises ConfigError, beginning with `where`, for anything else."""
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: a line must be a JSON object such as {{"name": "value"}}, got {text[:80]!r}')
    return cast("dict[str, Any]", value)


def strict_json(value: Any, indent: int | None = None) -> bytes:
    """`value` as UTF-8 JSON that every reader accepts, floats at full precision, on one line unless `indent` is given.

    NaN and infinity become null; other types that JSON lacks become text; what is nested very deeply becomes "...".
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(value, 0), ensure_ascii=False, allow_nan=False, indent=indent)
    for newline in "\x85\u2028\u2029":  # legal in JSON text, but some readers of lines would split there
        text = text.replace(newline, f"\\u{ord(newline):04x}")
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes \udXXX, its JSON escape


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_NESTING:
        return "..."
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): _plain(inner, depth + 1) for key, inner in items}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in cast("Sequence[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def is_deeper(value: Any, levels: int = 100) -> bool:  # than what servers and other processes take
    """Whether lists and objects are nested in one another more than `levels` deep."""
    inner: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deeper(part, levels - 1) for part in inner)


@contextmanager
def open_table(path: Path, schema: Any) -> Generator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """How rows get into a Parquet file of this pyarrow.Schema: each call writes a row group.

    The file can be read once all is written, after an error too.
    """
    arrow, parquet = open_pyarrow("a Parquet file")
    with parquet.ParquetWriter(path, schema) as table:
        yield lambda rows: table.write_table(arrow.Table.from_pylist(rows, schema))


def open_pyarrow(setting: str) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet. Raises ConfigError, naming the setting that needs them, where they are missing."""
    refuse_without_package("pyarrow", setting)
    import pyarrow  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    from pyarrow import parquet  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return cast("Any", pyarrow), cast("Any", parquet)
