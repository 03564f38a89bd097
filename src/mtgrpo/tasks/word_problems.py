"""SVAMP: short word problems of one or two calculations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.extension import ConfigError
from mtgrpo.tasks import (
    MATHS_SYSTEM_PROMPT,
    IndexedStream,
    Rows,
    Split,
    TaskSource,
    TaskStream,
    data_folder,
)
from mtgrpo.tasks.gsm8k import solve_with_calculator
from mtgrpo.tasks.hub import HubRows
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.types import Message, Task

_EVAL_FRACTION = 0.3  # the data set comes as one file; the share is that of its usual division, 700 to 300


@dataclass
class WordProblems(TaskSource):
    """1,000 problems with an integer as the answer, about 300 of them held out (Patel et al. 2021, arXiv:2103.07191).

    Read from `path`, else from word_problems/svamp.jsonl in $MTGRPO_DATA, else from ChilleD/SVAMP on the Hugging Face
    hub.
    Demonstrations give the gold equation to the calculator.
    """

    system_prompt: str = MATHS_SYSTEM_PROMPT
    path: str = ""  # a .jsonl file with Body, Question, Equation, Answer and ID

    def open(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the file is missing or of another layout."""
        rows = self._rows()
        chosen = rows.divided(split, "ID", _EVAL_FRACTION)

        def task_at(index: int) -> Task:
            return self._task(rows, chosen[index])

        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows for {split.value}; it should have 1,000")
        task_at(0)
        return IndexedStream(len(chosen), task_at, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The gold equation as a calculator call; None where the calculator's result is not the answer."""
        equation = task.metadata.get("equation", "").replace(" ", "").removeprefix("(").removesuffix(")")
        return solve_with_calculator([(re.sub(r"\.0(?!\d)", "", equation), task.answer)], task.answer)

    def _rows(self) -> Rows:
        local = data_folder()
        file = Path(self.path).expanduser() if self.path else local and local / "word_problems" / "svamp.jsonl"
        if file and file.is_file():
            return JsonlRows([file])
        if self.path:
            raise ConfigError(f"task.path={self.path}: there is no such file; give the file svamp.jsonl")
        cure = "without a network, set task.path to the file svamp.jsonl, or MTGRPO_DATA to the folder of all data sets"
        return HubRows("ChilleD/SVAMP", "", "train+test", cure)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        try:
            number, body, question, equation = (
                str(row[name]).strip() for name in ("ID", "Body", "Question", "Equation")
            )
            answer = float(row["Answer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{rows.where(index)}: SVAMP rows have ID, Body, Question, Equation and a number as Answer; the "
                f"columns are {', '.join(row)}; read files of another layout with task=jsonl, task.columns.prompt=NAME "
                "and task.columns.answer=NAME"
            ) from error
        text = f"{body} {question}" if body.endswith((".", "?", "!", ",")) else f"{body}. {question}"
        messages = self.with_system_prompt((Message("user", text),))
        return Task(
            f"svamp/{number}",
            messages,
            str(int(answer)) if answer.is_integer() else str(answer),
            {"equation": equation},
        )
