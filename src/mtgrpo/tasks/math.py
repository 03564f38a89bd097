"""MATH: competition mathematics with answers in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream
from mtgrpo.tasks.hub import HubRows
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.tasks.parquet import ParquetRows
from mtgrpo.tasks.triviaqa import folder_rows
from mtgrpo.types import Message, Task

_EVAL_FRACTION = 0.1  # of a single file
_BOX = "\\boxed"


@dataclass
class Math(TaskSource):
    """Competition problems in the layout of MATH (Hendrycks et al. 2021, arXiv:2103.03874); graded by math_verify.

    Rows have `problem` and a `solution` whose last \\boxed{} is the answer, or an `answer` of their own. Whether MATH
    itself may be passed on is contested, so name the copy that you use: a file, a folder or a data set of the hub, such
    as HuggingFaceH4/MATH-500, which has no split train. Of a single file a tenth of the problems is held out.
    """

    system_prompt: str = "Solve the problem step by step. Put the answer in \\boxed{}."
    path: str = ""  # a .jsonl or .parquet file, a folder with train* and test* of one of these, or a name on the hub

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the data are missing or of another layout."""
        rows, chosen = self._rows(split)
        if not chosen:
            raise ConfigError(f"task.path={self.path} has no rows for split {split.value}")
        self._task(rows, chosen[0])
        return IndexedStream(len(chosen), lambda index: self._task(rows, chosen[index]), seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The solution, where it ends in a box."""
        solution = str(task.metadata["solution"])
        return (Message("assistant", solution),) if boxed(solution) else None

    def _rows(self, split: Split) -> tuple[Rows, Sequence[int]]:
        if not self.path:
            raise ConfigError(
                "task.path is not set; name the copy of MATH that you use: a .jsonl or .parquet file, a folder with "
                "train* and test*, or a data set of the hub"
            )
        path, name = Path(self.path).expanduser(), "train" if split is Split.train else "test"
        if path.is_file():
            kind = ParquetRows if path.suffix == ".parquet" else JsonlRows
            rows = kind({path: path.stem})
            return rows, rows.divided(split, "id", _EVAL_FRACTION)
        rows = (
            folder_rows(self.path, name) if path.is_dir() else HubRows(self.path, "", name, "give a file or a folder")
        )
        return rows, range(len(rows))

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        problem, solution = row.get("problem"), row.get("solution") or ""
        given = row.get("answer")
        answer = str(given) if given is not None else boxed(solution) if isinstance(solution, str) else ""
        if not isinstance(problem, str) or not answer:
            raise ConfigError(
                f"{rows.where(index)}: MATH rows have problem and a solution with the answer in \\boxed{{}}, or an "
                f"answer; the columns are {', '.join(row)}; read files of another layout with task=jsonl, "
                "task.columns.prompt=NAME and task.columns.answer=NAME"
            )
        messages = self.with_prompt((Message("user", problem),))
        metadata = {"solution": solution, "level": row.get("level"), "subject": row.get("subject", row.get("type"))}
        return Task(f"math/{row.get('unique_id') or rows.default_id(index)}", messages, answer, metadata)


def boxed(text: str) -> str:
    """What the last \\boxed{} of `text` holds, braces within it included; "" where there is none that closes."""
    inside = text.rpartition(_BOX)[2] if _BOX in text else ""
    depth = 0
    for end, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[1:end].strip() if end else ""
    return ""
