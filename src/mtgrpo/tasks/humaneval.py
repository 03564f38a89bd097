"""HumanEval: Python functions to be completed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream
from mtgrpo.tasks.hub import HubRows
from mtgrpo.tasks.ifeval import file_rows
from mtgrpo.types import Message, Task

_COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass
class HumanEval(TaskSource):
    """164 functions to be written from signature and docstring, all held out (Chen et al. 2021, arXiv:2107.03374).

    Read from `path`, else from humaneval/HumanEval.jsonl in $MTGRPO_DATA, else from openai/openai_humaneval on the
    Hugging Face hub. The metadata have `setup`, code to run before the answer's, and `tests`, code to run after it,
    which raises where the answer is wrong. The answer is a reference solution.
    """

    system_prompt: str = "Answer with the whole function in one fenced code block."
    path: str = ""  # the file HumanEval.jsonl

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over split eval. Raises ConfigError for split train, a missing file and one of another layout."""
        if split is Split.train:
            raise ConfigError("task=humaneval is for evaluation alone; train on others, such as task=mbpp")
        hub = functools.partial(HubRows, "openai/openai_humaneval", "", "test")
        rows = file_rows(self.path, "humaneval/HumanEval.jsonl", hub)
        self._task(rows, 0)
        return IndexedStream(len(rows), lambda index: self._task(rows, index), seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The reference solution in a code block."""
        return in_code_block(task.answer)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        found = [row.get(name) for name in _COLUMNS]
        if not all(isinstance(one, str) for one in found):
            raise ConfigError(
                f"{rows.where(index)}: HumanEval rows have {', '.join(_COLUMNS)}, all of them text; the columns are "
                f"{', '.join(row)}"
            )
        task_id, prompt, entry_point, solution, test = map(str, found)
        messages = self.with_prompt((Message("user", f"Complete this function:\n\n```python\n{prompt.strip()}\n```"),))
        metadata = {"setup": prompt, "tests": f"{test}\ncheck({entry_point})\n", "entry_point": entry_point}
        return Task(f"humaneval/{task_id.rpartition('/')[2]}", messages, prompt + solution, metadata)


def in_code_block(code: str) -> tuple[Message, ...]:
    """An assistant's message that holds nothing but `code`."""
    return (Message("assistant", f"```python\n{code.strip()}\n```"),)
