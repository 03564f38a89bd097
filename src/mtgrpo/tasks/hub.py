"""Data sets of the Hugging Face hub, and the folder of local ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.hub import refuse_offline, try_hub
from mtgrpo.tasks import Columns, Rows, Split, TaskSource, TaskStream, task_from_row
from mtgrpo.types import Task

_CURE = (
    "correct task.path, task.subset, task.train_split or task.eval_split, or give files with task=jsonl or task=parquet"
)


@dataclass
class Hub(TaskSource):
    """Any data set that the package `datasets` can stream: a name on the hub, or a folder in the same layout.

    Rows are shuffled in a buffer, so only that is held in memory; resuming skips the rows that were delivered in
    this epoch. A row without an id is named by a hash of its prompt.
    Example: `task=hub task.path=openai/gsm8k task.subset=main task.columns.prompt=question`.
    """

    path: str = ""  # the name of a data set, such as openai/gsm8k, or a folder
    subset: str = ""  # which configuration of it; "" = its default
    train_split: str = "train"
    eval_split: str = "test"
    shuffle_buffer: int = 10_000  # rows
    columns: Columns = field(default_factory=Columns)

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when it cannot be loaded, is empty, or has a bad first row."""
        if not self.path:
            raise ConfigError("task.path is not set; give the name of a data set, such as openai/gsm8k")
        if self.shuffle_buffer < 1:
            raise ConfigError(f"task.shuffle_buffer must be at least 1 row, got {self.shuffle_buffer}")
        name = self.train_split if split is Split.train else self.eval_split
        data = _load(self.path, self.subset, name, streaming=True, cure=_CURE)
        return HubStream(self, data.shuffle(seed=seed, buffer_size=self.shuffle_buffer) if repeat else data, repeat)

    def task(self, row: Mapping[str, Any]) -> Task:
        """The task in one row of the data set."""
        task = task_from_row(row, self.columns, self.path, default_id="")
        text = "\n".join(message.content for message in task.messages)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Task(task.id or digest, self.with_prompt(task.messages), task.answer, task.metadata)


class HubStream:
    """A stream over a `datasets.IterableDataset`, one row ahead so that `epoch` rises with the last row of a pass."""

    endless = False

    def __init__(self, source: Hub, data: Any, repeat: bool) -> None:
        self.notes: list[str] = []
        self.epoch = 0
        self._position = 0  # rows delivered in this epoch
        self._source = source
        self._data = data
        self._repeat = repeat
        self._rows: Iterator[Mapping[str, Any]] = iter(())
        self._following: Mapping[str, Any] | None = None
        self._start()
        if self._following is None:
            raise ConfigError(
                f"task.path={source.path} has no rows in this split; see task.train_split and task.eval_split"
            )
        source.task(self._following)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        if self._following is None:
            raise StopIteration
        task = self._source.task(self._following)
        self._following = next(self._rows, None)
        self._position += 1
        if self._following is None:
            self.epoch += 1
            self._position = 0
            if self._repeat:
                self._start()
        return task

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream; JSON-serialisable."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which a stream opened with the same arguments gave."""
        self.epoch, self._position = state["epoch"], state["position"]
        if self.epoch and not self._repeat:
            self._following = None
        else:
            self._start()

    def _start(self) -> None:
        """Go to the present position of the present epoch."""
        self._data.set_epoch(self.epoch)
        self._rows = islice(iter(self._data), self._position, None)
        self._following = next(self._rows, None)


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


class HubRows(Rows):
    """The rows of one split of a data set, downloaded once and mapped from disk.

    Raises ConfigError, ending in `cure`, when it cannot be loaded.
    """

    def __init__(self, path: str, subset: str, split: str, cure: str) -> None:
        self._data = _load(path, subset, split, streaming=False, cure=cure)
        self.blocks = [len(self)]  # one run: any row is as cheap to read as any other
        self._name = f"{path} ({split})"
        self._split = split

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._data[index]

    def where(self, index: int) -> str:
        """The data set and the row, counted from 1."""
        return f"{self._name}, row {index + 1}"

    def default_id(self, index: int) -> str:
        """The split and the row's number."""
        return f"{self._split}/{index + 1}"

    def readings(self, column: str = "") -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Every row in order."""
        return (lambda row=row: row for row in self._data)


def _load(path: str, subset: str, split: str, streaming: bool, cure: str) -> Any:
    try:
        import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError(
            "data sets of the hub need the package datasets; install it with: pip install 'mtgrpo[data]'"
        ) from error
    try_hub(path)
    try:
        load_dataset = cast("Any", datasets.load_dataset)  # pyright: ignore[reportUnknownMemberType]
        return load_dataset(path, subset or None, split=split, streaming=streaming)
    except Exception as error:  # a missing name, a missing network and a broken file have no common base
        refuse_offline(path, f"the data set {path!r}", cure)
        raise ConfigError(
            f"the data set {path!r} (subset {subset or 'default'}, split {split}) could not be loaded: "
            f"{type(error).__name__}: {error}; {cure}"
        ) from error
