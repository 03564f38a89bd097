"""What reasoning-gym's own grading says."""

from __future__ import annotations

import ast
import functools
import json
import string
import sys
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import stated_answer
from mtgrpo.types import Trajectory

_MARKER = "####"
_TAKES_ANY_TEXT = {"game_of_life_halting"}  # the library (0.1.25) calls every text right: answers are compared instead
# Data sets whose grading hands the answer to Python's eval: as a list, and as an expression, through sympy.
LISTS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
EXPRESSIONS = {
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
}
_LONGEST, _HIGHEST = 1000, 100  # characters of an expression, and its exponents
_NAMES = {*string.ascii_letters, "pi"}
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}


@dataclass
class ReasoningGym(Reward):
    """The score, from 0 to 1, that the data set of task=reasoning_gym gives the answer; some give parts of 1.

    The answer is what stands after the last `####` of the final message, else in its last <answer></answer>. What the
    data set's grading cannot read is worth 0. No answer is run: where the library would, it has to be a list of plain
    values, or an expression of numbers, letters and usual functions.
    """

    require_marker: bool = True  # false: where there is neither, the whole message is the answer

    def reward(self, trajectory: Trajectory) -> float:
        """The score. Raises ConfigError for tasks of another source."""
        task = trajectory.task
        if "entry" not in task.metadata:
            raise ConfigError(
                f"task {task.id} is none of reasoning-gym: reward=reasoning_gym is for task=reasoning_gym"
            )
        answer = _stated(trajectory.final, self.require_marker)
        if not answer:
            return 0.0
        if task.metadata["dataset"] in _TAKES_ANY_TEXT:
            return float(answer.lower() == task.answer.lower())
        if task.metadata["dataset"] in EXPRESSIONS and not is_expression(answer):
            return 0.0
        grade = _grader(task.metadata["dataset"], json.dumps(task.metadata["config"]))
        try:
            return min(1.0, max(0.0, float(grade(answer, task.metadata["entry"]))))
        except Exception:  # the library's parsers raise whatever they like at text that is no answer
            return 0.0


def _stated(text: str, require_marker: bool) -> str:
    """The answer that `text` gives; "" for none."""
    if _MARKER in text:
        return text.rpartition(_MARKER)[2].strip()
    return stated_answer(text, "answer") or ("" if require_marker else text.strip())


@functools.cache
def _grader(dataset: str, config: str) -> Any:
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    made = reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(config))
    if dataset in LISTS:
        vars(sys.modules[type(made).__module__])["eval"] = ast.literal_eval
    return made.score_answer


def is_expression(text: str) -> bool:
    """Whether `text` is arithmetic and nothing else, so that sympy, which runs it as code, computes and no more."""
    if len(text) > _LONGEST or not text.isascii() or not text.isprintable() or "#" in text:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _is_arithmetic(tree, powers=2)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_arithmetic(node: ast.expr, powers: int) -> bool:
    """powers: how many may stand within one another."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return not isinstance(number, bool) and abs(number) < 1e15
        case ast.Name(id=name):
            return name in _NAMES
        case ast.UnaryOp(ast.UAdd() | ast.USub(), operand):
            return _is_arithmetic(operand, powers)
        case ast.BinOp(left, ast.Pow(), right):
            return powers > 0 and _is_arithmetic(left, powers - 1) and _is_exponent(right)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):
            return _is_arithmetic(left, powers) and _is_arithmetic(right, powers)
        case ast.Call(ast.Name(id=name), [argument], []):
            return name in _FUNCTIONS and _is_arithmetic(argument, powers)
        case _:
            return False


def _is_exponent(node: ast.expr) -> bool:
    """A low number with its sign, a letter, or a fraction of such."""
    match node:
        case ast.BinOp(left, ast.Div(), right):
            return _is_exponent(left) and _is_exponent(right)
        case ast.UnaryOp(ast.UAdd() | ast.USub(), operand):
            return _is_exponent(operand)
        case ast.Constant(value=int() | float() as number) if abs(number) > _HIGHEST:
            return False
        case _:
            return not isinstance(node, ast.BinOp) and _is_arithmetic(node, 0)
