"""What data sets that others have published have in common: a copy on disk, else the one on the Hugging Face hub."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

from mtgrpo.errors import ConfigError, refuse_without_package
from mtgrpo.parts import Folder, Reach
from mtgrpo.runtime.hub import refuse_unloadable
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream
from mtgrpo.tasks import user as user
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.tasks.parquet import ParquetRows, TableRows
from mtgrpo.types import Message, Task

Row = Mapping[str, Any]


@dataclass
class Published(TaskSource):
    """Base of published data sets. Write `task`, and `rows` or `chosen` where it is not one file with all rows."""

    path: Folder = ""  # the file

    place: ClassVar[str]  # of the file in $MTGRPO_DATA
    reaches: ClassVar[Reach] = Reach.network  # by being chosen, where there is no copy
    on_hub: ClassVar[tuple[str, str, str]]  # data set, subset and split
    layout: ClassVar[str]  # what its rows have, for messages

    @abstractmethod
    def task(self, row: Row, rows: Rows, index: int) -> Task:
        """The task of `row`, which is row `index`, without the prompts that come before it.

        A KeyError, TypeError or ValueError says that the row is not as `layout` has it.
        """

    def rows(self, split: Split) -> Rows:
        """All rows, of which `chosen` are those of `split`. Raises ConfigError where they are not to be found."""
        return file_rows(self.path, self.place, self.on_hub)

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        """The numbers of the rows of `split`, ascending."""
        return range(len(rows))

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError where the data are missing or of another layout."""
        rows = self.rows(split)
        chosen = self.chosen(rows, split)
        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows for split {split.value}")
        self.prompted(rows, chosen[0])
        blocks = rows.blocks if len(chosen) == len(rows) else ()
        stream = IndexedStream(len(chosen), lambda index: self.prompted(rows, chosen[index]), seed, repeat, blocks)
        stream.notes += rows.notes()
        return stream

    def prompted(self, rows: Rows, index: int) -> Task:
        """The task of row `index` after the system prompt and the examples. Raises ConfigError for another layout."""
        row = rows[index]
        try:
            task = self.task(row, rows, index)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise self.unfit(rows, index) from error
        return replace(task, messages=self.with_prompt(task.messages))

    def unfit(self, rows: Rows, index: int) -> ConfigError:
        """Says that row `index` is not as `layout` has it."""
        return ConfigError(
            f"{rows.where(index)}: {self.layout}; the columns are {', '.join(rows[index])}; read files of another "
            "layout with task=jsonl, task.columns.prompt=NAME and task.columns.answer=NAME"
        )


def text(row: Row, column: str) -> str:
    """The text in a column. Raises KeyError or TypeError where there is none."""
    if not isinstance(row[column], str):
        raise TypeError(column)
    return row[column]


def texts(values: Any) -> list[str]:
    """`values`, where they are a list of texts. Raises TypeError otherwise."""
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise TypeError("not a list of texts")
    return values


def in_code_block(code: str) -> tuple[Message, ...]:
    """An assistant's message that holds nothing but `code`."""
    return (Message("assistant", f"```python\n{code.strip()}\n```"),)


def file_rows(path: str, place: str, on_hub: tuple[str, str, str], folder: bool = False) -> Rows:
    """The rows of the .jsonl file `path`, else of `place` in $MTGRPO_DATA, else of data set, subset and split `on_hub`.

    folder: whether task.path is the file's folder. Raises ConfigError where `path` is no file, and where the data set
    cannot be loaded.
    """
    local, name = data_folder(), Path(place).name
    what = f"the folder of {name}" if folder else f"the file {name}"
    file = Path(path).expanduser() if path else local and local / place
    if file and file.is_file():
        return JsonlRows({file: file.stem})
    if path:
        raise ConfigError(f"task.path={path}: there is no such file; give {what}")
    lacks = f"{local} has no {place}" if local else "MTGRPO_DATA names the folder of all data sets and is not set"
    cure = f"set task.path to {what} ({lacks})"
    return HubRows(*on_hub, cure)


def folder_rows(path: str, stem: str) -> Rows:
    """The rows of the .jsonl or .parquet files in the folder `path` whose names begin with `stem`.

    Raises ConfigError when there is none, or some of both kinds.
    """
    folder = Path(path).expanduser()
    found = [sorted(folder.glob(f"{stem}*{suffix}")) for suffix in (".jsonl", ".parquet")]
    if all(found) or not any(found):
        what = "both" if all(found) else "neither"
        raise ConfigError(
            f"task.path={path} must be a folder with {stem}*.jsonl or {stem}*.parquet; it has {what} of them"
        )
    files = {file: file.stem for file in found[0] or found[1]}
    return JsonlRows(files) if found[0] else ParquetRows(files)


def data_folder() -> Path | None:
    """The folder of local data sets: $MTGRPO_DATA, else ../shared/data where that exists, else None.

    Raises ConfigError when $MTGRPO_DATA is set to something that is not a folder.
    """
    named = os.environ.get("MTGRPO_DATA")
    folder = Path(named or "../shared/data")
    if folder.is_dir():
        return folder
    if named:
        raise ConfigError(
            f"MTGRPO_DATA={named} is not a folder; set it to the folder that holds the data sets, or unset it"
        )
    return None


class HubRows(TableRows):
    """The rows of one split of a data set, downloaded once and mapped from disk.

    Raises ConfigError, ending in `cure`, when it cannot be loaded.
    """

    def __init__(self, path: str, subset: str, split: str, cure: str) -> None:
        super().__init__()
        self._data = _load(path, subset, split, cure)
        self.blocks = [len(self)]  # one run: any row is as cheap to read as any other
        self._name = f"{path} ({split})"
        self._split = split

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._written(self._data[index])

    def where(self, index: int) -> str:
        """The data set and the row, counted from 1."""
        return f"{self._name}, row {index + 1}"

    def default_id(self, index: int) -> str:
        """The split and the row's number."""
        return f"{self._split}/{index + 1}"

    def readings(self, column: str = "") -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Every row in order."""
        self._left_out.clear()
        return (functools.partial(self._written, row) for row in self._data)

    def notes(self) -> list[str]:
        """Of the first thousand rows."""
        for read in islice(self.readings(), 1000):
            read()
        return super().notes()


def _load(path: str, subset: str, split: str, cure: str) -> Any:
    refuse_without_package("datasets", "a data set of the hub", "data")
    what = f"the data set {path!r} (subset {subset or 'default'}, split {split})"
    with refuse_unloadable(what, path, cure, "datasets/"):  # which finds out whether the hub answers before the import
        import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

        load_dataset = cast("Any", datasets.load_dataset)  # pyright: ignore[reportUnknownMemberType]
        return load_dataset(path, subset or None, split=split)
