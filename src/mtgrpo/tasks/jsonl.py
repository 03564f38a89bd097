"""Files of your own: what all formats share, and JSON Lines."""

from __future__ import annotations

import json
from abc import abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

from mtgrpo.extension import ConfigError
from mtgrpo.tasks import Columns, IndexedStream, Rows, Split, TaskSource, TaskStream, task_from_row
from mtgrpo.types import Task


@dataclass
class FileSource(TaskSource):
    """Base of the sources that read files of the user's own, whatever their format."""

    path: str = ""  # a file, or a folder of files
    eval_path: str = ""  # the same, held out; "" = hold out `eval_fraction` of `path`
    eval_fraction: float = 0.1  # the share of rows, chosen by a hash of the id, that is never trained on
    columns: Columns = field(default_factory=Columns)

    suffix: ClassVar[str]  # of the files looked for in a folder

    @abstractmethod
    def rows(self, files: Sequence[Path]) -> Rows:
        """Random access to the rows of `files`. Raises ConfigError where one cannot be read."""

    def open(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError for missing files, an empty split and a bad first row."""
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"task.eval_fraction must be in [0, 1), got {self.eval_fraction}")
        rows = self.rows(self._files(split))
        chosen = self._chosen(rows, split)
        if not chosen:
            raise ConfigError(
                f"no rows for split {split.value}: task.path={self.path} task.eval_path={self.eval_path} "
                f"task.eval_fraction={self.eval_fraction}; set task.eval_path, or another task.eval_fraction"
            )

        def task_at(index: int) -> Task:
            row = chosen[index]
            task = task_from_row(rows[row], self.columns, rows.where(row), rows.default_id(row))
            return Task(task.id, self.with_system_prompt(task.messages), task.answer, task.metadata)

        task_at(0)
        bounds = [bisect_left(chosen, start) for start in (0, *accumulate(rows.blocks))]
        return IndexedStream(len(chosen), task_at, seed, repeat, [end - start for start, end in pairwise(bounds)])

    def _chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        if self.eval_path or (split is Split.train and not self.eval_fraction):
            return range(len(rows))
        return rows.divided(split, self.columns.id, self.eval_fraction)

    def _files(self, split: Split) -> list[Path]:
        if split is Split.eval and self.eval_path:
            return self._files_at(self.eval_path, "task.eval_path")
        files = self._files_at(self.path, "task.path")
        held_out_files = self._files_at(self.eval_path, "task.eval_path") if self.eval_path else []
        training = [file for file in files if file not in held_out_files]
        if not training:
            raise ConfigError(f"task.path={self.path} holds only the held-out files of task.eval_path={self.eval_path}")
        return training

    def _files_at(self, name: str, option: str) -> list[Path]:
        if not name:
            raise ConfigError(f"{option} is not set; give a {self.suffix} file, or a folder of them")
        path = Path(name).expanduser().resolve()
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise ConfigError(f"{option}={name}: there is no such file or folder (looked for {path})")
        files = sorted(path.glob(f"*{self.suffix}"))
        if not files:
            raise ConfigError(f"{option}={name}: the folder holds no {self.suffix} file")
        return files


@dataclass
class Jsonl(FileSource):
    """One JSON object per line: a prompt (or messages), and an answer and an id if there are any.

    Only the position of each line is held in memory.
    Example: `task=jsonl task.path=problems.jsonl task.columns.prompt=question`.
    """

    suffix: ClassVar[str] = ".jsonl"

    def rows(self, files: Sequence[Path]) -> Rows:
        """Random access to the lines of `files`."""
        return JsonlRows(files)


class JsonlRows(Rows):
    """Random access to the lines of JSON Lines files through an index of byte offsets; blank lines are skipped."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._file_of = array("l")
        self._offset_of = array("q")
        self._line_of = array("q")
        for number, path in enumerate(files):
            offset = 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, 1):
                    if not line.isspace():
                        self._file_of.append(number)
                        self._offset_of.append(offset)
                        self._line_of.append(line_number)
                    offset += len(line)
        self.blocks = [len(self)]  # any line is as cheap to read as any other

    def __len__(self) -> int:
        return len(self._offset_of)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with self._files[self._file_of[index]].open("rb") as file:
            file.seek(self._offset_of[index])
            return self._parse(file.readline(), index)

    def where(self, index: int) -> str:
        """The file and the line, counted from 1."""
        return f"{self._files[self._file_of[index]]}, line {self._line_of[index]}"

    def default_id(self, index: int) -> str:
        """The name of the file and the line's number."""
        return f"{self._files[self._file_of[index]].stem}/{self._line_of[index]}"

    def ids(self, column: str) -> Iterator[str]:
        """The id of every row; reads the files once."""
        index = 0
        for path in self._files:
            with path.open("rb") as file:
                for line in file:
                    if not line.isspace():
                        yield self.id_of(index, self._parse(line, index), column)
                        index += 1

    def _parse(self, line: bytes, index: int) -> Mapping[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{self.where(index)}: not valid JSON ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f'{self.where(index)}: a row must be a JSON object such as {{"prompt": ...}}, got {line[:80]!r}'
            )
        return cast("dict[str, Any]", row)
