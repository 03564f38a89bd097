"""Search by BM25 with the package bm25s."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtgrpo.runtime.files import parse_json, read_line
from mtgrpo.tools.search import Passage, SearchIndex, index_folder, passage_from


class BM25S(SearchIndex):
    """Finds passages by BM25 as Lucene ranks them (Robertson and Zaragoza 2009; k1 = 0.9, b = 0.4, English stems).

    A folder of an index holds bm25s' arrays, the place of each passage in the corpus, and the corpus' checksum. The
    corpus itself stays where it is: JSON Lines with `id`, `text` and perhaps `title`.
    """

    packages = ("bm25s", "Stemmer")

    def __init__(self, corpus: Path | None, folder: Path | None = None) -> None:
        assert corpus is not None  # `needs_corpus`
        bm25s, self._stemmer = _packages()
        self.folder = folder = index_folder(corpus, folder, "", _write)
        self._corpus, self._bm25s = corpus, bm25s
        self._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self._offsets: NDArray[np.int64] = np.load(folder / "offsets.npy", mmap_mode="r")  # bytes, of each passage
        self._hashes: NDArray[np.uint64] = np.load(folder / "id_hashes.npy", mmap_mode="r")  # ascending
        self._rows: NDArray[np.int64] = np.load(folder / "id_rows.npy", mmap_mode="r")  # of these hashes
        self._stemming = threading.Lock()  # a stemmer is for one thread at a time

    def __len__(self) -> int:
        return len(self._offsets)

    def search(self, query: str, k: int) -> list[Passage]:
        """At most `k` passages that share a word with `query`, the best first; of equals the first in the corpus."""
        with self._stemming:
            tokens = self._bm25.get_tokens_ids(_words(self._bm25s, self._stemmer, [query])[0])
        if not tokens:
            return []
        scores: NDArray[np.float32] = self._bm25.get_scores_from_ids(tokens)
        k = min(k, len(scores))
        least = np.partition(scores, -k)[-k]
        rows = np.flatnonzero((scores >= least) & (scores > 0))
        return [self._read(int(row)) for row in rows[np.lexsort((rows, -scores[rows]))][:k]]

    def read(self, passage_id: str) -> Passage | None:
        wanted = _hash(passage_id)
        first, last = np.searchsorted(self._hashes, wanted), np.searchsorted(self._hashes, wanted, "right")
        passages = (self._read(int(row)) for row in self._rows[first:last])
        return next((passage for passage in passages if passage.id == passage_id), None)

    def _read(self, row: int) -> Passage:
        where = str(self._corpus)
        return passage_from(parse_json(read_line(self._corpus, int(self._offsets[row])), where), where)


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


def _hash(passage_id: str) -> np.uint64:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))


def _words(bm25s: Any, stemmer: Any, texts: list[str]) -> list[list[str]]:
    """The stems of each text's words of two or more letters that are no stop words, lower case."""
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def _packages() -> tuple[Any, Any]:
    BM25S.check_packages()
    import bm25s  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    import Stemmer  # noqa: PLC0415

    return bm25s, Stemmer.Stemmer("english")
