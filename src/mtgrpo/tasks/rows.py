"""Rows of data sets by number, in lines of JSON, Parquet files or on the hub, and how a row becomes a task."""

import functools
import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from, shown
from mtgrpo.parts import Text
from mtgrpo.runtime.files import open_pyarrow, parse_object, read_line, read_lines, refuse_other_format
from mtgrpo.runtime.hub import refuse_unloadable
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.tasks import IndexedStream, Split, held_out, user
from mtgrpo.types import Message, Task

Row = Mapping[str, Any]
NOTED_ROWS = 1000  # the first ones, where not all are read before a run


@dataclass
class Columns:
    """Which column of a row holds what. A dot reaches into a nested column: `reward_model.ground_truth`."""

    prompt: Text = "prompt"  # a string, or a list of messages
    messages: Text = "messages"  # a list of {role, content}; where a row has no prompt and none is named
    answer: Text = "answer"  # a string, a number or a list of accepted ones; where absent, that of verl or SkyRL
    id: Text = "id"  # a string or a number; may be absent: the row's number is taken


_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")  # what data sets call it
# Of verl, the first one of its search tasks, and of SkyRL.
_GROUND_TRUTHS = ("reward_model.ground_truth.target", "reward_model.ground_truth", "reward_spec.ground_truth")


class Rows(ABC):
    """Rows of a data set that can be reached by number without being loaded together."""

    blocks: Sequence[int]  # the sizes of runs of rows that are stored, and best read, together
    unit: ClassVar[str] = "row"  # what a file counts from 1

    def __len__(self) -> int:
        return sum(self.blocks)

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    @abstractmethod
    def place(self, index: int) -> tuple[str, str, int]:
        """The row's file, the name of that file in ids, and the row's number in the file, from 1."""

    def where(self, index: int) -> str:
        """The row's file and number, for error messages."""
        file, _, number = self.place(index)
        return f"{file}, {self.unit} {number}"

    def default_id(self, index: int) -> str:
        """The id of a row that has none."""
        _, name, number = self.place(index)
        return f"{name}/{number}"

    def readings(self, column: str = "") -> Iterator[Callable[[], Row]]:
        """Every row in order, each as a function that gives it, or that column of it, or raises ConfigError."""
        return (functools.partial(self.__getitem__, index) for index in range(len(self)))

    def notes(self) -> list[str]:
        """What is to be said of the rows that were read so far, or of the first ones."""
        return []

    def divided(self, split: Split, id_column: str, eval_fraction: float) -> Sequence[int]:
        """The rows of `split`, ascending, where rows are held out by their ids alone."""
        chosen = array("q")
        for index, read in enumerate(self.readings(id_column)):
            try:
                row_id = _scalar(read(), "id", id_column, self.where(index)) or self.default_id(index)
            except ConfigError:  # whoever uses the row finds out
                row_id = self.default_id(index)
            if held_out(row_id, eval_fraction) is (split is Split.eval):
                chosen.append(index)
        return chosen


def stream_over(
    rows: Rows, chosen: Sequence[int], task_at: Callable[[int], Task], seed: int, repeat: bool, skips: bool = False
) -> IndexedStream:
    """A stream over the rows `chosen`, ascending, of which `task_at` makes tasks; see `IndexedStream`."""
    bounds = [bisect_left(chosen, start) for start in (0, *accumulate(rows.blocks))]
    blocks = [end - start for start, end in pairwise(bounds)]
    return IndexedStream(len(chosen), lambda index: task_at(chosen[index]), seed, repeat, blocks, skips)


def rows_of(files: Mapping[Path, str]) -> Rows:
    """The rows of Parquet files, where the first is one, else of JSON Lines; each file has its name in ids."""
    return ParquetRows(files) if next(iter(files)).suffix == ".parquet" else JsonlRows(files)


class JsonlRows(Rows):
    """Random access to the lines of JSON Lines files through an index of byte offsets; blank lines are skipped.

    `files` gives each file the name that it has in the ids of rows without one.
    """

    unit = "line"

    def __init__(self, files: Mapping[Path, str]) -> None:
        self._files = list(files.items())
        self._file_of, self._offset_of, self._line_of = array("l"), array("q"), array("q")
        for number, path in enumerate(files):
            for line in read_lines(path):
                if line.number == 1:
                    refuse_other_format(path, line.text)
                if not line.text.isspace():
                    self._file_of.append(number)
                    self._offset_of.append(line.offset)
                    self._line_of.append(line.number)
        self.blocks = [len(self._line_of)]  # one run: any line is as cheap to read as any other

    def __getitem__(self, index: int) -> Row:
        path, _ = self._files[self._file_of[index]]
        return parse_object(read_line(path, self._offset_of[index]), self.where(index))

    def place(self, index: int) -> tuple[str, str, int]:
        path, name = self._files[self._file_of[index]]
        return str(path), name, self._line_of[index]

    def readings(self, column: str = "") -> Iterator[Callable[[], Row]]:
        """Every row in order; reads the files once."""
        lines = (line for path, _ in self._files for line in read_lines(path) if not line.text.isspace())
        return (functools.partial(parse_object, line.text, self.where(i)) for i, line in enumerate(lines))


_BY_NAME = ("arguments", "parameters", "calls")  # of calls, of tools, of accepted ones: keys differ from one to another


class TableRows(Rows):
    """Base of rows of a table, which gives every object the keys of all others in its column, null where it has none.

    Nobody wrote these nulls: in arguments of calls and in schemas of tools they are left out, and counted. A null that
    was meant is left out too, as the table does not tell; one in arguments that are JSON text stays.
    """

    def __init__(self) -> None:
        self._left_out: Counter[str] = Counter()  # by column, in the rows that notes are about

    def notes(self) -> list[str]:
        """How many nulls were left out."""
        return [
            f"column {column!r}: {count:,} nulls in arguments or schemas are left out, of the rows that were checked: "
            "a table gives every object the keys of all others; if nulls are meant, write arguments as JSON text, as "
            "mtgrpo data build --out FILE.parquet does"
            for column, count in self._left_out.items()
        ]

    def _written(self, row: Row) -> Row:
        return {column: self._without_nulls(value, column, column in _BY_NAME) for column, value in row.items()}

    def _without_nulls(self, value: Any, column: str, inside: bool) -> Any:
        if isinstance(value, list):
            return [self._without_nulls(item, column, inside) for item in cast("list[Any]", value)]
        if not isinstance(value, Mapping):
            return value
        items = cast("Mapping[str, Any]", value)
        written = {name: item for name, item in items.items() if not (inside and item is None)}
        if len(written) < len(items):
            self._left_out[column] += len(items) - len(written)
        return {name: self._without_nulls(item, column, inside or name in _BY_NAME) for name, item in written.items()}


@dataclass(frozen=True, slots=True)
class _RowGroup:
    file: Any  # pyarrow.parquet.ParquetFile
    path: Path
    name: str  # of its file, in ids
    number: int  # within its file
    first_row: int  # of its file


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
                raise ConfigError(f"{path}: not a Parquet file ({_one_line(error)})") from error
            first_row = 0
            for number in range(file.num_row_groups):
                self._groups.append(_RowGroup(file, path, name, number, first_row))
                blocks.append(file.metadata.row_group(number).num_rows)
                first_row += blocks[-1]
            if first_row != file.metadata.num_rows:
                why = f"it says that it has {file.metadata.num_rows} rows, and its row groups have {first_row}"
                raise ConfigError(f"{path} is damaged: {why}; copy it anew, or leave it out")
        self.blocks = blocks
        self._starts = [0, *accumulate(blocks)]
        self._loaded: tuple[int, Any] = (-1, None)  # number of a row group, its pyarrow.Table

    def __getitem__(self, index: int) -> Row:
        number, row = self._locate(index)
        if self._loaded[0] != number:
            self._loaded = (number, self._read(self._groups[number]))
        return self._written(self._loaded[1].slice(row, 1).to_pylist()[0])

    def place(self, index: int) -> tuple[str, str, int]:
        number, row = self._locate(index)
        group = self._groups[number]
        return str(group.path), group.name, group.first_row + row + 1

    def readings(self, column: str = "") -> Iterator[Callable[[], Row]]:
        """Every row in order; reads `column` alone where it is given."""
        self._left_out.clear()
        for group in self._groups:
            # A nested column is stored under its dotted path; a name that is not there selects no column at all.
            table = self._read(group, [column] if column else None)
            for batch in table.to_batches(max_chunksize=1000):
                yield from (functools.partial(self._written, row) for row in batch.to_pylist())

    def _read(self, group: _RowGroup, columns: Sequence[str] | None = None) -> Any:
        """A pyarrow.Table. Raises ConfigError where the file is damaged, as far as that shows."""
        try:
            table = group.file.read_row_group(group.number, columns=columns)
            table.validate(full=True)
            if table.num_rows != group.file.metadata.row_group(group.number).num_rows:
                raise ValueError(f"it has {table.num_rows} rows")
        except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
            why = f"row group {group.number + 1} cannot be read ({_one_line(error)})"
            raise ConfigError(f"{group.path} is damaged: {why}; copy it anew, or leave it out") from error
        return table

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the row group and row within it."""
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class HubRows(TableRows):
    """The rows of one split of a data set, downloaded once and mapped from disk.

    Raises ConfigError, ending in `cure`, when it cannot be loaded.
    """

    def __init__(self, path: str, subset: str, split: str, cure: str) -> None:
        super().__init__()
        self._data = _load(path, subset, split, cure)
        self.blocks = [len(self._data)]  # one run: any row is as cheap to read as any other
        self._names = f"{path} ({split})", split

    def __getitem__(self, index: int) -> Row:
        return self._written(self._data[index])

    def place(self, index: int) -> tuple[str, str, int]:
        return *self._names, index + 1

    def notes(self) -> list[str]:
        """Of the first thousand rows."""
        self._left_out.clear()
        for index in range(min(len(self), NOTED_ROWS)):
            _ = self[index]
        return super().notes()


def _load(path: str, subset: str, split: str, cure: str) -> Any:
    refuse_without_package("datasets", "a data set of the hub")
    what = f"the data set {path!r} (subset {subset or 'default'}, split {split})"
    with refuse_unloadable(what, path, cure, "datasets/"):  # which finds out whether the hub answers before the import
        import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

        load_dataset = cast("Any", datasets.load_dataset)  # pyright: ignore[reportUnknownMemberType]
        return load_dataset(path, subset or None, split=split)


def task_from_row(row: Row, columns: Columns, where: str, default_id: str) -> Task:
    """The task in a row of a table; columns that are not in `columns` become the task's metadata.

    Where the user names no column of answers and the row has none, verl's reward_model.ground_truth (or its `target`)
    or SkyRL's reward_spec.ground_truth is taken. Of several accepted answers the first is the task's, and
    metadata["answers"] holds all.

    Raises ConfigError, beginning with `where`, naming the column that is missing or of a wrong type.
    """
    named = columns.prompt not in ("", Columns.prompt) and columns.messages == Columns.messages  # it must be there
    used = columns.prompt if named or cell(row, columns.prompt) is not None else columns.messages
    prompt = cell(row, used)
    if prompt is None:
        likely = next((name for name in _PROMPTS if isinstance(row.get(name), str)), "NAME")
        other = "" if named else f" and no column {columns.messages!r}"
        raise ConfigError(
            f"{where}: no column {columns.prompt!r}{other}; {columns_of(row)}; say which holds the prompt with "
            f"task.columns.prompt={likely} (a string) or task.columns.messages=NAME (a list of messages)"
        )
    messages = _messages(prompt, f"{where}: column {used!r}")
    answers = _answers(row, columns.answer, where)
    task_id = _scalar(row, "id", columns.id, where) or default_id
    rest = {name: value for name, value in row.items() if name not in (used, columns.answer, columns.id)}
    several = len(answers) > 1 or columns.answer.startswith("answers.")  # of SQuAD, where it is a column in a column
    return Task(task_id, messages, answers[0], rest | ({"answers": answers} if several else {}))


def cell(row: Row, column: str) -> Any:
    """The value of `column`, which may be a dotted path into nested columns; None when absent."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast("Row", value).get(part)
    return value


def _answers(row: Row, column: str, where: str) -> list[str]:
    """The accepted answers as text; [""] where absent, unless the user named the column."""
    if column == Columns.answer and cell(row, column) is None:
        column = next((name for name in _GROUND_TRUTHS if all(map(_is_scalar, _listed(cell(row, name))))), column)
    values = cell(row, column)
    if isinstance(values, list) and values:
        return [_text(value, row, "answer", column, where) for value in _listed(values)]
    return [_scalar(row, "answer", column, where)]


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) and value else [value]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _scalar(row: Row, option: str, column: str, where: str) -> str:
    """A string or a number as text; "" where absent, unless the user named the column."""
    value = cell(row, column)
    if value is None:
        if column == getattr(Columns, option):
            return ""
        raise ConfigError(f"{where}: no column {column!r}; {columns_of(row)}; correct task.columns.{option}={column}")
    return _text(value, row, option, column, where)


def _text(value: Any, row: Row, option: str, column: str, where: str) -> str:
    if not _is_scalar(value):
        raise ConfigError(
            f"{where}: column {column!r} must be a string or a number, got {shown(value)}; {columns_of(row)}; "
            f"choose another with task.columns.{option}=NAME"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: column {column!r} is {value}, no number")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _messages(prompt: Any, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return user(prompt)
    messages = messages_from(cast("list[Any]", prompt), where) if isinstance(prompt, list) else ()
    wrong = "" if messages else f"must be a string that is not empty or a list of messages, got {shown(prompt)}"
    if messages and messages[-1].role == "user" and not messages[-1].content.strip():
        wrong = "ends with an empty message"
    if messages and messages[-1].role == "assistant":
        wrong = "ends with an assistant message, so there is nothing left to answer; remove that message"
    if messages and messages[-1].role == "system":
        wrong = "has a system message alone; add what the user says"
    if wrong:
        raise ConfigError(f"{where} {wrong}; take another with task.columns.prompt=NAME or task.columns.messages=NAME")
    return messages


def columns_of(row: Row) -> str:
    """The columns of a row, nested ones last, by their dotted path."""
    nested = ((name, cast("Any", value) if isinstance(value, Mapping) else {}) for name, value in row.items())
    names = [f"{name}.{part}" if part else name for name, parts in nested for part in parts or [""]]
    return f"the columns are {', '.join(sorted(names, key=lambda name: '.' in name)) or 'none'}"
