"""Search in a corpus of passages, and read what was found."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

from mtgrpo.errors import ConfigError, require
from mtgrpo.part import RunContext
from mtgrpo.tools import Tool, ToolError, schema
from mtgrpo.tools.passages import Passage, PassageIndex
from mtgrpo.types import ToolSpec


@dataclass
class Search(Tool):
    """Two tools, `search(query, k)` and `read(id)`, over a corpus of passages, ranked by BM25.

    The corpus is a .jsonl file with `id`, `text` and perhaps `title`. Its index is built when it is first used, in a
    folder of its own, which later runs and other processes map from disk; it is checked against the corpus each time.
    Example: `environment.tools={search: {corpus: passages.jsonl}}`.
    """

    corpus: str = ""  # the .jsonl file
    index: str = ""  # the folder of its index; "" = one for this corpus in ~/.cache/mtgrpo/search
    results: int = 5  # of a search that does not say how many
    max_results: int = 10  # that a search may ask for
    snippet_chars: int = 300  # of each passage that a search shows; 0 = all of it

    _index = cast("PassageIndex | None", None)

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ConfigError(
                "the tool search needs a corpus: environment.tools={search: {corpus: FILE}}, a .jsonl file with id, "
                "text and perhaps title"
            )
        require(self, results=f">= 1 and <= {self.max_results} (max_results)", snippet_chars=">= 0 (0 = all)")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its index, which is built where there is none. Raises ConfigError for a corpus that has none."""
        yield await asyncio.to_thread(self.with_index)

    def with_index(self) -> Self:
        """A copy that has opened its index. Raises ConfigError as `open` does."""
        running = copy.copy(self)
        folder = Path(self.index).expanduser() if self.index else None
        running._index = PassageIndex.open(Path(self.corpus).expanduser(), folder)
        return running

    def specs(self) -> Sequence[ToolSpec]:
        """The tools `search` and `read`."""
        made = [schema.signature_spec("search", self.search), schema.signature_spec("read", self.read)]
        return [replace(spec, parameters={**spec.parameters, "additionalProperties": False}) for spec in made]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What `search` or `read` answers, found in a thread."""
        work: Callable[..., str] = self.search if name == "search" else self.read
        return await asyncio.to_thread(work, **schema.from_json(arguments, work))

    def search(self, query: str, k: int = 0) -> str:
        """Find passages. Shows [id] title: beginning.

        Args:
            query: words to look for
            k: how many passages
        """
        if not query.strip():
            raise ToolError("the query is empty")
        k = k or self.results
        if not 1 <= k <= self.max_results:
            raise ToolError(f"k must be from 1 to {self.max_results}, got {k}")
        found = self._passages.search(query, k)
        return "\n".join(self._line(passage) for passage in found) or "no passage has any of these words"

    def read(self, id: str) -> str:
        """Read a passage in full.

        Args:
            id: as search shows it
        """
        passage = self._passages.read(id)
        if passage is None:
            raise ToolError(f"there is no passage {id[:80]!r}; search shows the ids")
        return f"{passage.title}\n{passage.text}" if passage.title else passage.text

    @property
    def _passages(self) -> PassageIndex:
        if self._index is None:
            raise RuntimeError("the tool search is not open")
        return self._index

    def _line(self, passage: Passage) -> str:
        text = " ".join(passage.text.split())
        if 0 < self.snippet_chars < len(text):
            text = text[: self.snippet_chars].rstrip() + "..."
        return f"[{passage.id}] {passage.title}: {text}" if passage.title else f"[{passage.id}] {text}"
