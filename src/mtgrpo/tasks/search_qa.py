"""Questions to be answered by searching in a corpus of passages."""

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import Split, called, user
from mtgrpo.tasks.published import Published, text, texts
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.tools.search import Search
from mtgrpo.types import Message, Task

_TRAIN = {"hotpotqa-train", "musique-train", "2wikimultihopqa-train"}
_EVAL = {"hotpotqa-dev"}
_HALVED = "nq-dev"  # its even half is trained on
_UNSAID = {"yes", "no"}  # answers that no passage spells out


@dataclass
class SearchQA(Published):
    """962 questions to train on and 762 held out, over 12,583 paragraphs of Wikipedia.

    Read from `path`, else from the folder search_qa in $MTGRPO_DATA. Trained on are questions of HotpotQA, MuSiQue,
    2WikiMultihopQA and half of Natural Questions, those whose id has an even SHA-256; held out are HotpotQA's dev
    questions and the other half. For environment.tools={search: {corpus: passages.jsonl}} and reward=em or reward=f1.
    Demonstrations search for the question, or for each of the steps that MuSiQue divides it into, and read what was
    found until the answer is seen.
    """

    system_prompt: Prompt = "Answer the question with a few words. Search for what you do not know."
    path: Folder = ""  # a folder with questions.jsonl and passages.jsonl
    multihop_only: bool = False  # leave out questions that one passage answers
    results: int = 5  # of the searches in demonstrations; as the tool's
    snippet_chars: int = 300  # of a passage in these; as the tool's

    place = "search_qa"
    stem = "questions"
    layout = "a question has id, question, answers and gold (lists of texts) and source"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        return [index for index in range(len(rows)) if self._belongs(rows, index, split)]

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """Searches, reading and the answer; None where the searches do not find all that is needed."""
        gold = set(task.metadata["gold"])
        messages = [message for query in _queries(task) for message in self._call("search", query=query)]
        shown = {passage for reply in messages for passage in re.findall(r"^\[(\S+)\] ", reply.content, re.MULTILINE)}
        if not gold or not gold <= shown:
            return None
        for passage in sorted(gold):
            if not _shows(messages, task.answer):
                messages += self._call("read", id=passage)
        return (*messages, Message("assistant", task.answer)) if _shows(messages, task.answer) else None

    @functools.cached_property
    def _search(self) -> Search:
        corpus = str(cast(Path, self.copy) / "passages.jsonl")
        return Search(corpus=corpus, results=self.results, snippet_chars=self.snippet_chars).with_index()

    def _call(self, tool: str, **arguments: str) -> tuple[Message, Message]:
        return called(tool, arguments, getattr(self._search, tool)(**arguments))

    def _belongs(self, rows: Rows, index: int, split: Split) -> bool:
        row = rows[index]
        task_id, source = row.get("id"), row.get("source")
        if not isinstance(task_id, str) or not isinstance(source, str):
            raise self.unfit(rows, index)
        if self.multihop_only and row.get("type") != "multihop":
            return False
        even = int(hashlib.sha256(task_id.encode()).hexdigest(), 16) % 2 == 0
        trained = source in _TRAIN or (source == _HALVED and even)
        return trained if split is Split.train else source in _EVAL or (source == _HALVED and not even)

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        answers, steps, question = texts(row["answers"]), row.get("decomposition") or [], text(row, "question")
        metadata = {"answers": answers, "gold": texts(row["gold"]), "source": row["source"], "steps": steps}
        if not answers:
            raise ValueError("answers")
        return Task(f"search_qa/{row['id']}", user(question), answers[0], metadata | {"question": question})


def _queries(task: Task) -> list[str]:
    """What a demonstration searches for: "#1" stands for the answer to the first step."""
    steps: Sequence[Any] = task.metadata["steps"]
    answers, queries = ([str(step[name]) for step in steps] for name in ("answer", "question"))
    for number, answer in enumerate(answers, 1):
        queries = [re.sub(rf"#{number}\b", lambda _, answer=answer: answer, query) for query in queries]
    return queries or [task.metadata["question"]]


def _shows(messages: Sequence[Message], answer: str) -> bool:
    return answer.lower() in _UNSAID or any(answer.lower() in message.content.lower() for message in messages)
