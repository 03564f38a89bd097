"""A corpus of passages on disk, and how it is found in: by BM25, or whatever else has an index in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mtgrpo.errors import ConfigError, refuse_without_package

_LAYOUT = 1  # of the folder; another one is refused
_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the corpus."""

    id: str
    title: str
    text: str


Write: TypeAlias = Callable[[Sequence[Passage], Sequence[int], Path], None]  # passages, where in the corpus, a folder


class PassageIndex:
    """Finds passages by BM25 as Lucene ranks them (Robertson and Zaragoza 2009; k1 = 0.9, b = 0.4, English stems).

    A folder of an index holds bm25s' arrays, the place of each passage in the corpus, and the corpus' checksum. The
    corpus itself stays where it is: JSON Lines with `id`, `text` and perhaps `title`.
    """

    def __init__(self, corpus: Path, folder: Path) -> None:
        bm25s, self._stemmer = _packages()
        self.folder, self._corpus, self._bm25s = folder, corpus, bm25s
        self._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self._offsets: NDArray[np.int64] = np.load(folder / "offsets.npy", mmap_mode="r")  # bytes, of each passage
        self._hashes: NDArray[np.uint64] = np.load(folder / "id_hashes.npy", mmap_mode="r")  # ascending
        self._rows: NDArray[np.int64] = np.load(folder / "id_rows.npy", mmap_mode="r")  # of these hashes
        self._stemming = threading.Lock()  # a stemmer is for one thread at a time

    @classmethod
    def open(cls, corpus: Path, folder: Path | None = None) -> Self:
        """The index of `corpus`: see `index_folder`. Raises ConfigError for missing packages too."""
        return cls(corpus, index_folder(corpus, folder, "", _write))

    def __len__(self) -> int:
        return len(self._offsets)

    def search(self, query: str, k: int) -> list[Passage]:
        """At most `k` passages that share a word with `query`, the best first; of equals the first in the corpus."""
        with self._stemming:
            words: list[str] = _words(self._bm25s, self._stemmer, [query])[0]
        known = self._bm25.get_tokens_ids(words)
        if not known:
            return []
        scores: NDArray[np.float32] = self._bm25.get_scores_from_ids(known)
        k = min(k, len(scores))
        least = np.partition(scores, -k)[-k]
        rows = np.flatnonzero((scores >= least) & (scores > 0))
        return [self._read(int(row)) for row in rows[np.lexsort((rows, -scores[rows]))][:k]]

    def read(self, passage_id: str) -> Passage | None:
        """The passage of this id; None where there is none."""
        wanted = _hash(passage_id)
        first, last = np.searchsorted(self._hashes, wanted), np.searchsorted(self._hashes, wanted, "right")
        found = (self._read(int(row)) for row in self._rows[first:last])
        return next((passage for passage in found if passage.id == passage_id), None)

    def _read(self, row: int) -> Passage:
        with self._corpus.open("rb") as file:
            file.seek(int(self._offsets[row]))
            return _passage(file.readline(), str(self._corpus))


def index_folder(corpus: Path, folder: Path | None, kind: str, write: Write) -> Path:
    """The folder of an index of `corpus`: `folder`, or one in the user's cache; `write` fills it where there is none.

    kind: of the index, "" for that of bm25s. Raises ConfigError for a corpus that cannot be read, two passages of one
    id and an index of another corpus or kind.
    """
    if not corpus.is_file():
        raise ConfigError(f"there is no corpus {corpus}; give a .jsonl file with id, text and perhaps title")
    with corpus.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    folder = folder or _cache() / f"{checksum[:16]}{kind}"
    layout = f"{_LAYOUT}{kind}" if kind else _LAYOUT
    if not (folder.is_dir() and any(folder.iterdir())):
        _build(corpus, checksum, folder, layout, write)
    _validate(corpus, checksum, folder, layout)
    return folder


def _validate(corpus: Path, checksum: str, folder: Path, layout: int | str) -> None:
    try:
        about: Any = json.loads((folder / _ABOUT).read_bytes())
        known, found = about["corpus"], about["layout"]
    except (OSError, ValueError, KeyError, TypeError):
        known, found = {}, None
    if found != layout:
        raise ConfigError(f"{folder} is not an index of passages of this kind; delete it, or give another folder")
    if known["sha256"] != checksum:
        raise ConfigError(
            f"the index {folder} is that of another corpus: of {known['name']} with {known['passages']} passages, "
            f"sha256 {known['sha256'][:16]}..., while {corpus} has sha256 {checksum[:16]}...; delete it, or give "
            "another folder"
        )


def _build(corpus: Path, checksum: str, folder: Path, layout: int | str, write: Write) -> None:
    """Write an index beside `folder`, then put it in place; where another process was quicker, that one's stays."""
    places: dict[str, int] = {}  # passage id -> line
    passages: list[Passage] = []
    offsets: list[int] = []
    for line, offset, passage in _passages(corpus):
        if passage.id in places:
            raise ConfigError(
                f"{corpus}, line {line}: the id {passage.id!r} is that of line {places[passage.id]} already; give each "
                "passage an id of its own"
            )
        places[passage.id] = line
        offsets.append(offset)
        passages.append(passage)
    if not passages:
        raise ConfigError(f"the corpus {corpus} is empty; it needs a line with id and text for each passage")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(passages, offsets, unfinished)
        known = {"name": corpus.name, "sha256": checksum, "passages": len(passages)}
        (unfinished / _ABOUT).write_text(json.dumps({"layout": layout, "corpus": known}, indent=2))
        unfinished.chmod(0o755)  # mkdtemp lets nobody else in
        unfinished.rename(folder)
    except OSError:
        if not (folder / _ABOUT).is_file():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(passages: Sequence[Passage], offsets: Sequence[int], folder: Path) -> None:
    bm25s, stemmer = _packages()
    bm25 = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    bm25.index(_words(bm25s, stemmer, [f"{one.title} {one.text}" for one in passages]), show_progress=False)
    hashes = np.array([_hash(one.id) for one in passages], np.uint64)
    order = np.argsort(hashes, kind="stable")
    bm25.save(folder, show_progress=False)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "id_hashes.npy", hashes[order])
    np.save(folder / "id_rows.npy", order.astype(np.int64))


def _passages(corpus: Path) -> Iterator[tuple[int, int, Passage]]:
    """Line from 1, byte offset and passage; blank lines are skipped."""
    offset = 0
    with corpus.open("rb") as file:
        for line, content in enumerate(file, 1):
            if not content.isspace():
                yield line, offset, _passage(content, f"{corpus}, line {line}")
            offset += len(content)


def _passage(line: bytes, where: str) -> Passage:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}): {line[:80]!r}") from error
    return passage_from(row, where)


def passage_from(row: Any, where: str) -> Passage:
    """The passage in a row of a corpus. Raises ConfigError, beginning with `where`."""
    columns = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    found = [columns.get("id"), columns.get("title") or "", columns.get("text")]
    if not all(isinstance(one, str) for one in found) or not found[0]:
        raise ConfigError(
            f"{where}: a passage has id and text and perhaps title, all of them text; the columns are "
            f"{', '.join(columns) or 'none'}: {row!r:.80}"
        )
    return Passage(*cast("list[str]", found))


def _hash(passage_id: str) -> np.uint64:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))


def _words(bm25s: Any, stemmer: Any, texts: list[str]) -> list[list[str]]:
    """The stems of each text's words of two or more letters that are no stop words, lower case."""
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def _packages() -> tuple[Any, Any]:
    """bm25s and a stemmer."""
    for package in ("bm25s", "Stemmer"):
        refuse_without_package(package, "the tool search", "search")
    import bm25s  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    import Stemmer  # noqa: PLC0415

    return bm25s, Stemmer.Stemmer("english")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtgrpo" / "search"
