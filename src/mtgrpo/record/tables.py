"""Conversations as a file for others: JSON Lines, or a table in Parquet. Rows are written as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import refuse_without_package
from mtgrpo.strict_json import strict_json

Row = Mapping[str, Any]

_CALL = {"name": str, "arguments": str}
_MESSAGE = {"role": str, "content": str, "reasoning": str, "name": str, "error": str, "tool_calls": [_CALL]}
_LENGTHS = {"new_context_tokens": int, "output_tokens": int, "parent": int, "version_min": int, "version_max": int}
_TRAJECTORY = {
    **{"task": str, "sample": int, "status": str, "reason": str, "reward": float, "answer": str},
    **{"messages": [_MESSAGE], "turns": [{**_LENGTHS, "finish": str, "auxiliary": bool}]},
    **{"components": str, "turn_rewards": [float], "outages": [str], "output": str, "counts": str},
    "untrained": [_MESSAGE],
}
_FINE_TUNING = {
    "messages": [
        {"role": str, "content": str, "reasoning_content": str, "name": str}
        | {"tool_calls": [{"type": str, "function": _CALL}]}
    ],
    "tools": str,
}


@contextmanager
def open_rows(path: Path, fine_tuning: bool) -> Generator[Callable[[Sequence[Row]], None]]:
    """How rows get into `path`: those of `trajectories.fine_tuning`, or else of `trajectories.record`.

    With the suffix .parquet it is a table with a row group for each call, which can be read once all is written. What
    has no fixed columns (arguments of calls, tools, components) is JSON in it. Raises ConfigError without pyarrow.
    """
    if path.suffix == ".parquet":
        refuse_without_package("pyarrow", f"collect.file={path.name}", extra="data")
        import pyarrow  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        from pyarrow import parquet  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

        arrow, columns = cast("Any", pyarrow), _FINE_TUNING if fine_tuning else _TRAJECTORY
        schema = arrow.schema([(name, _type(arrow, kind)) for name, kind in columns.items()])
        with cast("Any", parquet).ParquetWriter(path, schema) as table:
            yield lambda rows: table.write_table(
                arrow.Table.from_pylist([_fitting(row, columns) for row in rows], schema)
            )
    else:
        with path.open("wb", buffering=0) as file:
            yield lambda rows: file.writelines(strict_json(row) + b"\n" for row in rows)


def _type(arrow: Any, kind: Any) -> Any:
    """The type of a column: of a number or text, of a list, of an object."""
    if isinstance(kind, list):
        return arrow.list_(_type(arrow, kind[0]))
    if isinstance(kind, dict):
        return arrow.struct([(name, _type(arrow, inner)) for name, inner in cast("Row", kind).items()])
    return {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}[kind]


def _fitting(value: Any, kind: Any) -> Any:
    """A value as its column takes it: where that is text, what is none as JSON."""
    if value is None:
        return None
    if isinstance(kind, list):
        return [_fitting(each, kind[0]) for each in value]
    if isinstance(kind, dict):
        return {name: _fitting(value.get(name), inner) for name, inner in cast("Row", kind).items()}
    if kind is str:
        text = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else strict_json(value)
        return text.decode()
    return value
