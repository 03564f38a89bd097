"""Questions that the first words of one paragraph of Wikipedia answer: the simplest that take a search."""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mtgrpo.parts import Folder, Prompt
from mtgrpo.tasks import Split, called, user
from mtgrpo.tasks.published import Published, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.tools.search import Search
from mtgrpo.types import Message, Task

BEGINNING = 100  # characters of a paragraph in which the answer stands
_BORN = re.compile(r"\bborn\b[^)]{0,40}?\b(1[4-9]\d\d|20\d\d)\b")
_MADE = re.compile(r"\b(?:is|was) an? (1[6-9]\d\d|20\d\d)\b")
_GUESSED = (1900, 2000)
_EVAL_FRACTION = 0.2


@dataclass
class WikiYears(Published, right=">= 0 and <= 1"):
    """In which year was somebody born, or from which year is a film, a song, a book?

    3,194 titles of the paragraphs of task=search_qa whose first words say it; a fifth of them is held out. Read from
    `path`, else from the folder search_qa in $MTGRPO_DATA. For environment.tools={search: {corpus: passages.jsonl}} and
    reward=em: one search for the title finds the paragraph; without one a small model can only guess.
    """

    system_prompt: Prompt = ""
    path: Folder = ""  # a folder with passages.jsonl
    right: float = 1.0  # share of demonstrations that search; the others guess a year
    results: int = 1  # of the searches in demonstrations; as the tool's
    snippet_chars: int = BEGINNING  # of a passage in these; as the tool's

    place = "search_qa"
    stem = "passages"
    layout = "a passage has id, title and text"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        first = {rows[n].get("title"): n for n in reversed(rows.divided(split, "title", _EVAL_FRACTION))}
        return sorted(number for number in first.values() if _asked(rows[number]))

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        title, (question, year) = text(row, "title"), _asked(row)[0]
        metadata = {"answers": [year], "gold": [text(row, "id")], "title": title}
        return Task(f"wiki_years/{row['id']}", user(question.format(title=title)), year, metadata)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """A search for the title and the year, or a guess; None where the search does not show the year."""
        rng = random.Random(f"demonstration/{seed}/{task.id}")
        if rng.random() >= self.right:
            return (Message("assistant", str(rng.randrange(*_GUESSED))),)
        found = self._search.search(title := task.metadata["title"])
        calls = called("search", {"query": title}, found)
        return (*calls, Message("assistant", task.answer)) if task.answer in found else None

    @functools.cached_property
    def _search(self) -> Search:
        corpus = str(cast(Path, self.copy) / "passages.jsonl")
        return Search(corpus=corpus, results=self.results, snippet_chars=self.snippet_chars).with_index()


def _asked(row: Row) -> list[tuple[str, str]]:
    """A question about the title with its answer; [] where the paragraph does not begin with a year."""
    said = text(row, "text")[:BEGINNING]
    if not re.search(r"\w", text(row, "title")):
        return []
    if born := _BORN.search(said):
        return [('In which year was "{title}" born?', born[1])]
    made = _MADE.search(said)
    return [('From which year is "{title}"?', made[1])] if made else []
