"""IFEval: prompts whose instructions a program can check."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Folder
from mtgrpo.tasks import Split, user
from mtgrpo.tasks.published import Published, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.types import Task

_HELD_OUT = 100  # prompts, of 541


@dataclass
class IFEvalTasks(Published):
    """541 prompts with 834 instructions of 25 kinds, graded by reward=ifeval (Zhou et al. 2023, arXiv:2311.07911).

    Read from `path`, else from ifeval/input_data.jsonl in $MTGRPO_DATA, else from google/IFEval on the Hugging Face
    hub. The data set is one for evaluation alone; here the 100 prompts whose key has the smallest SHA-256 are held out.
    """

    path: Folder = ""  # a .jsonl file with key, prompt, instruction_id_list and kwargs

    place = "ifeval"
    stem = "input_data"
    splits = ("train", "train")
    on_hub = ("google/IFEval", "")
    layout = "IFEval rows have key, prompt, instruction_id_list and as many kwargs"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        """By the SHA-256 of the keys. Raises ConfigError where there are too few."""
        order = sorted(range(len(rows)), key=lambda index: _digest(rows, index))
        if len(rows) <= _HELD_OUT and split is Split.train:
            raise ConfigError(f"task.path={self.path}: {_HELD_OUT} prompts are held out, and it has only {len(rows)}")
        return sorted(order[:_HELD_OUT] if split is Split.eval else order[_HELD_OUT:])

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        metadata = {"instruction_id_list": row["instruction_id_list"], "kwargs": row["kwargs"]}
        if not all(isinstance(one, list) for one in metadata.values()) or len({*map(len, metadata.values())}) > 1:
            raise ValueError("instruction_id_list and kwargs")
        return Task(f"ifeval/{row['key']}", user(text(row, "prompt")), "", metadata)


def _digest(rows: Rows, index: int) -> str:
    key = rows[index].get("key")
    if key is None:
        raise ConfigError(f"{rows.where(index)}: no column 'key', which says whether the prompt is held out")
    return hashlib.sha256(str(key).encode()).hexdigest()
