"""MATH: competition mathematics with answers in LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Folder, Prompt
from mtgrpo.runtime.text import boxed
from mtgrpo.tasks import Split, user
from mtgrpo.tasks.published import Published, text
from mtgrpo.tasks.rows import HubRows, Row, Rows, rows_of
from mtgrpo.types import Message, Task

_EVAL_FRACTION = 0.1  # of a single file
_UNBRACED = re.compile(r"\\boxed\s+([^\s$]+)\$")  # $\boxed 2$, as in two solutions of MATH


@dataclass
class Math(Published):
    """Competition problems in the layout of MATH (Hendrycks et al. 2021, arXiv:2103.03874); graded by math_verify.

    Rows have `problem` and a `solution` whose last \\boxed{} is the answer, or an `answer` of their own. Whether MATH
    itself may be passed on is contested, so name the copy that you use: a file, a folder or a data set of the hub, such
    as HuggingFaceH4/MATH-500, which has no split train. Of a single file a tenth of the problems is held out.
    """

    system_prompt: Prompt = "Solve the problem step by step. Put the answer in \\boxed{}."
    path: Folder = ""  # a .jsonl or .parquet file, a folder with train* and test* of one of these, or a name on the hub

    skips = True
    layout = "MATH rows have problem and a solution with the answer in \\boxed{}, or an answer"

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        solution = str(task.metadata["solution"])
        return (Message("assistant", solution),) if boxed(solution) else None

    def rows(self, split: Split) -> Rows:
        if not self.path:
            raise ConfigError(
                "task.path is not set; name the copy of MATH that you use: a .jsonl or .parquet file, a folder with "
                "train* and test*, or a data set of the hub"
            )
        path = Path(self.path).expanduser()
        if path.is_file():
            return rows_of({path: path.stem})
        if path.is_dir():
            return super().rows(split)
        return HubRows(self.path, "", self.splits[split is Split.eval], "give a file or a folder")

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        single = Path(self.path).expanduser().is_file()
        return rows.divided(split, "id", _EVAL_FRACTION) if single else range(len(rows))

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        solution = row.get("solution") or ""
        framed, bare = solution.replace("\\fbox", "\\boxed"), _UNBRACED.findall(solution) or [""]
        inside = boxed(solution) or bare[-1] or boxed(framed)
        answer = inside if row.get("answer") is None else str(row["answer"])
        if not answer:
            raise ValueError("answer")
        metadata = {"solution": solution, "level": row.get("level"), "subject": row.get("subject", row.get("type"))}
        task_id = f"math/{row.get('unique_id') or rows.default_id(index)}"
        return Task(task_id, user(text(row, "problem")), answer, metadata)
