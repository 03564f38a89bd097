"""TriviaQA: trivia questions with many accepted answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.tasks import IndexedStream, Rows, Split, TaskSource, TaskStream, cell
from mtgrpo.tasks.hub import HubRows
from mtgrpo.tasks.jsonl import JsonlRows
from mtgrpo.tasks.parquet import ParquetRows
from mtgrpo.types import Message, Task


@dataclass
class TriviaQA(TaskSource):
    """138,384 questions to train on and 17,944 held out (Joshi et al. 2017, arXiv:1705.03551).

    Read from the folder `path`, else from mandarjoshi/trivia_qa (rc.nocontext) on the Hugging Face hub. The metadata
    have all accepted `answers`; graded by reward=em or reward=f1 with reward.convention=triviaqa.
    """

    system_prompt: str = "Answer the question with a few words."
    path: str = ""  # a folder with train*.jsonl and validation*.jsonl, or .parquet

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`. Raises ConfigError when the files are missing or of another layout."""
        name = "train" if split is Split.train else "validation"
        if self.path:
            rows = folder_rows(self.path, name)
        else:
            cure = "without a network, set task.path to a folder with its files"
            rows = HubRows("mandarjoshi/trivia_qa", "rc.nocontext", name, cure)
        self._task(rows, 0)
        return IndexedStream(len(rows), lambda index: self._task(rows, index), seed, repeat, rows.blocks)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        question, question_id, answer = row.get("question"), row.get("question_id"), cell(row, "answer.value")
        if not (isinstance(question, str) and isinstance(answer, str) and answer.strip()):
            raise ConfigError(
                f"{rows.where(index)}: TriviaQA rows have question, question_id and an answer with value, aliases and "
                f"normalized_aliases; the columns are {', '.join(row)}, and the answer is {row.get('answer')!r:.80}"
            )
        aliases = [*_texts(rows, row, index, "aliases"), *_texts(rows, row, index, "normalized_aliases")]
        messages = self.with_prompt((Message("user", question),))
        answers = list(dict.fromkeys([answer, *aliases]))  # each once
        return Task(f"triviaqa/{question_id or rows.default_id(index)}", messages, answer, {"answers": answers})


def _texts(rows: Rows, row: Any, index: int, name: str) -> list[str]:
    values: Any = cell(row, f"answer.{name}")
    values = [] if values is None else values
    if not (isinstance(values, list) and all(isinstance(one, str) for one in cast("list[Any]", values))):
        raise ConfigError(f"{rows.where(index)}: answer.{name} must be a list of texts, got {values!r:.80}")
    return cast("list[str]", values)


def folder_rows(path: str, stem: str) -> Rows:
    """The rows of the .jsonl or .parquet files in the folder `path` whose names begin with `stem`.

    Raises ConfigError when there is none, or some of both kinds.
    """
    folder = Path(path).expanduser()
    found = [sorted(folder.glob(f"{stem}*{suffix}")) for suffix in (".jsonl", ".parquet")]
    if all(found) or not any(found):
        what = "both" if all(found) else "neither"
        raise ConfigError(
            f"task.path={path} must be a folder with {stem}*.jsonl or {stem}*.parquet; it has {what} of them"
        )
    files = {file: file.stem for file in found[0] or found[1]}
    return JsonlRows(files) if found[0] else ParquetRows(files)
