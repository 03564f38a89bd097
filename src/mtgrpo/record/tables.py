"""Conversations as a file for others: JSON Lines, or a table in Parquet. Rows are written as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from mtgrpo.record.shapes import FINE_TUNING, TRAJECTORY, Json
from mtgrpo.runtime.files import open_pyarrow, open_table, strict_json


@contextmanager
def open_rows(path: Path, fine_tuning: bool) -> Generator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """How rows get into `path`: those of `trajectories.fine_tuning`, or else of `trajectories.record`.

    With the suffix .parquet it is a table with a row group for each call, which can be read once all is written. What
    has no fixed columns (arguments of calls, tools, components) is JSON in it. Raises ConfigError without pyarrow.
    """
    if path.suffix == ".parquet":
        arrow, _ = open_pyarrow(f"collect.file={path.name}")
        columns = FINE_TUNING if fine_tuning else TRAJECTORY
        schema = arrow.schema([(name, _type(arrow, shape)) for name, shape in columns.items()])
        with open_table(path, schema) as write:
            yield lambda rows: write([_cell(row, columns) for row in rows])
    else:
        with path.open("wb", buffering=0) as file:
            yield lambda rows: file.writelines(strict_json(row) + b"\n" for row in rows)


def _type(arrow: Any, shape: Any) -> Any:
    """The type of a column: of a number or text, of a list, of an object; text of what has no fixed shape."""
    if isinstance(shape, list):
        return arrow.list_(_type(arrow, shape[0]))
    if _has_columns(shape):
        return arrow.struct([(name, _type(arrow, inner)) for name, inner in shape.items()])
    if shape in (int, float, bool):
        return {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}[shape]
    return arrow.string()


def _cell(value: Any, shape: Any) -> Any:
    """A value as its column takes it: where that is text, what is none as JSON."""
    if value is None or shape in (int, float, bool):
        return value
    if isinstance(shape, list):
        return [_cell(each, shape[0]) for each in value]
    if _has_columns(shape):
        return {name: _cell(value.get(name), inner) for name, inner in shape.items()}
    return (value.encode("utf-8", "backslashreplace") if isinstance(value, str) else strict_json(value)).decode()


def _has_columns(shape: Any) -> TypeGuard[Json]:
    return isinstance(shape, dict) and str not in shape
