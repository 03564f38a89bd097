"""Generated word problems of one calculation: for small pretrained models, which can read but hardly calculate."""

import random
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Text
from mtgrpo.tasks import Generated, Split, held_out, user
from mtgrpo.tasks.calculator import NAMES
from mtgrpo.types import Message, Task

THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "stickers")
STORIES = {
    "+": (
        "{name} has {a} {things}. {name} gets {b} more {things}. How many {things} does {name} have in all?",
        "{name} has {a} {things} and {other} has {b} {things}. How many {things} do they have together?",
        "There are {a} {things} in one box and {b} {things} in another box. How many {things} are there in total?",
    ),
    "-": (
        "{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
        "There are {a} {things} in a box. {name} takes {b} of them out. How many {things} are left in the box?",
        "{name} has {a} {things} and {other} has {b} {things}. How many more {things} does {name} have than {other}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} in each box. How many {things} does {name} have in all?",
        "{name} buys {a} {things} every day for {b} days. How many {things} does {name} buy in total?",
        "There are {a} children and each child has {b} {things}. How many {things} do they have together?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        "{name} puts {a} {things} into boxes of {b} {things} each. How many boxes does {name} fill?",
        "{a} {things} lie in {b} boxes, the same number in each box. How many {things} are in one box?",
    ),
}
_EVAL_FRACTION = 0.2
_ENOUGH = ">= 9 (or there are too few pairs of numbers to hold some out)"


@dataclass
class OneStep(Generated, largest=_ENOUGH, largest_factor=_ENOUGH):
    """Short stories about one sum, difference, product or quotient; the answer is one integer after `####`.

    Held out by construction: a fifth of all pairs of numbers that are calculated with (quotient and divisor in a
    division) appears in `eval` tasks only, in either order and with any operator.
    """

    operators: Text = "+-*/"  # equally often
    largest: int = 59  # number of a sum or a difference; the smallest is 2
    largest_factor: int = 12  # number of a product, divisor and quotient of a division; the smallest is 2

    def __post_init__(self) -> None:
        if not self.operators or not set(self.operators) <= set(STORIES):
            raise ConfigError(f"task.operators must be some of {''.join(STORIES)}, got {self.operators!r}")
        super().__post_init__()

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        return (Message("assistant", f"{task.metadata['calculation']} = {task.answer}\n#### {task.answer}"),)

    def task(self, split: Split, seed: int, index: int) -> Task:
        task_id = f"one_step/{seed}/{split.value}/{index}"
        rng = random.Random(task_id)
        operator = rng.choice(self.operators)
        low, high = self._pair(rng, operator, split)
        a, b, answer = {
            "+": (low, high, low + high),
            "-": (high, low, high - low),
            "*": (low, high, low * high),
            "/": (low * high, low, high),
        }[operator]
        if operator in "+*" and rng.random() < 0.5:
            a, b = b, a
        name, other = rng.sample(NAMES, 2)
        story = rng.choice(STORIES[operator]).format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
        return Task(task_id, self.with_prompt(user(story)), str(answer), {"calculation": f"{a} {operator} {b}"})

    def _pair(self, rng: random.Random, operator: str, split: Split) -> tuple[int, int]:
        """Two different numbers of this split, the smaller one first."""
        numbers = range(2, (self.largest if operator in "+-" else self.largest_factor) + 1)
        while True:
            low, high = sorted(rng.sample(numbers, 2))
            if held_out(f"{low}/{high}", _EVAL_FRACTION) is (split is Split.eval):
                return low, high
