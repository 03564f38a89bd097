"""Generated word problems that need a calculator: the embedded default, learnable from scratch in minutes on a CPU."""

import operator
import random
import zlib
from dataclasses import astuple, dataclass, field

from mtgrpo.errors import ConfigError, require
from mtgrpo.tasks import Generated, Split, called, user
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator as CalculatorTool
from mtgrpo.types import Message, Task

NAMES = ("Tom", "Ann", "Bob", "Eva", "Sam", "Mia", "Leo", "Zoe")
THINGS = ("pens", "cards", "coins", "books")
SENTENCES = {
    "+": ("{name} buys {n} more.", "{name} finds {n} more.", "{name} is given {n} more."),
    "-": ("{name} sells {n}.", "{name} loses {n}.", "{name} gives away {n}."),
    "*": ("Then {name} makes it {n} times as many.", "Then the number grows {n} times."),
}
LIMIT = 1_000_000  # every partial result lies in [0, LIMIT)
MAX_PRODUCTS = 2
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Problem:
    """A chain: start with `start`, then apply each (operator, operand). `values` holds every partial result."""

    start: int
    steps: tuple[tuple[str, int], ...]
    values: tuple[int, ...]


@dataclass
class Demonstrator:
    """How good the demonstrations are: the share of each kind, drawn independently of the problem.

    All stay consistent after their error, since the calculator really evaluates the wrong call. The rest
    (1 - the sum) guesses the answer without calling the calculator.
    """

    right: float = 0.28  # every call right
    wrong_number: float = 0.10  # one operand of one call is misread
    wrong_operator: float = 0.04  # in one call
    swapped: float = 0.04  # two neighbouring steps in the wrong order
    early: float = 0.02  # answers before the last step

    def __post_init__(self) -> None:
        shares = astuple(self)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ConfigError(f"task.demonstrator: the shares must be >= 0 and add up to at most 1, got {shares}")

    def kind(self, rng: random.Random) -> str:
        """Draw a kind of demonstration."""
        number = rng.random()
        for kind, share in vars(self).items():
            number -= share
            if number < 0:
                return kind
        return "guess"


@dataclass
class Calculator(Generated):
    """Chains of + - * over 3-digit numbers, too wide to do in the head; the answer is one integer after `####`.

    Held out by construction: a fifth of all numbers appears as an operand in `eval` tasks only and never in training.
    """

    min_steps: int = 2  # dependent calculations per problem
    max_steps: int = 5
    seed: int = 0  # another seed gives other problems (both splits), over the same two sets of numbers
    demonstrator: Demonstrator = field(default_factory=Demonstrator)

    def __post_init__(self) -> None:
        require(self, min_steps=">= 1", max_steps=f">= {self.min_steps} and <= 8 (min_steps and the most)")

    def task(self, split: Split, seed: int, index: int) -> Task:
        name = f"calculator/{self.seed}/{seed}/{split.value}/{index}"
        rng = random.Random(name)
        problem = draw_problem(rng, self.min_steps, self.max_steps, held_out=split is Split.eval)
        return Task(name, self.with_prompt(user(tell(problem, rng))), str(problem.values[-1]), vars(problem))

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        """A demonstration of mixed quality: calls, the calculator's replies, and an answer."""
        rng = random.Random(f"demonstration/{seed}/{task.id}")
        problem = Problem(*(task.metadata[name] for name in ("start", "steps", "values")))
        return demonstrate(problem, self.demonstrator.kind(rng), rng)


def numbers(low: int, high: int, held_out: bool) -> list[int]:
    """The operands in [low, high] that belong to one split: a fifth is held out, by a hash of the number."""
    return [n for n in range(low, high + 1) if (zlib.crc32(b"n%d" % n) % 5 == 0) == held_out]


def draw_problem(rng: random.Random, min_steps: int, max_steps: int, held_out: bool) -> Problem:
    """Draw until every partial result is within the limit and at most MAX_PRODUCTS products occur."""
    length = rng.randint(min_steps, max_steps)
    while True:
        start = value = rng.choice(_TERMS[held_out])
        steps: list[tuple[str, int]] = []
        values: list[int] = []
        for _ in range(length):
            sign = rng.choice("+-*")
            operand = rng.choice((_FACTORS if sign == "*" else _TERMS)[held_out])
            value = _APPLY[sign](value, operand)
            steps.append((sign, operand))
            values.append(value)
        if all(0 <= v < LIMIT for v in values) and sum(sign == "*" for sign, _ in steps) <= MAX_PRODUCTS:
            return Problem(start, tuple(steps), tuple(values))


_TERMS = {held_out: numbers(100, 999, held_out) for held_out in (False, True)}
_FACTORS = {held_out: numbers(12, 99, held_out) for held_out in (False, True)}


def tell(problem: Problem, rng: random.Random) -> str:
    """The problem as a short story."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    parts = [f"{name} has {problem.start} {things}."]
    for sign, operand in problem.steps:
        parts.append(rng.choice(SENTENCES[sign]).format(name=name, n=operand))
    parts.append(f"How many {things} does {name} have?")
    return " ".join(parts)


def demonstrate(problem: Problem, kind: str, rng: random.Random) -> tuple[Message, ...]:
    """Messages of one demonstration of the given kind (see Demonstrator)."""
    if kind == "guess":
        answer = str(problem.values[-1])
        return (_answer(answer[0] + "".join(rng.choice("0123456789") for _ in answer[1:])),)
    steps = list(problem.steps)
    if kind == "swapped" and len(steps) > 1:
        first = rng.randrange(len(steps) - 1)
        steps[first], steps[first + 1] = steps[first + 1], steps[first]
    if kind == "early" and len(steps) > 1:
        steps = steps[: rng.randrange(1, len(steps))]
    wrong = rng.randrange(len(steps))
    calculator = CalculatorTool()
    value = str(problem.start)
    messages: list[Message] = []
    for index, (sign, operand) in enumerate(steps):
        left, right = value, str(operand)
        if index == wrong and kind == "wrong_number":
            left, right = (_misread(left, rng), right) if rng.random() < 0.5 else (left, _misread(right, rng))
        if index == wrong and kind == "wrong_operator":
            sign = rng.choice([other for other in "+-*" if other != sign])
        expression = f"{left} {sign} {right}"
        try:
            value = reply = calculator(expression)
        except ToolError as error:
            value, reply = left, f"error: {error}"
        messages += called("calculator", {"expression": expression}, reply)
        if reply != value:
            break
    return (*messages, _answer(value))


def _answer(value: str) -> Message:
    return Message("assistant", f"#### {value}")


def _misread(number: str, rng: random.Random) -> str:
    """One wrong digit, or two neighbours exchanged."""
    digits = list(number)
    at = rng.randrange(len(digits))
    if rng.random() < 0.6 or len(digits) == 1:
        digits[at] = rng.choice([d for d in "123456789" if d != digits[at]])
    else:
        other = (at + 1) % len(digits)
        digits[at], digits[other] = digits[other], digits[at]
    return "".join(digits).lstrip("0") or "1"
