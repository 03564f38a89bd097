"""GSM8K: grade-school maths in several steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import MATHS_SYSTEM_PROMPT, IndexedStream, Rows, Split, TaskSource, TaskStream, cell
from mtgrpo.tasks.hub import HubRows, data_folder
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Message, Task, ToolCall

_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")


@dataclass
class Gsm8k(TaskSource):
    """7,473 problems to train on and 1,319 held out, answered by integers (Cobbe et al. 2021, arXiv:2110.14168).

    Read from `path`, else from the folder gsm8k in $MTGRPO_DATA, else from openai/gsm8k on the Hugging Face hub.
    Demonstrations call the calculator where the gold solution calculates.
    """

    system_prompt: str = MATHS_SYSTEM_PROMPT
    path: str = ""  # a folder with train.jsonl and test.jsonl

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the files are missing or of another layout."""
        name = "train" if split is Split.train else "test"
        rows = self._rows(name)

        def task_at(index: int) -> Task:
            return self._task(rows, index, name)

        task_at(0)
        return IndexedStream(len(rows), task_at, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The gold solution as calculator calls; None where the calculator does not reproduce it."""
        calculations = _CALCULATION.findall(task.metadata.get("solution", ""))
        return solve_with_calculator(calculations, task.answer)

    def _rows(self, name: str) -> Rows:
        local = data_folder()
        folder = Path(self.path).expanduser() if self.path else local and local / "gsm8k"
        file = folder and folder / f"{name}.jsonl"
        if file and file.is_file():
            return JsonlRows({file: file.stem})
        if self.path:
            raise ConfigError(
                f"task.path={self.path}: there is no file {file}; give the folder that holds train.jsonl and test.jsonl"
            )
        cure = "without a network, set task.path to its folder, or MTGRPO_DATA to the folder of all data sets"
        return HubRows("openai/gsm8k", "main", name, cure)

    def _task(self, rows: Rows, index: int, name: str) -> Task:
        row = rows[index]
        question, solution = cell(row, "question"), cell(row, "answer")
        reasoning, marker, answer = solution.rpartition("####") if isinstance(solution, str) else ("", "", "")
        if not isinstance(question, str) or not marker or not reasoning:
            raise ConfigError(
                f"{rows.where(index)}: GSM8K rows have a question and an answer that ends in '#### N'; the columns are "
                f"{', '.join(row)}; read files of another layout with task=jsonl, task.columns.prompt=NAME and "
                "task.columns.answer=NAME"
            )
        messages = self.with_prompt((Message("user", question),))
        number = answer.strip().replace(",", "")
        return Task(f"gsm8k/{name}/{index}", messages, number, {"solution": solution})


def solve_with_calculator(calculations: list[tuple[str, str]], answer: str) -> tuple[Message, ...] | None:
    """A conversation that makes each (expression, result) as one calculator call, then states the answer.

    None when there is nothing to calculate, the calculator gives another result, or the last one is not the answer.
    """
    calculator = Calculator()
    messages: list[Message] = []
    reply = ""
    for expression, result in calculations:
        try:
            reply = calculator(expression)
            agrees = Fraction(reply) == Fraction(result.strip())
        except (ToolError, ValueError):
            return None
        if not agrees:
            return None
        call = ToolCall("calculator", {"expression": expression})
        messages += [Message("assistant", tool_calls=(call,)), Message("tool", reply, name="calculator")]
    if not messages or Fraction(reply) != Fraction(answer):
        return None
    return (*messages, Message("assistant", f"#### {answer}"))
