"""Lucene behind the search tool, with what `make lucene-env` installs into .venv-lucene."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.lucene import Lucene
from mtgrpo.parts import RunContext
from mtgrpo.tools.bm25s import BM25S
from mtgrpo.tools.search import Passage
from mtgrpo.types import Message, Task, ToolCall

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = next(PROJECT.glob(".venv-lucene/lib/python3*/site-packages"), None)

pytestmark = pytest.mark.slow

ROWS = [
    {"id": "a", "title": "Rome", "text": "Rome is the capital of Italy. It is old."},
    {"id": "b", "title": "Paris", "text": "Paris is the capital of France and lies on the river Seine."},
    {"id": "c", "title": "", "text": "Rivers run to the sea: M\u00fcnchen \u4f60\u597d."},
]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    if PACKAGES is None or not any(PROJECT.glob(".venv-lucene/.ready-*")):
        pytest.skip("there is no .venv-lucene: make lucene-env makes it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sys.path.append(str(PACKAGES))  # the machine, once started, needs it to the end
    yield
    sys.path.remove(str(PACKAGES))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def found(index: Lucene, query: str, k: int = 5) -> list[str]:
    return [passage.id for passage in index.search(query, k)]


def test_it_finds_and_reads(corpus: Path) -> None:
    index = Lucene(corpus)
    assert len(index) == 3 and index.folder.name.endswith("-lucene")
    assert found(index, "the capital of Italy") == ["a", "b"]
    assert found(index, "RIVERS?") == ["c", "b"]
    assert found(index, "rivers", k=1) == ["c"]
    for nothing in ("the of is", "", "quetzal", "?!", "\ud800 \x00", 'a AND "b" OR (', "field:x^2~"):
        assert found(index, nothing) in ([], ["a", "b"]), nothing
    for row in ROWS:
        assert index.read(row["id"]) == Passage(row["id"], row["title"], row["text"])
    assert index.read("f") is None and index.read("\ud800") is None
    built = index.folder.stat().st_mtime_ns
    assert Lucene(corpus).folder.stat().st_mtime_ns == built


def test_an_index_that_is_there_needs_no_corpus(corpus: Path, tmp_path: Path) -> None:
    folder = Lucene(corpus).folder
    tools = {"search": {"backend": "lucene", "index": str(folder)}}

    async def asked() -> list[str]:
        task = Task("t", (Message("user", "?"),))
        environment = ToolUse(tools=tools)
        context = RunContext(tmp_path, print, {})
        async with environment.open(context) as running, running.conversation(task) as (started, _):
            calls = (ToolCall("search", {"query": "capital", "k": 1}), ToolCall("read", {"id": "c"}))
            return [said.content for said in (await started.step(Message("assistant", tool_calls=calls))).messages]

    first, second = asyncio.run(asked())  # in threads
    assert first.startswith("[a] Rome: Rome is the capital of Italy") and second == ROWS[2]["text"]


def test_what_is_no_index_of_it_is_refused(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[0]))
    folder = Lucene(corpus, tmp_path / "index").folder
    with pytest.raises(ConfigError, match=r"is that of another corpus: of passages\.jsonl with 3 passages"):
        Lucene(other, folder)
    with pytest.raises(ConfigError, match="is not an index of passages of this kind"):
        BM25S(corpus, folder)
    with pytest.raises(ConfigError, match=r"missing is no Lucene index that can be read"):
        Lucene(None, tmp_path / "missing")


def test_recall_on_real_questions(data_folder: Path) -> None:
    index = Lucene(data_folder / "search_qa" / "passages.jsonl")
    assert len(index) == 12_583
    recalls: defaultdict[str, list[float]] = defaultdict(list)
    for line in (data_folder / "search_qa" / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if gold := set(row["gold"]):
            recalls[row["source"]].append(len(gold & set(found(index, row["question"], k=10))) / len(gold))
    mean = {source: sum(values) / len(values) for source, values in recalls.items()}
    print(mean)
    assert mean["hotpotqa-dev"] == pytest.approx(0.840, abs=0.005)
    assert mean["musique-train"] == pytest.approx(0.545, abs=0.005)
    assert mean["nq-dev"] == pytest.approx(0.929, abs=0.005)
