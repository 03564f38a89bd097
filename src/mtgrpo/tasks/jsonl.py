"""Files of your own: what all formats share, and JSON Lines."""

import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from mtgrpo.errors import ConfigError, beside
from mtgrpo.parts import File
from mtgrpo.parts.extension import digest
from mtgrpo.tasks import Split, TaskSource, TaskStream
from mtgrpo.tasks.rows import NOTED_ROWS, Columns, JsonlRows, Row, Rows, stream_over, task_from_row
from mtgrpo.types import Task

T = TypeVar("T")
RARE = 0.25  # of rows: a column that no more of them lack is one they should have
CHECKED_BYTES = 100_000_000  # files of less in all are checked whole at the start


class RowFaults:
    """What is wrong with rows that are looked at one after the other."""

    def __init__(self, rows: Rows, answer: str) -> None:
        """answer: the column of answers."""
        self.unusable: dict[int, str] = {}  # by the number of the row
        self._rows, self._answer = rows, answer
        self._repeated: dict[int, str] = {}
        self._with: dict[frozenset[str], array[int]] = {}  # the rows of each set of further columns
        self._readable, self._unanswered = 0, array("q")
        self._first: dict[str, int] = {}  # the row of each id that a row brings

    def add(self, number: int, row: Any) -> bool:
        """Look at a task, a passage, or the ConfigError in its place; whether there is one of a new id."""
        if isinstance(row, ConfigError):
            self.unusable[number] = str(row)
            return False
        self._readable += 1
        if isinstance(row, Task):
            self._with.setdefault(frozenset(row.metadata), array("q")).append(number)
            if not row.answer:
                self._unanswered.append(number)
        if row.id == self._rows.default_id(number) or (earlier := self._first.setdefault(row.id, number)) == number:
            return True
        where = self._rows.where
        self._repeated[number] = (
            f"{where(number)}: the id {row.id!r} is that of {where(earlier)} already, and results go by ids: change it"
        )
        return False

    @property
    def unanswered(self) -> bool:
        """Whether no row that can be read has an answer."""
        return len(self._unanswered) == self._readable > 0

    @property
    def others(self) -> dict[int, str]:
        """What is wrong with rows that can be read."""
        missing = f"no answer in column {self._answer!r}, which other rows have"
        unanswered = [] if self.unanswered else self._unanswered
        return {number: f"{self._rows.where(number)}: {missing}" for number in unanswered} | self._repeated

    @property
    def lacking(self) -> dict[int, str]:
        """The rows without a further column that nearly all others have, which may be meant to be so."""
        found: dict[int, str] = {}
        for column in sorted(frozenset().union(*self._with)):
            rows = [number for columns, some in self._with.items() if column not in columns for number in some]
            if len(rows) <= RARE * self._readable:
                found |= {n: f"{self._rows.where(n)}: no column {column!r}, which other rows have" for n in rows}
        return found

    def described(self, faults: Mapping[int, str]) -> list[str]:
        """A line for each kind of fault: the first row that has it, and how many more do."""
        alike: dict[str, list[int]] = {}
        for number in sorted(faults):
            kind = re.sub(r"\(.*|the id .*", "", faults[number].removeprefix(self._rows.where(number)), flags=re.DOTALL)
            alike.setdefault(kind, []).append(number)
        lines: list[str] = []
        for first, *more in alike.values():
            where = self._rows.where(first)
            lines.append(f"{where}{f' and {len(more):,} more' if more else ''}{faults[first].removeprefix(where)}")
        return lines


class BadRows(Enum):
    """What becomes of a row that cannot be used."""

    skip = "skip"  # it is passed over, counted and the first one shown
    stop = "stop"  # the run does not begin; one that is found later ends it


@dataclass
class FileSource(TaskSource, ABC, eval_fraction=">= 0 and < 1"):
    """Base of the sources that read files of the user's own, whatever their format."""

    path: File = ""  # a file to train on, or a folder of files
    train_files: list[File] = field(default_factory=list[str])  # several of them, in place of `path`
    val_files: list[File] = field(default_factory=list[str])  # files and folders held out; [] = see `eval_fraction`
    eval_fraction: float = 0.1  # without `val_files`, the share of rows, by a hash of the id, that is never trained on
    columns: Columns = field(default_factory=Columns)
    bad_rows: BadRows = BadRows.skip  # files below 100 MB in all are checked whole at the start

    suffix: ClassVar[str] = ".jsonl"  # of the files that are read from a folder
    mixed = cast("Sequence[FileSource]", ())  # with which others, whose rows have other ids

    @abstractmethod
    def rows(self, files: Mapping[Path, str]) -> Rows:
        """Random access to the rows of `files`, each with its name in ids. Raises ConfigError for bad files."""

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError for missing files, an empty split, and rows as `bad_rows` says.

        Files that hold no row that can be used are refused whatever it says.
        """
        alone = split is Split.eval and self.val_files and not (self.path or self.train_files)  # one of `eval.sets`
        held_out = self._resolved(self.val_files, self._given_held_out)
        training = [] if alone else self._training(held_out)
        given = [(one, name) for one in self.mixed for name in (one.path, *one.train_files, *one.val_files) if name]
        of_others = chain(*(one._files_at(name, one._given) for one, name in given))
        every = {file.resolve(): file for file in (*of_others, *training, *held_out.values())}
        names = names_for_ids([*every.values()])
        for file in names:
            digest(file)
        files = list(held_out.values()) if split is Split.eval and held_out else training
        rows = self.rows({file: names[file] for file in files})
        chosen: Sequence[int] = range(len(rows))
        if not (self.val_files or (split is Split.train and not self.eval_fraction)):
            chosen = rows.divided(split, self.columns.id, self.eval_fraction)
        if not chosen:
            cure = f"{' and '.join(map(str, files))} holds no rows; fill it, or name another file"
            if len(rows):
                known = self._checked(rows, files)
                cure = "or set task.val_files" if known else "set task.val_files, or another task.eval_fraction"
                cure = f"all {len(rows)} rows fall to the other split; {'; '.join((*known, cure))}"
            options = f"{self._given} {self._given_held_out} task.eval_fraction={self.eval_fraction}"
            raise ConfigError(f"no rows for split {split.value}: {options}: {cure}")
        skips = self.bad_rows is BadRows.skip
        stream = stream_over(rows, chosen, lambda number: self.task(rows, number, rows[number]), seed, repeat, skips)
        if split is Split.train or held_out:
            stream.notes += self._checked(rows, files)
        return stream

    def task(self, rows: Rows, number: int, row: Row) -> Task:
        """The task in a row. Raises ConfigError where it cannot be used."""
        task = task_from_row(row, self.columns, rows.where(number), rows.default_id(number))
        return replace(task, messages=self.with_prompt(task.messages))

    def tried(self, rows: Rows) -> Iterator[Task | ConfigError]:
        """Every row as a task, or what is wrong with it."""
        return each_tried(rows, lambda number, row: self.task(rows, number, row))

    def _checked(self, rows: Rows, files: Sequence[Path]) -> list[str]:
        """What to say of the rows that cannot be used, by all of them, of large files by the first thousand."""
        large = sum(file.stat().st_size for file in files) > CHECKED_BYTES
        count = min(len(rows), NOTED_ROWS) if large else len(rows)
        faults = RowFaults(rows, self.columns.answer)
        for number, row in enumerate(islice(self.tried(rows), count)):
            faults.add(number, row)
        errors = list(faults.unusable.values())
        if errors and (len(errors) == count or self.bad_rows is BadRows.stop):
            raise ConfigError(errors[0])
        summary = f"{len(errors)} of the {count} rows that were checked cannot be used and are skipped; the first: "
        return [
            *(f"{summary}{error}" for error in errors[:1]),
            *faults.described(faults.lacking | faults.others),
            *rows.notes(),
        ]

    def _training(self, held_out: Mapping[Path, Path]) -> list[Path]:
        """The files to train on; none of them is held out, so a folder gives up what is."""
        if bool(self.path) == bool(self.train_files):
            cure = f"task.path=FILE (a {self.suffix} file, or a folder of them) or 'task.train_files=[FILE,FILE]'"
            both = f"task.path={self.path} and task.train_files={_spelled(self.train_files)}: give one, not both: "
            raise ConfigError(f"{both}{cure}" if self.path else f"no file of tasks is named: give {cure}")
        entries = [self.path] if self.path else self.train_files
        training = self._resolved(entries, self._given)
        for entry in entries:
            if Path(entry).expanduser().resolve() in held_out:
                raise ConfigError(f"{self._given} and {self._given_held_out} both name the file {entry}; choose one")
        remaining = [file for place, file in training.items() if place not in held_out]
        if not remaining:
            raise ConfigError(f"{self._given} holds only the files of {self._given_held_out}")
        return remaining

    def _resolved(self, entries: Sequence[str], option: str) -> dict[Path, Path]:
        """The files of `entries`, by their resolved paths: a link to a file is that file."""
        files: dict[Path, Path] = {}
        for file in (file for entry in entries for file in self._files_at(entry, option)):
            if file.resolve() in files:
                raise ConfigError(f"{option} names the file {file} twice; name it once, or its folder alone")
            files[file.resolve()] = file
        return files

    def _files_at(self, name: str, option: str) -> list[Path]:
        path = Path(name).expanduser().absolute()
        files = [path] if path.is_file() else sorted(path.glob(f"*{self.suffix}"))
        if not name or not files:
            where = f"{name!r} ({path}){beside(path)}"
            raise ConfigError(f"{option}: no such file or folder of {self.suffix} files: {where}")
        return files

    @property
    def _given(self) -> str:
        """The option that names the training files, as the user types it."""
        return f"task.path={self.path}" if self.path else f"task.train_files={_spelled(self.train_files)}"

    @property
    def _given_held_out(self) -> str:
        return f"task.val_files={_spelled(self.val_files)}"


def each_tried(rows: Rows, make: Callable[[int, Row], T]) -> Iterator[T | ConfigError]:
    """What `make` makes of every row, by its number, or what is wrong with the row."""
    for number, read in enumerate(rows.readings()):
        try:
            yield make(number, read())
        except ConfigError as error:
            yield error


def names_for_ids(files: Sequence[Path]) -> dict[Path, str]:
    """A name for each file: its stem, or, where several have that stem, its path below the folder they share."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault(file.stem, []).append(file)
    names: dict[Path, str] = {}
    for stem, group in alike.items():
        shared = os.path.commonpath([file.parent for file in group])
        names |= {file: stem if len(group) == 1 else file.relative_to(shared).as_posix() for file in group}
    return names


def _spelled(names: Sequence[str]) -> str:
    return f"[{','.join(names)}]"


@dataclass
class Jsonl(FileSource):
    """One JSON object per line: a prompt (or messages), and an answer and an id if there are any.

    Only the position of each line is held in memory.
    Example: `task=jsonl task.path=problems.jsonl task.columns.prompt=question`.
    """

    def rows(self, files: Mapping[Path, str]) -> Rows:
        return JsonlRows(files)
