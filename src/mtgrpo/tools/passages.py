"""A corpus of passages on disk, and what an index of it in a folder has to offer."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, cast

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import parse_json, put_whole, read_lines

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
    folder: Path  # it lies there

    @classmethod
    @abstractmethod
    def open(cls, corpus: Path | None, folder: Path | None = None) -> Self:
        """The index of `corpus`: see `index_folder`. Raises ConfigError for missing packages too.

        corpus: None where it needs none, then `folder` is an index that is there already.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many passages there are."""

    @abstractmethod
    def search(self, query: str, k: int) -> list[Passage]:
        """At most `k` passages that share a word with `query`, the best first."""

    @abstractmethod
    def read(self, passage_id: str) -> Passage | None:
        """The passage of this id; None where there is none."""


def index_folder(corpus: Path, folder: Path | None, kind: str, write: Write) -> Path:
    """The folder of an index of `corpus`: `folder`, or one in the user's cache; `write` fills it where there is none.

    kind: of the index, "" for that of bm25s. Raises ConfigError for a corpus that cannot be read, two passages of one
    id and an index of another corpus or kind.
    """
    if not corpus.is_file():
        raise ConfigError(f"there is no corpus {corpus}; give a .jsonl file with id, text and perhaps title")
    with corpus.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtgrpo" / "search"
    folder = folder or cache / f"{checksum[:16]}{kind}"
    layout = f"{_LAYOUT}{kind}" if kind else _LAYOUT
    if not (folder.is_dir() and any(folder.iterdir())):
        _build(corpus, checksum, folder, layout, write)
    _validate(corpus, checksum, folder, layout)
    return folder


def _validate(corpus: Path, checksum: str, folder: Path, layout: int | str) -> None:
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
