"""Is the answer right, and how short was the longest context that it took?"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rewards.exact_match import ExactMatch
from mtgrpo.rewards.numeric import Numeric, stated_number
from mtgrpo.types import Task, Trajectory

_MARKER = re.compile(r"####|\\boxed\{")
_FENCE = re.compile(r"[ \t]*(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)")


class Form(Enum):
    """What a right answer is worth; a wrong one is worth 0."""

    bounded = "bounded"  # 1 - bonus, and the share of the bonus that it and its siblings deserve
    plain = "plain"  # 1 / tokens


class Domain(Enum):
    """How the final message is compared with the task's answer."""

    general = "general"  # as reward=exact_match does
    math = "math"  # as reward=numeric does: the number after #### or in \boxed{}
    coding = "coding"  # its last fenced code block is the answer's code


@dataclass
class FormatRules:
    """What the final message must look like; one that does not is worth 0."""

    min_chars: int = 0
    required_patterns: list[str] = field(default_factory=list[str])  # regular expressions, each found somewhere
    forbidden_patterns: list[str] = field(default_factory=list[str])  # regular expressions, none found anywhere
    code_block: bool = False  # it must hold a fenced code block

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ConfigError(f"reward.format_rules.min_chars must be >= 0, got {self.min_chars}")
        for name in ("required_patterns", "forbidden_patterns"):
            for pattern in getattr(self, name):
                try:
                    re.compile(pattern)
                except (re.error, RecursionError, OverflowError) as error:
                    raise ConfigError(
                        f"reward.format_rules.{name}: {pattern!r} is not a regular expression ({error}); "
                        "put a backslash before each character that is meant literally"
                    ) from error

    def followed(self, text: str) -> bool:
        """Whether `text` keeps all rules."""
        return (
            len(text) >= self.min_chars
            and all(re.search(pattern, text) for pattern in self.required_patterns)
            and not any(re.search(pattern, text) for pattern in self.forbidden_patterns)
            and not (self.code_block and last_code_block(text) is None)
        )


@dataclass
class ContextEfficiency(Reward):
    """1 for a right answer, less up to `bonus` where right siblings had shorter contexts or others are wrong; else 0.

    Of trajectory i, L_i is `Trajectory.longest_context_tokens`: the most tokens of one turn's context and output,
    turns said to a condenser included. R_i = 0 for a wrong answer and for a message against the format rules, else

    form=bounded   R_i = 1 - bonus + bonus * pass_rate * shortest / L_i
    form=plain     R_i = 1 / L_i

    pass_rate is the share of the siblings that are right (of those that did not fail), shortest the least L of these;
    one that was truncated and right counts in both, whatever algorithm.truncated makes of it.

    Bounded: 1 - bonus < R_i <= 1 - bonus + bonus * pass_rate, with bonus < 1/2. So right siblings differ by less than
    bonus * pass_rate, whatever their lengths, while right and wrong differ by more than 1 - bonus > bonus: a wrong
    answer never pays, however short. A shorter way that is wrong more often has the higher expected reward only
    if it is right more than (1 - bonus) / (1 - bonus + bonus * pass_rate) times as often: 0.8 times by default where
    siblings are all right, nearer to 1 where they are not. That limit comes from the range of right answers' rewards;
    no other shape of the bonus within it would raise it, a smaller `bonus` does. For the advantages R_i - mean(R) of
    n > 1 siblings, which trajectory i moves through the others' rewards too: its length counts for at most
    2 bonus (1 - 1/n), its being right for more than (1 - bonus - bonus / n)(1 - 1/n) > 0.

    All this needs algorithm.divide_by_std=false. Where all siblings are right only lengths differ; divided by their
    deviation, tiny differences weigh as much as right against wrong elsewhere, whatever the form and the bonus, and one
    short way among long ones pays as soon as it is right more than half of the time.

    Plain: right and wrong differ by 1 / L, 5e-4 at 2000 tokens. Adam does not mind the scale of gradients, but what is
    added to them does not shrink with it: with algorithm.divide_by_std=false kl.coef, algorithm.entropy_coef and
    rewards of turns drown the outcome, and optimizer.max_grad_norm no longer binds.

    domain=coding compares code and never runs it: as Python syntax trees, so that layout and comments do not matter but
    names do; where one of the two is not Python, as text without trailing white space. A truncated trajectory is graded
    by its final message, as other rewards do.
    """

    success_at: float = 1e-9  # below what any right answer is worth, in either form
    form: Form = Form.bounded  # what a right answer is worth
    bonus: float = 0.2  # form=bounded: the share of a right answer's reward that depends on length, in (0, 0.5)
    domain: Domain = Domain.general  # how the final message is compared with the answer
    ground_truth_file: str = ""  # lines {"id": ..., "answer": ...}, which take precedence over the tasks' own answers
    heuristic: bool = False  # of a task without an answer, count what merely looks like one as right
    format_rules: FormatRules = field(default_factory=FormatRules)

    def __post_init__(self) -> None:
        if not 0 < self.bonus < 0.5:
            raise ConfigError(f"reward.bonus must be above 0 and below 0.5, got {self.bonus}")
        self._answers = _read_answers(self.ground_truth_file) if self.ground_truth_file else {}

    def reward(self, trajectory: Trajectory) -> float:
        """As if it had no siblings. Raises ConfigError as `rewards`."""
        return self.rewards([trajectory])[0]

    def rewards(self, siblings: Sequence[Trajectory]) -> list[float]:
        """One for each. Raises ConfigError when the task has no answer, or in domain=math one that is no number."""
        right = [self._right(trajectory) for trajectory in siblings]
        tokens = [trajectory.longest_context_tokens for trajectory in siblings]
        if not any(right):
            return [0.0] * len(siblings)
        if self.form is Form.plain:
            return [1 / length if correct else 0.0 for length, correct in zip(tokens, right, strict=True)]
        shortest = min(length for length, correct in zip(tokens, right, strict=True) if correct)
        deserved = self.bonus * sum(right) / len(right)
        return [
            1 - self.bonus + deserved * shortest / length if correct else 0.0
            for length, correct in zip(tokens, right, strict=True)
        ]

    def note(self, divide_by_std: bool) -> str:
        """What makes lengths weigh too much or nothing at all, and that tasks may be graded by a marker alone."""
        found: list[str] = []
        if divide_by_std:
            found.append(
                "reward=context_efficiency with algorithm.divide_by_std=true: where all siblings are right, tiny "
                "differences of length are stretched to unit variance and weigh as much as right against wrong; "
                "set algorithm.divide_by_std=false"
            )
        elif self.form is Form.plain:
            found.append(
                "reward.form=plain with algorithm.divide_by_std=false: right and wrong differ by about 5e-4, which "
                "kl.coef, algorithm.entropy_coef and rewards of turns drown, and optimizer.max_grad_norm no longer "
                "binds; set reward.form=bounded"
            )
        if self.heuristic:
            found.append(
                "reward.heuristic=true: of tasks without an answer, whatever looks like one counts as right; the "
                "policy may learn to write just that"
            )
        return "; ".join(found)

    def _right(self, trajectory: Trajectory) -> bool:
        known = self._with_answer(trajectory.task)
        if not self.format_rules.followed(trajectory.final):
            return False
        if known is None:
            return self._looks_answered(trajectory.final)
        if self.domain is Domain.coding:
            return _same_code(last_code_block(trajectory.final), known.answer)
        grader = Numeric() if self.domain is Domain.math else ExactMatch()
        return grader.reward(replace(trajectory, task=known)) > 0

    def _with_answer(self, task: Task) -> Task | None:
        """The task with the answer that counts; None where there is none, but a message may be graded without."""
        if task.id in self._answers:
            return replace(task, answer=self._answers[task.id], metadata={})
        if task.answer.strip() or (self.domain is Domain.general and task.metadata.get("answers")):
            return task
        if self.heuristic:
            return None
        where = f" and reward.ground_truth_file={self.ground_truth_file} has none" if self.ground_truth_file else ""
        raise ConfigError(
            f"task {task.id} has no answer{where}; choose its column with task.columns.answer=NAME, or give a line "
            '{"id": ..., "answer": ...} for it in reward.ground_truth_file'
        )

    def _looks_answered(self, text: str) -> bool:
        if self.domain is Domain.math:
            return stated_number(text, require_marker=True) is not None
        return bool(_MARKER.search(text)) or (self.domain is Domain.coding and last_code_block(text) is not None)


def last_code_block(text: str) -> str | None:
    """The last block between two code fences (``` or ~~~), without common indentation; None where there is none."""
    block, lines, opening = None, list[str](), ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if not opening:
            opening, lines = mark["fence"] if mark else "", []
        elif mark and mark["fence"].startswith(opening) and not mark["info"].strip():
            block, opening = textwrap.dedent("\n".join(lines)), ""
        else:
            lines.append(line)
    return block


def _same_code(said: str | None, answer: str) -> bool:
    if said is None:
        return False
    fenced = last_code_block(answer)
    expected = answer if fenced is None else fenced
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


def _read_answers(name: str) -> dict[str, str]:
    """Answers by the ids of their tasks. Raises ConfigError naming the file and the line."""
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.ground_truth_file={name} cannot be read: {error}") from error
    found: dict[str, str] = {}
    for where, task_id, answer in _parsed(lines, name):
        if task_id in found:
            raise ConfigError(f"{where}: there is a line for id {task_id!r} already; give each task one answer")
        found[task_id] = answer
    return found


def _parsed(lines: Sequence[str], name: str) -> Iterator[tuple[str, str, str]]:
    """Of each line that is not blank: where it stands, the id and the answer, numbers as text."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"reward.ground_truth_file={name}, line {number}"
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON ({error}): {line[:80]!r}") from error
        columns = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        task_id, answer = _text(columns.get("id")), _text(columns.get("answer"))
        if not (task_id.strip() and answer.strip()):
            raise ConfigError(
                f'{where}: a line must be {{"id": ..., "answer": ...}} with a text or a number for each, '
                f"got {line[:80]!r}"
            )
        yield where, task_id, answer


def _text(value: Any) -> str:
    """A text, or a number as text; "" for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
