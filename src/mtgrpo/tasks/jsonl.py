"""Files of your own: what all formats share, and JSON Lines."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

from mtgrpo.errors import ConfigError
from mtgrpo.parts import File
from mtgrpo.runtime.files import parse_object, read_line, read_lines
from mtgrpo.tasks import Columns, IndexedStream, Rows, Split, TaskSource, TaskStream, task_from_row
from mtgrpo.types import Task

CHECKED_BYTES = 100_000_000  # files of less in all are checked whole at the start


class BadRows(Enum):
    """What becomes of a row that cannot be used."""

    skip = "skip"  # it is passed over, counted and the first one shown
    stop = "stop"  # the run does not begin; one that is found later ends it


@dataclass
class FileSource(TaskSource):
    """Base of the sources that read files of the user's own, whatever their format."""

    path: File = ""  # a file to train on, or a folder of files
    train_files: list[File] = field(default_factory=list[str])  # several of them, in place of `path`
    val_files: list[File] = field(default_factory=list[str])  # files and folders held out; [] = see `eval_fraction`
    eval_fraction: float = 0.1  # without `val_files`, the share of rows, by a hash of the id, that is never trained on
    columns: Columns = field(default_factory=Columns)
    bad_rows: BadRows = BadRows.skip  # files below 100 MB in all are checked whole at the start

    suffix: ClassVar[str]  # of the files that are read from a folder

    @abstractmethod
    def rows(self, files: Mapping[Path, str]) -> Rows:
        """Random access to the rows of `files`, each with its name in ids. Raises ConfigError for bad files."""

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError for missing files, an empty split, and rows as `bad_rows` says.

        Files that hold no row that can be used are refused whatever it says.
        """
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"task.eval_fraction must be in [0, 1), got {self.eval_fraction}")
        alone = split is Split.eval and self.val_files and not (self.path or self.train_files)  # one of `eval.sets`
        training, held_out = ([], list(self._held_out().values())) if alone else self._files()
        names = names_for_ids([*training, *held_out])
        files = held_out if split is Split.eval and held_out else training
        rows = self.rows({file: names[file] for file in files})
        chosen = self._chosen(rows, split)
        if not chosen:
            cure = f"all {len(rows)} rows fall to the other split; set task.val_files, or another task.eval_fraction"
            if not len(rows):
                cure = f"{' and '.join(map(str, files))} holds no rows; fill it, or name another file"
            given = f"{self._given()} task.val_files={_spelled(self.val_files)} task.eval_fraction={self.eval_fraction}"
            raise ConfigError(f"no rows for split {split.value}: {given}: {cure}")

        def task_at(index: int) -> Task:
            return self._task(rows, chosen[index], rows[chosen[index]])

        bounds = [bisect_left(chosen, start) for start in (0, *accumulate(rows.blocks))]
        blocks = [end - start for start, end in pairwise(bounds)]
        stream = IndexedStream(len(chosen), task_at, seed, repeat, blocks, self.bad_rows is BadRows.skip)
        if split is Split.train or held_out:
            stream.notes += self._checked(rows, files)
        return stream

    def _task(self, rows: Rows, number: int, row: Mapping[str, Any]) -> Task:
        task = task_from_row(row, self.columns, rows.where(number), rows.default_id(number))
        return Task(task.id, self.with_prompt(task.messages), task.answer, task.metadata)

    def tried(self, rows: Rows) -> Iterator[Task | ConfigError]:
        """Every row as a task, or what is wrong with it."""
        for index, read in enumerate(rows.readings()):
            try:
                yield self._task(rows, index, read())
            except ConfigError as error:
                yield error

    def _checked(self, rows: Rows, files: Sequence[Path]) -> list[str]:
        """What to say of the rows that cannot be used, by all of them, of large files by the first thousand."""
        large = sum(file.stat().st_size for file in files) > CHECKED_BYTES
        found = islice(self.tried(rows), 1000 if large else None)
        bad: list[ConfigError] = []
        count = 0
        for one in found:
            count += 1
            if isinstance(one, ConfigError):
                bad.append(one)
        if bad and (len(bad) == count or self.bad_rows is BadRows.stop):
            raise bad[0]
        said = f"{len(bad)} of the {count} rows that were checked cannot be used and are skipped; the first: "
        return [*([f"{said}{bad[0]}"] if bad else []), *rows.notes()]

    def _chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        if self.val_files or (split is Split.train and not self.eval_fraction):
            return range(len(rows))
        return rows.divided(split, self.columns.id, self.eval_fraction)

    def _files(self) -> tuple[list[Path], list[Path]]:
        """The files to train on and those held out; no file is among both, so a folder gives up what is held out."""
        if not self.path and not self.train_files:
            raise ConfigError(
                "task.path is not set and task.train_files is empty; give one of them: task.path=FILE "
                f"(a {self.suffix} file, or a folder of them) or task.train_files=[FILE,FILE]"
            )
        if self.path and self.train_files:
            raise ConfigError(
                f"task.path={self.path} and task.train_files={_spelled(self.train_files)} both name the training data; "
                "leave one of them out"
            )
        entries = [self.path] if self.path else self.train_files
        training = self._resolved(entries, self._given())
        held_out = self._held_out()
        for entry in entries:
            if Path(entry).expanduser().resolve() in held_out:
                raise ConfigError(
                    f"{self._given()} and task.val_files={_spelled(self.val_files)} both name the file {entry}; "
                    "leave it out of one of them"
                )
        remaining = [file for place, file in training.items() if place not in held_out]
        if not remaining:
            raise ConfigError(f"{self._given()} holds only the files of task.val_files={_spelled(self.val_files)}")
        return remaining, list(held_out.values())

    def _held_out(self) -> dict[Path, Path]:
        return self._resolved(self.val_files, f"task.val_files={_spelled(self.val_files)}")

    def _resolved(self, entries: Sequence[str], given: str) -> dict[Path, Path]:
        """The files of `entries`, by their resolved paths: a link to a file is that file."""
        files: dict[Path, Path] = {}
        for file in (file for entry in entries for file in self._files_at(entry, given)):
            if file.resolve() in files:
                raise ConfigError(f"{given} names the file {file} twice; name it once, or its folder alone")
            files[file.resolve()] = file
        return files

    def _files_at(self, name: str, given: str) -> list[Path]:
        if not name:
            raise ConfigError(f"{given}: a name is empty; give a {self.suffix} file, or a folder of them")
        path = Path(name).expanduser().absolute()
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise ConfigError(f"{given}: there is no such file or folder as {name} ({path})")
        files = sorted(path.glob(f"*{self.suffix}"))
        if not files:
            raise ConfigError(f"{given}: the folder {name} holds no {self.suffix} file")
        return files

    def _given(self) -> str:
        """The option that names the training files, as the user types it."""
        return f"task.path={self.path}" if self.path else f"task.train_files={_spelled(self.train_files)}"


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

    suffix: ClassVar[str] = ".jsonl"

    def rows(self, files: Mapping[Path, str]) -> Rows:
        """Random access to the lines of `files`."""
        return JsonlRows(files)


class JsonlRows(Rows):
    """Random access to the lines of JSON Lines files through an index of byte offsets; blank lines are skipped.

    `files` gives each file the name that it has in the ids of rows without one.
    """

    def __init__(self, files: Mapping[Path, str]) -> None:
        self._files = list(files)
        self._names = list(files.values())
        self._file_of = array("l")
        self._offset_of = array("q")
        self._line_of = array("q")
        for number, path in enumerate(files):
            for line in read_lines(path):
                if not line.text.isspace():
                    self._file_of.append(number)
                    self._offset_of.append(line.offset)
                    self._line_of.append(line.number)
        self.blocks = [len(self)]  # one run: any line is as cheap to read as any other

    def __len__(self) -> int:
        return len(self._offset_of)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        line = read_line(self._files[self._file_of[index]], self._offset_of[index])
        return parse_object(line, self.where(index))

    def where(self, index: int) -> str:
        """The file and the line, counted from 1."""
        return f"{self._files[self._file_of[index]]}, line {self._line_of[index]}"

    def default_id(self, index: int) -> str:
        """The name of the file and the line's number."""
        return f"{self._names[self._file_of[index]]}/{self._line_of[index]}"

    def readings(self, column: str = "") -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Every row in order; reads the files once."""
        lines = (line for path in self._files for line in read_lines(path) if not line.text.isspace())
        for index, line in enumerate(lines):
            yield functools.partial(parse_object, line.text, self.where(index))
