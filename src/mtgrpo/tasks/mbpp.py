"""MBPP: short Python programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream
from mtgrpo.tasks.hub import HubRows
from mtgrpo.tasks.humaneval import in_code_block
from mtgrpo.tasks.ifeval import file_rows
from mtgrpo.types import Message, Task

_TRAIN, _EVAL = range(511, 975), range(11, 511)  # task_id; 1 to 10 are the examples of the paper's prompt
_BROKEN = {367, 927}  # their reference solutions fail their own tests on Python 3.11


@dataclass
class MBPP(TaskSource):
    """463 programs to train on and 499 held out, each with three tests (Austin et al. 2021, arXiv:2108.07732).

    Read from `path`, else from mbpp/mbpp.jsonl in $MTGRPO_DATA, else from google-research-datasets/mbpp on the Hugging
    Face hub. Left out are tasks 367 and 927, which no program passes. The metadata have `setup`, code to run before the
    answer's, and `tests`, code to run after it, which raises where the answer is wrong. The answer is a reference
    solution.
    """

    system_prompt: str = "Answer with the whole program in one fenced code block."
    path: str = ""  # the file mbpp.jsonl

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the file is missing or of another layout."""
        hub = functools.partial(HubRows, "google-research-datasets/mbpp", "full", "train+validation+test")
        rows = file_rows(self.path, "mbpp/mbpp.jsonl", hub)
        wanted = _TRAIN if split is Split.train else _EVAL
        numbers = [rows[index].get("task_id") for index in range(len(rows))]
        chosen = [index for index, number in enumerate(numbers) if number in wanted and number not in _BROKEN]
        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows of split {split.value}, task_id {wanted}")
        self._task(rows, chosen[0])
        return IndexedStream(len(chosen), lambda index: self._task(rows, chosen[index]), seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The reference solution in a code block."""
        return in_code_block(task.answer)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        text, code, setup = row.get("text"), row.get("code"), row.get("test_setup_code", "")
        tests: Any = row.get("test_list")
        if not (isinstance(text, str) and isinstance(code, str) and isinstance(tests, list) and tests):
            raise ConfigError(
                f"{rows.where(index)}: MBPP rows have task_id, text, code and a test_list; the columns are "
                f"{', '.join(row)}"
            )
        shown = "\n".join(map(str, tests))
        prompt = f"{text.strip()} The program must pass these tests:\n\n```python\n{shown}\n```"
        metadata = {"setup": setup, "tests": f"{shown}\n"}
        return Task(f"mbpp/{row['task_id']}", self.with_prompt((Message("user", prompt),)), _unix(code), metadata)


def _unix(code: str) -> str:
    return code.replace("\r\n", "\n").replace("\r", "\n")
