"""Answers that come from a file, or are only guessed at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from mtgrpo.errors import ConfigError
from mtgrpo.parts import File, Parts
from mtgrpo.rewards import Given
from mtgrpo.rewards.composed import Composed
from mtgrpo.runtime.files import parse_object
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Trajectory


@dataclass
class GroundTruth(Composed):
    """The sum of the rewards `of`, which are told the answers of a file in place of the tasks' own."""

    default: ClassVar[Mapping[str, Any]] = {"em": None}

    of: Annotated[Any, Parts("reward")] = None  # as reward=composed has it; null: [em]
    file: File = ""  # lines {"id": ..., "answer": ...}, which take precedence over the tasks' own answers
    heuristic: bool = False  # of a task without an answer, a message that merely looks like one is worth 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answers = _read_answers(self.file) if self.file else {}
        self.compares &= not (self._answers or self.heuristic)

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Given]:
        task = siblings[0].task
        if task.id in self._answers:
            task = replace(task, answer=self._answers[task.id], metadata={**task.metadata, "answers": []})
        elif self.heuristic and not (task.answer.strip() or task.metadata.get("answers")):
            texts = [trajectory.final for trajectory in siblings]
            return [float("####" in text or "\\boxed{" in text or last_code_block(text) is not None) for text in texts]
        return await super().rewards([replace(trajectory, task=task) for trajectory in siblings])

    def note(self, divide_by_std: bool) -> str:
        warning = (
            "reward ground_truth: heuristic=true: of tasks without an answer, whatever looks like one counts as right; "
            "the policy may learn to write just that"
        )
        return "; ".join(filter(None, (warning * self.heuristic, super().note(divide_by_std))))


def _read_answers(name: str) -> dict[str, str]:
    """Answers by the ids of their tasks. Raises ConfigError naming the file and the line."""
    path = Path(name).expanduser()
    try:
        if not path.is_file():
            raise FileNotFoundError("it is no file")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward ground_truth: file={name} cannot be read: {error}") from error
    answers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"reward ground_truth: file={name}, line {number}"
        row = parse_object(line.encode(), where)
        task_id, answer = _text(row.get("id")), _text(row.get("answer"))
        if not (task_id.strip() and answer.strip()):
            needs = 'a line must be {"id": ..., "answer": ...} with a text or a number for each'
            raise ConfigError(f"{where}: {needs}, got {line[:80]!r}")
        if task_id in answers:
            raise ConfigError(f"{where}: there is a line for id {task_id!r} already; give each task one answer")
        answers[task_id] = answer
    return answers


def _text(value: Any) -> str:
    """A text, or a number as text; "" for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
