"""IFEval: prompts whose instructions a program can check."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream, cell
from mtgrpo.tasks.hub import HubRows, data_folder
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.types import Message, Task

_HELD_OUT = 100  # prompts, of 541


@dataclass
class IFEval(TaskSource):
    """541 prompts with 834 instructions of 25 kinds, graded by reward=ifeval (Zhou et al. 2023, arXiv:2311.07911).

    Read from `path`, else from ifeval/input_data.jsonl in $MTGRPO_DATA, else from google/IFEval on the Hugging Face
    hub. The data set is one for evaluation alone; here the 100 prompts whose key has the smallest SHA-256 are held out.
    """

    path: str = ""  # a .jsonl file with key, prompt, instruction_id_list and kwargs

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the file is missing or of another layout."""
        rows = file_rows(self.path, "ifeval/input_data.jsonl", functools.partial(HubRows, "google/IFEval", "", "train"))
        order = sorted(range(len(rows)), key=lambda index: _digest(rows, index))
        chosen = sorted(order[:_HELD_OUT] if split is Split.eval else order[_HELD_OUT:])
        if not chosen:
            raise ConfigError(f"task.path={self.path}: {_HELD_OUT} prompts are held out, and it has only {len(rows)}")
        self._task(rows, chosen[0])
        return IndexedStream(len(chosen), lambda index: self._task(rows, chosen[index]), seed, repeat)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        prompt, kinds, given = row.get("prompt"), row.get("instruction_id_list"), row.get("kwargs")
        if not (isinstance(prompt, str) and isinstance(kinds, list) and isinstance(given, list)) or len(kinds) != len(
            given
        ):
            raise ConfigError(
                f"{rows.where(index)}: IFEval rows have key, prompt, instruction_id_list and as many kwargs; the "
                f"columns are {', '.join(row)}"
            )
        metadata = {"instruction_id_list": kinds, "kwargs": given}
        return Task(f"ifeval/{row['key']}", self.with_prompt((Message("user", prompt),)), "", metadata)


def _digest(rows: Rows, index: int) -> str:
    key = cell(rows[index], "key")
    if key is None:
        raise ConfigError(f"{rows.where(index)}: no column 'key', which says whether the prompt is held out")
    return hashlib.sha256(str(key).encode()).hexdigest()


def file_rows(path: str, place: str, hub: Callable[[str], Rows]) -> Rows:
    """The rows of the .jsonl file `path`, else of `place` in $MTGRPO_DATA, else what `hub` gives.

    `hub` is called with the cure for the case that there is no network. Raises ConfigError when `path` is no file.
    """
    local = data_folder()
    file = Path(path).expanduser() if path else local and local / place
    if file and file.is_file():
        return JsonlRows({file: file.stem})
    name = Path(place).name
    if path:
        raise ConfigError(f"task.path={path}: there is no such file; give the file {name}")
    return hub(f"without a network, set task.path to the file {name}, or MTGRPO_DATA to the folder of all data sets")
