"""GSM8K: grade-school maths in several steps."""

import re
from dataclasses import dataclass
from fractions import Fraction

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import MATHS_SYSTEM_PROMPT, called, user
from mtgrpo.tasks.published import Published, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Message, Task

_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")


@dataclass
class Gsm8k(Published):
    """7,473 problems to train on and 1,319 held out, answered by integers (Cobbe et al. 2021, arXiv:2110.14168).

    Read from `path`, else from the folder gsm8k in $MTGRPO_DATA, else from openai/gsm8k on the Hugging Face hub.
    Demonstrations call the calculator where the gold solution calculates.
    """

    system_prompt: Prompt = MATHS_SYSTEM_PROMPT
    path: Folder = ""  # a folder with train.jsonl and test.jsonl

    place = "gsm8k"
    stem = "{}"
    on_hub = ("openai/gsm8k", "main")
    layout = "GSM8K rows have a question and an answer that ends in '#### N'"

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The gold solution as calculator calls; None where the calculator does not reproduce it."""
        calculations = _CALCULATION.findall(task.metadata.get("solution", ""))
        return solve_with_calculator(calculations, task.answer)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        solution = text(row, "answer")
        reasoning, _, answer = solution.rpartition("####")
        if not reasoning:
            raise ValueError("answer")
        _, name, _ = rows.place(index)
        number = answer.strip().replace(",", "")
        return Task(f"gsm8k/{name}/{index}", user(text(row, "question")), number, {"solution": solution})


def solve_with_calculator(calculations: list[tuple[str, str]], answer: str) -> tuple[Message, ...] | None:
    """A conversation that makes each (expression, result) as one calculator call, then states the answer.

    None when there is nothing to calculate, the calculator gives another result, or the last one is not the answer.
    """
    calculator = Calculator()
    messages: list[Message] = []
    right = False
    for expression, result in calculations:
        try:
            reply = calculator(expression)
            if Fraction(reply) != Fraction(result.strip()):
                return None
            right = Fraction(reply) == Fraction(answer)
        except (ToolError, ValueError, ZeroDivisionError):
            return None
        messages += called("calculator", {"expression": expression}, reply)
    if not right:
        return None
    return (*messages, Message("assistant", f"#### {answer}"))
