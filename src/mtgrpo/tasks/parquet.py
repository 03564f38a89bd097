"""Parquet files of your own."""

from __future__ import annotations

import functools
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, cast

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import open_pyarrow, open_table, put_whole
from mtgrpo.tasks import Rows
from mtgrpo.tasks.jsonl import FileSource, JsonlRows

_GROUP = 10_000  # rows that are written together


@dataclass
class Parquet(FileSource):
    """A table with a column of prompts (strings or lists of messages), and answers and ids if there are any.

    One row group is held in memory; the shuffle orders the row groups and the rows inside each. Files made for verl
    (prompt, reward_model.ground_truth, ...) are read as they are.
    Example: `task=parquet task.train_files=[a.parquet,b.parquet] task.val_files=[c.parquet]`.
    """

    suffix: ClassVar[str] = ".parquet"

    def rows(self, files: Mapping[Path, str]) -> Rows:
        """Random access to the rows of `files`."""
        return ParquetRows(files)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: Any  # pyarrow.parquet.ParquetFile
    path: Path
    name: str  # of its file, in ids
    number: int  # within its file
    first_row: int  # of its file


_BY_NAME = ("arguments", "parameters", "calls")  # of calls, of tools, of accepted ones: keys differ from one to another


class TableRows(Rows):
    """Base of rows of a table, which gives every object the keys of all others in its column, null where it has none.

    Nobody wrote these nulls: in arguments of calls and in schemas of tools they are left out, and counted. A null that
    was meant is left out too, as the table does not tell; one in arguments that are JSON text stays.
    """

    def __init__(self) -> None:
        self._left_out: Counter[str] = Counter()  # by column, since `readings` began

    def notes(self) -> list[str]:
        """How many nulls were left out."""
        return [
            f"column {column!r}: {count:,} nulls in arguments or schemas are left out, of the rows that were checked: "
            "a table gives every object the keys of all others; if nulls are meant, write arguments as JSON text, as "
            "mtgrpo data build --out FILE.parquet does"
            for column, count in self._left_out.items()
        ]

    def _written(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {column: self._without_nulls(value, column, column in _BY_NAME) for column, value in row.items()}

    def _without_nulls(self, value: Any, column: str, inside: bool) -> Any:
        if isinstance(value, list):
            return [self._without_nulls(one, column, inside) for one in cast("list[Any]", value)]
        if not isinstance(value, Mapping):
            return value
        items = cast("Mapping[str, Any]", value)
        kept = {name: one for name, one in items.items() if one is not None} if inside else items
        self._left_out.update({column: len(items) - len(kept)} if len(kept) < len(items) else ())
        return {name: self._without_nulls(one, column, inside or name in _BY_NAME) for name, one in kept.items()}


class ParquetRows(TableRows):
    """Random access to the rows of Parquet files, one row group in memory at a time.

    `files` gives each file the name that it has in the ids of rows without one.
    """

    def __init__(self, files: Mapping[Path, str]) -> None:
        super().__init__()
        _, parquet = open_pyarrow("a Parquet file")
        self._groups: list[_RowGroup] = []
        blocks: list[int] = []
        for path, name in files.items():
            try:
                file: Any = parquet.ParquetFile(path)
            except (ValueError, OSError) as error:
                raise ConfigError(f"{path}: not a Parquet file ({_said(error)})") from error
            first_row = 0
            for number in range(file.num_row_groups):
                self._groups.append(_RowGroup(file, path, name, number, first_row))
                blocks.append(file.metadata.row_group(number).num_rows)
                first_row += blocks[-1]
            if first_row != file.metadata.num_rows:
                says = f"it says that it has {file.metadata.num_rows} rows, and its row groups have {first_row}"
                raise ConfigError(f"{path} is damaged: {says}; copy it anew, or leave it out")
        self.blocks = blocks
        self._starts = [0, *accumulate(blocks)]
        self._loaded: tuple[int, Any] = (-1, None)  # number of a row group, its pyarrow.Table

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, row = self._locate(index)
        if self._loaded[0] != number:
            self._loaded = (number, self._read(self._groups[number]))
        return self._written(self._loaded[1].slice(row, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        """The file and the row, counted from 1."""
        number, row = self._locate(index)
        return f"{self._groups[number].path}, row {self._groups[number].first_row + row + 1}"

    def default_id(self, index: int) -> str:
        """The name of the file and the row's number."""
        number, row = self._locate(index)
        return f"{self._groups[number].name}/{self._groups[number].first_row + row + 1}"

    def readings(self, column: str = "") -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Every row in order; reads `column` alone where it is given."""
        self._left_out.clear()
        for group in self._groups:
            # A nested column is stored under its dotted path; a name that is not there selects no column at all.
            table = self._read(group, [column] if column else None)
            yield from (functools.partial(self._written, row) for row in table.to_pylist())

    def _read(self, group: _RowGroup, columns: Sequence[str] | None = None) -> Any:
        """A pyarrow.Table. Raises ConfigError where the file is damaged, as far as that shows."""
        try:
            table = group.file.read_row_group(group.number, columns=columns)
            table.validate(full=True)
            if table.num_rows != group.file.metadata.row_group(group.number).num_rows:
                raise ValueError(f"it has {table.num_rows} rows")
        except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
            said = f"row group {group.number + 1} cannot be read ({_said(error)})"
            raise ConfigError(f"{group.path} is damaged: {said}; copy it anew, or leave it out") from error
        return table

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the row group and row within it."""
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


def _said(error: Exception) -> str:
    """What pyarrow says, on one line."""
    return " ".join(str(error).split())


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
            except (arrow.ArrowException, UnicodeError) as error:
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
        return [_with_text_arguments(one) for one in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    items = cast("Mapping[str, Any]", value).items()
    return {
        name: json.dumps(one) if name == "arguments" and isinstance(one, dict) else _with_text_arguments(one)
        for name, one in items
    }


def _misfit(arrow: Any, values: list[Any]) -> int:
    """The number of the first value whose type is none of those before it."""

    def fails(count: int) -> bool:
        try:
            arrow.array(values[:count])
        except (arrow.ArrowException, UnicodeError):
            return True
        return False

    return max(bisect_left(range(1, len(values) + 1), True, key=fails), 0) % len(values)
