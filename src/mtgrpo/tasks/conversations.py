"""Conversations that are already written: to learn from them, and to be asked the same again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from
from mtgrpo.tasks.jsonl import FileSource
from mtgrpo.tasks.rows import JsonlRows, Row, Rows, cell, columns_of
from mtgrpo.types import Message, Task

_SAID = "said"
# Columns that `mtgrpo collect` writes in some rows alone.
_AT_TIMES = ("components", "turn_rewards", "outages", "output", "counts", "retried", "untrained", "calls", "times")


@dataclass
class Conversations(FileSource):
    """JSON Lines of `messages`, as most libraries fine-tune on them and `mtgrpo collect` writes them.

    What stands before the first assistant's message is the task, the rest its demonstration; what a column `metadata`
    holds becomes the task's metadata, as other columns do. So
    `mtgrpo sft task=conversations task.path=FILE` learns from them; `sft.demonstrations=FILE` does beside other tasks.
    """

    def rows(self, files: Mapping[Path, str]) -> Rows:
        return JsonlRows(files)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.metadata[_SAID]

    def task(self, rows: Rows, number: int, row: Row) -> Task:
        where, column = rows.where(number), self.columns.messages
        values: Any = cell(row, column)
        if not isinstance(values, list):
            cure = "call the column of messages so, or with task=conversations give task.columns.messages=NAME"
            raise ConfigError(f"{where}: no list of messages in column {column!r}; {columns_of(row)}; {cure}")
        messages = messages_from(cast("list[Any]", values), where)
        first = next((n for n, message in enumerate(messages) if message.role == "assistant"), 0)
        if not first:
            raise ConfigError(f"{where}: needs a message before the first of an assistant, and one of an assistant")
        collected_row = {"turns", "status"} <= row.keys()
        kept = {name: value for name, value in row.items() if not collected_row or name not in _AT_TIMES}
        task = super().task(rows, number, {**kept, self.columns.prompt: values[:first]})
        own: Any = task.metadata.get("metadata")  # of the task that was collected
        collected = cast("Row", own) if isinstance(own, Mapping) else {}
        return replace(task, metadata={**task.metadata, **collected, _SAID: messages[first:]})
