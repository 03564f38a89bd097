"""SVAMP: short word problems of one or two calculations."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import MATHS_SYSTEM_PROMPT, IndexedStream, Split, TaskStream, permuted, user
from mtgrpo.tasks.gsm8k import solve_with_calculator
from mtgrpo.tasks.published import Published
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Message, Task

_NUMBER = re.compile(r"\d+")
_WRAPPED = re.compile(r"\((?:[^()]|\([^()]*\))*\)")  # in parentheses of which the first closes at the end
_TRIES = 200  # a random division of two numbers seldom comes out even
_EVAL_FRACTION = 0.3  # the data set comes as one file; the share is that of its usual division, 700 to 300


@dataclass
class WordProblems(Published):
    """1,000 problems with an integer as the answer, about 300 of them held out (Patel et al. 2021, arXiv:2103.07191).

    Read from `path`, else from word_problems/svamp.jsonl in $MTGRPO_DATA, else from ChilleD/SVAMP on the Hugging Face
    hub. Demonstrations give the gold equation to the calculator.
    """

    system_prompt: Prompt = MATHS_SYSTEM_PROMPT
    path: Folder = ""  # a .jsonl file with Body, Question, Equation, Answer and ID
    vary_numbers: bool = False  # training problems get other numbers each time

    place = "word_problems"
    stem = "svamp"
    splits = ("train+test", "train+test")
    on_hub = ("ChilleD/SVAMP", "")
    layout = "SVAMP rows have ID, Body, Question, Equation and a number as Answer"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        return rows.divided(split, "ID", _EVAL_FRACTION)

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """As of every data set; with `vary_numbers` an endless one for training."""
        stream = super().stream(split, seed, repeat)
        if not self.vary_numbers or split is Split.eval:
            return stream
        rows = self.rows(split)
        chosen, bare = self.chosen(rows, split), replace(self, system_prompt="", prompt_template="", examples=0)

        def varied_at(index: int) -> Task:
            epoch, place = divmod(index, len(chosen))
            row = chosen[permuted(place, len(chosen), seed * 1_000_003 + epoch)]
            task = vary(bare.prompted(rows, row), random.Random(f"svamp/{seed}/{index}"))
            return replace(task, messages=self.with_prompt(task.messages))

        return IndexedStream(None, varied_at, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The gold equation as a calculator call; None where the calculator's result is not the answer."""
        return solve_with_calculator([(_plain(task.metadata.get("equation", "")), task.answer)], task.answer)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        number, body, question, equation = (str(row[name]).strip() for name in ("ID", "Body", "Question", "Equation"))
        answer = float(row["Answer"])
        told = f"{body} {question}" if body.endswith((".", "?", "!", ",")) else f"{body}. {question}"
        shown = str(int(answer)) if answer.is_integer() else str(answer)
        return Task(f"svamp/{number}", user(told), shown, {"equation": equation})


def vary(task: Task, rng: random.Random) -> Task:
    """The same story and equation with other numbers of as many digits, whose answer is a positive integer again.

    The unchanged task where a number of the equation is not in the text, or no numbers fit.
    """
    text, equation = task.messages[-1].content, _plain(task.metadata["equation"])
    olds = sorted(set(_NUMBER.findall(text)) - {"0", "1"})
    if not set(_NUMBER.findall(equation)) <= {*olds, "0", "1"}:
        return task
    for _ in range(_TRIES):
        new = {old: str(rng.randrange(max(2, 10 ** (len(old) - 1)), 10 ** len(old))) for old in olds}

        def renewed(part: str, new: dict[str, str] = new) -> str:
            return _NUMBER.sub(lambda number: new.get(number[0], number[0]), part)

        try:
            answer = Calculator()(renewed(equation))
        except ToolError:
            continue
        if answer.isdecimal() and answer != "0":
            return Task(task.id, user(renewed(text)), answer, {"equation": renewed(equation)})
    return task


def _plain(equation: str) -> str:
    """SVAMP's "( 290.0 / 2.0 )" as "290/2"."""
    plain = re.sub(r"\.0(?!\d)", "", equation.replace(" ", ""))
    return plain[1:-1] if _WRAPPED.fullmatch(plain) else plain
