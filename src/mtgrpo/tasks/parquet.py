"""Parquet files of your own."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import open_pyarrow, open_table, put_whole
from mtgrpo.tasks.jsonl import FileSource
from mtgrpo.tasks.rows import JsonlRows, ParquetRows, Rows

_GROUP = 10_000  # rows that are written together


@dataclass
class Parquet(FileSource):
    """A table with a column of prompts (strings or lists of messages), and answers and ids if there are any.

    One row group is held in memory; the shuffle orders the row groups and the rows inside each. Files made for verl
    (prompt, reward_model.ground_truth, ...) are read as they are.
    Example: `task=parquet 'task.train_files=[a.parquet,b.parquet]' 'task.val_files=[c.parquet]'`.
    """

    suffix: ClassVar[str] = ".parquet"

    def rows(self, files: Mapping[Path, str]) -> Rows:
        return ParquetRows(files)


def write_parquet(file: Path, out: Path) -> int:
    """Write the rows of a .jsonl file as Parquet and give their number; the file is read twice, 10,000 rows at a time.

    A column has one type; objects get all keys that theirs have in any row, null where a row lacks them, but for the
    arguments of tool calls, which become JSON text. Raises ConfigError naming the row that does not fit.
    """
    (arrow, _), rows = open_pyarrow("a Parquet file"), JsonlRows({file: file.stem})
    schema: Any = arrow.schema([])
    for start, group in _groups(rows):
        for name in dict.fromkeys(key for row in group for key in row):
            values = [row.get(name) for row in group]
            try:
                field = arrow.field(name, arrow.array(values).type)
                schema = arrow.unify_schemas([schema, arrow.schema([field])], promote_options="permissive")
            except (arrow.ArrowException, UnicodeError, OverflowError) as error:
                bad = start + _misfit(arrow, values)
                raise ConfigError(
                    f"{rows.where(bad)}: column {name!r} is no text, or of another type than before ({error})"
                ) from error
    try:
        with put_whole(out) as partial, open_table(partial, schema) as write:
            for _, group in _groups(rows):
                write(group)
    except arrow.ArrowException as error:
        raise ConfigError(f"{file} cannot be written as Parquet: {error}") from error
    return len(rows)


def _groups(rows: Rows) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows in groups, each with the number of its first."""
    for start in range(0, len(rows), _GROUP):
        yield start, [_with_text_arguments(rows[number]) for number in range(start, min(start + _GROUP, len(rows)))]


def _with_text_arguments(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_text_arguments(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: json.dumps(item) if name == "arguments" and isinstance(item, dict) else _with_text_arguments(item)
        for name, item in value.items()
    }


def _misfit(arrow: Any, values: list[Any]) -> int:
    """The number of the first value whose type is none of those before it."""

    def fails(count: int) -> bool:
        try:
            arrow.array(values[:count])
        except (arrow.ArrowException, UnicodeError, OverflowError):
            return True
        return False

    return bisect_left(range(1, len(values) + 1), True, key=fails) % len(values)
