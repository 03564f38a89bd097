"""Search in a corpus of passages, and what an index of it in a folder has to offer."""

import asyncio
import copy
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, cast

from mtgrpo.errors import ConfigError, UnreachableError, program, refuse_without_effect, require
from mtgrpo.parts import File, Folder, Network, Option, RunContext, Text, extension
from mtgrpo.runtime.files import parse_json, put_whole, read_lines
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.sequence_classifier import SequenceClassifier
from mtgrpo.tools import Tool, ToolError, schema
from mtgrpo.types import ToolSpec

_TOGETHER = 16  # passages that it reads at once
_LAYOUT = 1  # of the folder; another one is refused
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the corpus."""

    id: str
    title: str
    text: str


Write: TypeAlias = Callable[[Sequence[Passage], Sequence[int], Path], None]  # passages, where in the corpus, a folder


class SearchIndex(ABC):
    """Finds passages of a corpus; what the tool search has as its `backend`."""

    needs_corpus: ClassVar[bool] = True  # False: `index` may be one that somebody else has built
    packages: ClassVar[Sequence[str]] = ()  # that must be here
    folder: Path  # it lies there

    @abstractmethod
    def __init__(self, corpus: Path | None, folder: Path | None = None) -> None:
        """Open the index of `corpus`: see `index_folder`. Raises ConfigError, as `check_packages` does.

        corpus: None where it needs none, then `folder` is an index that is there already.
        """

    @classmethod
    def check_packages(cls) -> None:
        """Raise ConfigError for one that is missing."""
        for package in cls.packages:
            refuse_without_package(package, "the tool search")

    @abstractmethod
    def __len__(self) -> int:
        """How many passages there are."""

    @abstractmethod
    def search(self, query: str, k: int) -> list[Passage]:
        """At most `k` passages that share a word with `query`, the best first."""

    @abstractmethod
    def read(self, passage_id: str) -> Passage | None:
        """The passage of this id; None where there is none."""


@dataclass
class Search(Tool):
    """Two tools, `search(query, k)` and `read(id)`, over a corpus of passages, ranked by BM25.

    The corpus is a .jsonl file with `id`, `text` and perhaps `title`. Its index is built when it is first used, in a
    folder of its own, which later runs and other processes map from disk; it is checked against the corpus each time.
    With `backend` lucene and no corpus, `index` is a Lucene index that is there already, such as pyserini's of
    Wikipedia, or the one that `mtgrpo data wikipedia` brings. With `rerank` a cross-encoder orders what was found.
    Example: `environment.tools={search: {corpus: passages.jsonl}}`.
    """

    corpus: File = ""  # the .jsonl file
    index: Folder = ""  # the folder of its index; "" = one for this corpus in ~/.cache/mtgrpo/search
    backend: Option = "bm25s"  # or lucene, by way of Anserini, which pyserini brings; both rank alike; extra `lucene`
    # a sequence-classification model of transformers with one output, a folder or a name on the hub
    rerank: Network = ""
    candidates: int = 50  # passages that it reads for each search, as far as it can; and more where more are wanted
    device: Text = ""  # where it computes: cpu, cuda, cuda:1; "" = a GPU where there is one
    results: int = 5  # of a search that does not say how many
    max_results: int = 10  # that a search may ask for
    snippet_chars: int = 300  # of each passage that a search shows; 0 = all of it

    _open_index = cast("SearchIndex | None", None)
    _ranker = cast("SequenceClassifier | None", None)

    def __post_init__(self) -> None:
        if (self._backend.needs_corpus or not self.index) and not self.corpus:
            how = "environment.tools={search: {corpus: FILE}}, a .jsonl file with id, text and perhaps title"
            raise ConfigError(f"the tool search needs a corpus: {how}")
        require(self, results=f">= 1 and <= {self.max_results} (max_results)", snippet_chars=">= 0 (0 = all)")
        require(self, candidates=">= 1")
        if not self.rerank:
            refuse_without_effect(self, ("candidates", "device"), "set `rerank`")

    def check_machine(self) -> None:
        self._backend.check_packages()
        if self.corpus:
            refuse_no_corpus(Path(self.corpus).expanduser())
        elif not Path(self.index).expanduser().is_dir():
            raise UnreachableError(f"there is no index {self.index}; {program()} data wikipedia gets one from the hub")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its index, which is built where there is none. Raises ConfigError for a corpus that has none."""
        yield await asyncio.to_thread(self.with_index)

    def with_index(self) -> Self:
        """A copy that has opened its index, and its model. Raises ConfigError as `open` does."""
        running = copy.copy(self)
        corpus, folder = (Path(place).expanduser() if place else None for place in (self.corpus, self.index))
        running._open_index = self._backend(corpus, folder)
        if self.rerank:
            running._ranker = SequenceClassifier(self.rerank, "environment.tools.search.rerank", self.device)
        return running

    def specs(self) -> Sequence[ToolSpec]:
        made = [schema.signature_spec("search", self.search), schema.signature_spec("read", self.read)]
        return [replace(spec, parameters={**spec.parameters, "additionalProperties": False}) for spec in made]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
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
        lines = [self._line(passage) for passage in self._rank(query, k)]
        return "\n".join(lines) or "no passage has any of these words"

    def read(self, id: str) -> str:
        """Read a passage in full.

        Args:
            id: as search shows it
        """
        passage = self._index.read(id)
        if passage is None:
            raise ToolError(f"there is no passage {id[:80]!r}; search shows the ids")
        return f"{passage.title}\n{passage.text}" if passage.title else passage.text

    def _rank(self, query: str, k: int) -> list[Passage]:
        if (model := self._ranker) is None:
            return self._index.search(query, k)
        passages = self._index.search(query, max(k, self.candidates))
        query = query.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        how = {"truncation": "longest_first", "max_length": model.longest, "split_special_tokens": True}
        with model.turn:
            pairs = [model.tokenizer(query, f"{one.title} {one.text}".strip(), **how) for one in passages]
            scores = model.scores(pairs, _TOGETHER)
        return [passages[number] for number in sorted(range(len(passages)), key=lambda number: -scores[number])[:k]]

    @property
    def _backend(self) -> type[SearchIndex]:
        return extension.find_class("mtgrpo.tools", self.backend, SearchIndex, "search backend")

    @property
    def _index(self) -> SearchIndex:
        if self._open_index is None:
            raise RuntimeError("the tool search is not open")
        return self._open_index

    def _line(self, passage: Passage) -> str:
        text = " ".join(passage.text.split())
        if 0 < self.snippet_chars < len(text):
            text = text[: self.snippet_chars].rstrip() + "..."
        return f"[{passage.id}] {passage.title}: {text}" if passage.title else f"[{passage.id}] {text}"


def refuse_no_corpus(corpus: Path) -> None:
    """Raise ConfigError where there is no such file, or its first line is no passage."""
    if not corpus.is_file():
        how = "a .jsonl file with id, text and perhaps title; recipes take theirs from the folder MTGRPO_DATA"
        raise ConfigError(f"there is no corpus {corpus}; give {how}")
    for line in islice((line for line in read_lines(corpus) if line.text.strip()), 1):
        passage_from(parse_json(line.text, where := f"{corpus}, line {line.number}"), where)


def index_folder(corpus: Path, folder: Path | None, kind: str, write: Write) -> Path:
    """The folder of an index of `corpus`: `folder`, or one in the user's cache; `write` fills it where there is none.

    kind: of the index, "" for that of bm25s. Raises ConfigError for a corpus that cannot be read, two passages of one
    id and an index of another corpus or kind.
    """
    refuse_no_corpus(corpus)
    with corpus.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtgrpo" / "search"
    folder = folder or cache / f"{checksum[:16]}{kind}"
    layout = f"{_LAYOUT}{kind}" if kind else _LAYOUT
    if not (folder.is_dir() and any(folder.iterdir())):
        _build(corpus, checksum, folder, layout, write)
    try:
        about: Any = json.loads((folder / _ABOUT).read_bytes())
        source = about["corpus"] if about["layout"] == layout else None
    except (OSError, ValueError, KeyError, TypeError):
        source = None
    if source is None:
        raise ConfigError(f"{folder} is not an index of passages of this kind; delete it, or give another folder")
    if source["sha256"] != checksum:
        raise ConfigError(
            f"the index {folder} is that of another corpus: of {source['name']} with {source['passages']} passages, "
            f"sha256 {source['sha256'][:16]}..., while {corpus} has sha256 {checksum[:16]}...; delete it, or give "
            "another folder"
        )
    return folder


def _build(corpus: Path, checksum: str, folder: Path, layout: int | str, write: Write) -> None:
    """Write an index beside `folder`, then put it in place; where another process was quicker, that one's stays."""
    lines: dict[str, int] = {}  # of passages, by their ids
    passages: list[Passage] = []
    offsets: list[int] = []
    for line in read_lines(corpus):
        if line.text.isspace():
            continue
        where = f"{corpus}, line {line.number}"
        passage = passage_from(parse_json(line.text, where), where)
        if (first := lines.setdefault(passage.id, line.number)) != line.number:
            cure = "give each passage an id of its own"
            raise ConfigError(f"{where}: the id {passage.id!r} is that of line {first} already; {cure}")
        offsets.append(line.offset)
        passages.append(passage)
    if not passages:
        raise ConfigError(f"the corpus {corpus} is empty; it needs a line with id and text for each passage")
    try:
        with put_whole(folder) as partial:
            partial.mkdir()
            write(passages, offsets, partial)
            source = {"name": corpus.name, "sha256": checksum, "passages": len(passages)}
            (partial / _ABOUT).write_text(json.dumps({"layout": layout, "corpus": source}, indent=2))
    except OSError:
        if not (folder / _ABOUT).is_file():
            raise


def passage_from(row: Any, where: str) -> Passage:
    """The passage in a row of a corpus. Raises ConfigError, beginning with `where`."""
    columns = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    values = [columns.get("id"), columns.get("title") or "", columns.get("text")]
    if not all(isinstance(value, str) for value in values) or not values[0]:
        raise ConfigError(
            f"{where}: a passage has id and text and perhaps title, all of them text; the columns are "
            f"{', '.join(columns) or 'none'}: {row!r:.80}"
        )
    return Passage(*cast("list[str]", values))
