"""What data sets that others have published have in common: a copy on disk, else the one on the Hugging Face hub."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Folder, Reach
from mtgrpo.runtime.files import find_near
from mtgrpo.tasks import IndexedStream, Split, TaskSource, TaskStream
from mtgrpo.tasks.rows import HubRows, Row, Rows, rows_of
from mtgrpo.types import Message, Task

TRIED = 20  # rows, of which one at least must be a task


@dataclass
class Published(TaskSource):
    """Base of published data sets. Write `task`, and `rows` or `chosen` where a split is not all rows of its files."""

    path: Folder = ""  # the file, or the folder

    place: ClassVar[str] = ""  # the folder in $MTGRPO_DATA
    stem: ClassVar[str] = "{}*"  # of the files in it; {} is the split, without which they hold all rows
    splits: ClassVar[tuple[str, str]] = ("train", "test")  # their names in files and on the hub
    on_hub: ClassVar[tuple[str, str] | None] = None  # data set and subset
    reaches: ClassVar[Reach] = Reach.network  # by being chosen, where there is no copy
    skips: ClassVar[bool] = False  # rows that are no task, with a note: anybody may have made the copy
    layout: ClassVar[str]  # what its rows have, for messages

    @abstractmethod
    def task(self, row: Row, rows: Rows, index: int) -> Task:
        """The task of `row`, which is row `index`, without the prompts that come before it.

        A KeyError, TypeError or ValueError says that the row is not as `layout` has it.
        """

    def rows(self, split: Split) -> Rows:
        """All rows, of which `chosen` are those of `split`. Raises ConfigError where they are not to be found."""
        name, local, copy, divided = self.splits[split is Split.eval], data_folder(), self.copy, "{}" in self.stem
        if copy and copy.is_file() and not divided:
            return rows_of({copy: copy.stem})
        ends = [f"{self.stem.format(name)}{suffix}" for suffix in (".jsonl", ".parquet")]
        jsonl, parquet = (sorted(copy.glob(end)) if copy else [] for end in ends)
        wanted = f"a folder with {' or '.join(ends)}{'' if divided else ', or such a file'}"
        if jsonl and parquet:
            raise ConfigError(f"task.path={self.path}: {copy} must be {wanted}; it has both of them")
        if jsonl or parquet:
            return rows_of({file: file.stem for file in jsonl or parquet})
        if self.path:
            raise ConfigError(f"task.path={self.path}: there is no such file; give {wanted}")
        lacks = (
            f"{local} has" if local else "MTGRPO_DATA, which names the folder of all data sets, is not set: there is"
        )
        cure = f"set task.path to {wanted} ({lacks} no {self.place}/{ends[0]})"
        if not self.on_hub:
            raise ConfigError(f"this data set is not on the hub: {cure}")
        return HubRows(*self.on_hub, name, cure)

    @property
    def copy(self) -> Path | None:
        """Where the copy on disk is: `path`, else `place` in $MTGRPO_DATA; None where neither is set."""
        local = data_folder()
        if self.path:
            return Path(self.path).expanduser()
        return local / self.place if local and self.place else None

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        """The numbers of the rows of `split`, ascending."""
        return range(len(rows))

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError where the data are missing or of another layout."""
        rows = self.rows(split)
        chosen = self.chosen(rows, split)
        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows for split {split.value}")
        self._try(rows, chosen[: TRIED if self.skips else 1])
        blocks = rows.blocks if len(chosen) == len(rows) else ()
        tasks = partial(self.prompted, rows)
        stream = IndexedStream(len(chosen), lambda index: tasks(chosen[index]), seed, repeat, blocks, self.skips)
        stream.notes += rows.notes()
        return stream

    def _try(self, rows: Rows, few: Sequence[int]) -> None:
        """Raises ConfigError, that of the first, where none of a few rows is a task."""
        refusals: list[ConfigError] = []
        for index in few:
            try:
                self.prompted(rows, index)
                return
            except ConfigError as error:
                refusals.append(error)
        raise refusals[0]

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
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("not a list of texts")
    return values


def in_code_block(code: str) -> tuple[Message, ...]:
    """An assistant's message that holds nothing but `code`."""
    return (Message("assistant", f"```python\n{code.strip()}\n```"),)


def data_folder() -> Path | None:
    """The folder of local data sets: $MTGRPO_DATA, else ../shared/data beside this folder or the project, else None.

    Raises ConfigError when $MTGRPO_DATA is set to something that is not a folder.
    """
    named = os.environ.get("MTGRPO_DATA")
    folder = Path(named) if named else find_near("../shared/data")
    if folder.is_dir():
        return folder
    if named:
        raise ConfigError(f"MTGRPO_DATA={named} is not a folder; set it to the folder of all data sets, or unset it")
    return None
