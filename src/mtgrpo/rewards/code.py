"""Is the final message's code the expected code?"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass

from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import accepted_answers
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Trajectory


@dataclass
class Code(Reward):
    """1 when the last fenced code block of the final message is the answer's code, else 0.

    Code is compared and never run: as Python syntax trees, so that layout and comments do not matter but names do;
    where one of the two is not Python, as text without trailing white space.
    """

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises ConfigError when the task has no answer."""
        answer, said = accepted_answers(trajectory.task)[0], last_code_block(trajectory.final)
        fenced = last_code_block(answer)
        return float(said is not None and _same_code(said, answer if fenced is None else fenced))


def _same_code(said: str, expected: str) -> bool:
    trees = _syntax_tree(said), _syntax_tree(expected)
    if None in trees:
        return _stripped(said) == _stripped(expected)
    return trees[0] == trees[1]


def _syntax_tree(code: str) -> str | None:
    """The abstract syntax of Python code without positions, as text; None where it is none."""
    try:
        with warnings.catch_warnings():  # of odd code, which is the model's affair
            warnings.simplefilter("ignore")
            return ast.dump(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what Python raises for garbage and deep nesting
        return None


def _stripped(code: str) -> str:
    return "\n".join(line.rstrip() for line in code.split("\n")).rstrip()
