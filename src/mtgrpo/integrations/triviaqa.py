"""TriviaQA: trivia questions with many accepted answers."""

from dataclasses import dataclass
from itertools import chain

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import user
from mtgrpo.tasks.published import Published, text, texts
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.types import Task


@dataclass
class TriviaQA(Published):
    """138,384 questions to train on and 17,944 held out (Joshi et al. 2017, arXiv:1705.03551).

    Read from `path`, else from the folder triviaqa in $MTGRPO_DATA, else from mandarjoshi/trivia_qa (rc.nocontext) on
    the Hugging Face hub. The metadata have all accepted `answers`; graded by reward=em or reward=f1 with
    reward.convention=triviaqa.
    """

    system_prompt: Prompt = "Answer the question with a few words."
    path: Folder = ""  # a folder with train*.jsonl and validation*.jsonl, or .parquet

    place = "triviaqa"
    splits = ("train", "validation")
    on_hub = ("mandarjoshi/trivia_qa", "rc.nocontext")
    layout = "TriviaQA rows have question, question_id and an answer with value, aliases and normalized_aliases"

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        answer = text(row["answer"], "value")
        if not answer.strip():
            raise ValueError("answer")
        others = (texts(row["answer"].get(name) or []) for name in ("aliases", "normalized_aliases"))
        answers = list(dict.fromkeys([answer, *chain(*others)]))  # each once
        task_id = f"triviaqa/{row.get('question_id') or rows.default_id(index)}"
        return Task(task_id, user(text(row, "question")), answer, {"answers": answers})
