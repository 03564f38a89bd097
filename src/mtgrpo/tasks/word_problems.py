"""SVAMP: short word problems of one or two calculations."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import (
    MATHS_SYSTEM_PROMPT,
    IndexedStream,
    Rows,
    Split,
    TaskSource,
    TaskStream,
    permuted,
)
from mtgrpo.tasks.gsm8k import solve_with_calculator
from mtgrpo.tasks.hub import HubRows, data_folder
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Message, Task

_NUMBER = re.compile(r"\d+")
_TRIES = 200  # a random division of two numbers seldom comes out even
_EVAL_FRACTION = 0.3  # the data set comes as one file; the share is that of its usual division, 700 to 300


@dataclass
class WordProblems(TaskSource):
    """1,000 problems with an integer as the answer, about 300 of them held out (Patel et al. 2021, arXiv:2103.07191).

    Read from `path`, else from word_problems/svamp.jsonl in $MTGRPO_DATA, else from ChilleD/SVAMP on the Hugging Face
    hub. Demonstrations give the gold equation to the calculator.
    """

    system_prompt: str = MATHS_SYSTEM_PROMPT
    path: str = ""  # a .jsonl file with Body, Question, Equation, Answer and ID
    vary_numbers: bool = False  # training problems get other numbers each time

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the file is missing or of another layout."""
        rows = self._rows()
        chosen = rows.divided(split, "ID", _EVAL_FRACTION)

        def task_at(index: int) -> Task:
            return self._task(rows, chosen[index])

        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows for {split.value}; it should have 1,000")

        def varied_at(index: int) -> Task:
            epoch, place = divmod(index, len(chosen))
            row = chosen[permuted(place, len(chosen), seed * 1_000_003 + epoch)]
            return vary(self._task(rows, row), random.Random(f"svamp/{seed}/{index}"))

        task_at(0)
        if self.vary_numbers and split is Split.train:
            return IndexedStream(None, varied_at, seed, repeat)
        return IndexedStream(len(chosen), task_at, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The gold equation as a calculator call; None where the calculator's result is not the answer."""
        return solve_with_calculator([(_plain(task.metadata.get("equation", "")), task.answer)], task.answer)

    def _rows(self) -> Rows:
        local = data_folder()
        file = Path(self.path).expanduser() if self.path else local and local / "word_problems" / "svamp.jsonl"
        if file and file.is_file():
            return JsonlRows({file: file.stem})
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
        messages = self.with_prompt((Message("user", text),))
        return Task(
            f"svamp/{number}",
            messages,
            str(int(answer)) if answer.is_integer() else str(answer),
            {"equation": equation},
        )


def vary(task: Task, rng: random.Random) -> Task:
    """The same story and equation with other numbers of as many digits, whose answer is a positive integer again.

    The unchanged task where a number of the equation is not in the text, or no numbers fit.
    """
    text, equation = task.messages[-1].content, _plain(task.metadata["equation"])
    olds = sorted(set(_NUMBER.findall(text)) - {"0", "1"})
    if not set(_NUMBER.findall(equation)) <= {*olds, "0", "1"}:
        return task
    calculator = Calculator()
    for _ in range(_TRIES):
        new = {old: str(rng.randrange(max(2, 10 ** (len(old) - 1)), 10 ** len(old))) for old in olds}

        def renewed(part: str, new: dict[str, str] = new) -> str:
            return _NUMBER.sub(lambda number: new.get(number[0], number[0]), part)

        try:
            answer = calculator(renewed(equation))
        except ToolError:
            continue
        if answer.isdecimal() and answer != "0":
            message = Message("user", renewed(text))
            return Task(task.id, (*task.messages[:-1], message), answer, {"equation": renewed(equation)})
    return task


def _plain(equation: str) -> str:
    """SVAMP's "( 290.0 / 2.0 )" as "290/2"."""
    return re.sub(r"\.0(?!\d)", "", equation.replace(" ", "").removeprefix("(").removesuffix(")"))
