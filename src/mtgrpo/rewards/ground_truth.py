"""Answers that come from a file, or are only guessed at."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Given
from mtgrpo.rewards.composed import Composed
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Trajectory

_MARKER = re.compile(r"####|\\boxed\{")


@dataclass
class GroundTruth(Composed):
    """The sum of the rewards `of`, which are told the answers of a file in place of the tasks' own."""

    default: ClassVar[Mapping[str, Any]] = {"em": None}

    of: Any = None  # as reward=composed has it; null: [em]
    file: str = ""  # lines {"id": ..., "answer": ...}, which take precedence over the tasks' own answers
    heuristic: bool = False  # of a task without an answer, a message that merely looks like one is worth 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answers = _read_answers(self.file) if self.file else {}

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Given]:
        """One for each. Raises ConfigError as the others do."""
        task = siblings[0].task
        if task.id in self._answers:
            task = replace(task, answer=self._answers[task.id], metadata={})
        elif self.heuristic and not (task.answer.strip() or task.metadata.get("answers")):
            return [_looks_answered(trajectory.final) for trajectory in siblings]
        return await super().rewards([replace(trajectory, task=task) for trajectory in siblings])

    def note(self, divide_by_std: bool) -> str:
        """That tasks may be graded by a marker alone."""
        said = (
            "reward ground_truth: heuristic=true: of tasks without an answer, whatever looks like one counts as right; "
            "the policy may learn to write just that"
        )
        return "; ".join(filter(None, (said * self.heuristic, super().note(divide_by_std))))


def _looks_answered(text: str) -> float:
    return float(bool(_MARKER.search(text)) or last_code_block(text) is not None)


def _read_answers(name: str) -> dict[str, str]:
    """Answers by the ids of their tasks. Raises ConfigError naming the file and the line."""
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward ground_truth: file={name} cannot be read: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"reward ground_truth: file={name}, line {number}"
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
        if task_id in found:
            raise ConfigError(f"{where}: there is a line for id {task_id!r} already; give each task one answer")
        found[task_id] = answer
    return found


def _text(value: Any) -> str:
    """A text, or a number as text; "" for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
