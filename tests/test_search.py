"""Search over a corpus: what it finds, how the index is kept, and what is refused."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.tools import bm25s, load, search
from mtgrpo.tools.bm25s import BM25S
from mtgrpo.tools.search import Passage, Search
from mtgrpo.types import Message, Task, ToolCall

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

ROWS = [
    {"id": "a", "title": "Rome", "text": "Rome is the capital of Italy. It is old.", "sources": ["x"]},
    {"id": "b", "title": "Paris", "text": "Paris is the capital of France and lies on the river Seine."},
    {"id": "c", "title": "", "text": "Rivers run to the sea."},
    {"id": "d", "title": "Zebra", "text": "A zebra has stripes.\nMany stripes."},
    {"id": "e", "title": "Zebra", "text": "A zebra has stripes.\nMany stripes."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mtgrpo" / "search"


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "passages.jsonl", ROWS)


def found(index: BM25S, query: str, k: int = 5) -> list[str]:
    return [passage.id for passage in index.search(query, k)]


# --- the index ---


def test_the_best_passages_come_first(corpus: Path) -> None:
    index = BM25S(corpus)
    assert len(index) == 5
    assert found(index, "the capital of Italy") == ["a", "b"]
    assert found(index, "capital cities") == ["a", "b"]  # the shorter passage first
    assert found(index, "RIVERS?") == ["c", "b"]  # by their stems
    assert found(index, "rivers", k=1) == ["c"]
    assert found(index, "stripes") == ["d", "e"]  # of equals the first
    assert found(index, "stripes", k=1) == ["d"]
    for nothing in ("the of is", "", "quetzal", "?!", "\ud800 \x00"):
        assert found(index, nothing) == []
    assert found(index, "capital river zebra", k=100) == ["b", "d", "e", "c", "a"]


def test_scores_are_those_of_bm25(corpus: Path) -> None:
    """Ranked by the formula itself, over words that have no endings."""
    texts = {row["id"]: f"{row['title']} {row['text']}".lower() for row in ROWS}
    words = {key: [word for word in re.findall(r"\w\w+", text)] for key, text in texts.items()}
    words = {key: [word for word in found if word not in STOP] for key, found in words.items()}
    mean = sum(map(len, words.values())) / len(words)

    def score(key: str, query: list[str]) -> float:
        total = 0.0
        for word in query:
            holders = sum(word in one for one in words.values())
            idf = math.log(1 + (len(words) - holders + 0.5) / (holders + 0.5))
            count = Counter(words[key])[word]
            total += idf * count / (count + 0.9 * (1 - 0.4 + 0.4 * len(words[key]) / mean))
        return total

    query = ["capital", "zebra", "old"]
    expected = sorted((key for key in texts if score(key, query) > 0), key=lambda key: -score(key, query))
    assert found(BM25S(corpus), " ".join(query)) == expected


STOP = {"is", "the", "of", "it", "and", "on", "to"}


def test_passages_are_read_by_their_ids(corpus: Path) -> None:
    index = BM25S(corpus)
    for row in ROWS:
        assert index.read(row["id"]) == Passage(row["id"], row["title"], row["text"])
    assert index.read("f") is None
    assert index.read("\ud800") is None


def test_two_ids_of_one_hash_are_told_apart(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtgrpo.tools.bm25s._hash", lambda _: np.uint64(7))
    index = BM25S(corpus)
    assert [index.read(row["id"]) for row in ROWS] == [Passage(row["id"], row["title"], row["text"]) for row in ROWS]
    assert index.read("f") is None


def test_blank_lines_and_unicode_do_not_shift_passages(tmp_path: Path) -> None:
    rows = [
        "",
        json.dumps(ROWS[0]),
        "  ",
        json.dumps({"id": "\u00e9", "text": "M\u00fcnchen \u4f60\u597d"}, ensure_ascii=False),
    ]
    index = BM25S(write(tmp_path / "c.jsonl", rows))
    assert index.read("a") == Passage("a", "Rome", ROWS[0]["text"])
    assert found(index, "m\u00fcnchen") == ["\u00e9"]


def test_an_index_is_built_once_and_mapped(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BM25S(corpus)
    monkeypatch.setattr(search, "_build", lambda *_: pytest.fail("built again"))
    index = BM25S(corpus)
    assert isinstance(index._bm25.scores["data"], np.memmap)
    assert len(list(cache.iterdir())) == 1
    elsewhere = corpus.with_name("copy.jsonl")
    elsewhere.write_bytes(corpus.read_bytes())
    assert found(BM25S(elsewhere), "Italy") == ["a"]  # the same corpus


def test_a_corpus_that_changed_has_another_index(corpus: Path, cache: Path) -> None:
    BM25S(corpus)
    write(corpus, [*ROWS, {"id": "f", "text": "Italy, Italy"}])
    assert found(BM25S(corpus), "Italy") == ["f", "a"]
    assert len(list(cache.iterdir())) == 2


def test_processes_that_build_at_the_same_time_share_one(corpus: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mtgrpo.tools.bm25s import BM25S\n"
        "print([p.id for p in BM25S(Path(sys.argv[1])).search('Italy', 3)])"
    )
    command = [sys.executable, "-c", code, str(corpus)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["['a']"] * 3
    assert [path.name.startswith(".") for path in cache.iterdir()] == [False]


def test_whoever_builds_second_leaves_the_first_ones_index(corpus: Path, cache: Path, tmp_path: Path) -> None:
    BM25S(corpus)
    (folder,) = cache.iterdir()
    written = (folder / "about.json").stat().st_mtime_ns
    search._build(corpus, "x", folder, 1, bm25s._write)
    assert (folder / "about.json").stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [folder]
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "keepsake").touch()
    with pytest.raises(OSError):
        search._build(corpus, "x", tmp_path / "theirs", 1, bm25s._write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "passages.jsonl", "theirs"]


# --- what is refused ---


def refusal(corpus: Path, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        BM25S(corpus, folder)
    return str(caught.value)


BAD_ROWS = [
    ({"id": "a", "text": "again"}, r"line 6: the id 'a' is that of line 1 already"),
    ("{", "line 6: not valid JSON"),
    ("[1]", "line 6: a passage has id and text.*columns are none"),
    ({"id": "z", "title": "t"}, "line 6: a passage has id and text.*columns are id, title"),
    ({"id": 7, "text": "x"}, "line 6: a passage has id and text and perhaps title, all of them text"),
    ({"id": "", "text": "x"}, "line 6: a passage has id"),
    ({"id": "z", "text": "x", "title": 3}, "line 6: a passage has id"),
]


@pytest.mark.parametrize("row, message", BAD_ROWS)
def test_bad_rows_are_refused_with_file_and_line(row: Any, message: str, corpus: Path, cache: Path) -> None:
    said = refusal(write(corpus, [*ROWS, row]))
    assert said.startswith(str(corpus)) and re.search(message, said), said
    assert not cache.exists() or not list(cache.iterdir())


def test_an_index_of_another_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    BM25S(corpus, folder)
    other = write(tmp_path / "other.jsonl", ROWS[:2])
    said = refusal(other, folder)
    assert f"{folder} is that of another corpus: of passages.jsonl with 5 passages" in said and str(other) in said
    assert found(BM25S(corpus, folder), "Italy") == ["a"]


@pytest.mark.parametrize("about", [None, "", "[]", '{"layout": 0, "corpus": {"sha256": "x"}}'])
def test_a_folder_that_is_no_index_is_refused_and_left_alone(about: str | None, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "keepsake").touch()
    if about is not None:
        (folder / "about.json").write_text(about)
    assert "is not an index of passages" in refusal(corpus, folder)
    assert (folder / "keepsake").exists()


def test_a_missing_package_is_found_by_a_dry_run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(corpus=str(corpus))  # what it lists of what is installed, later tests see
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="the tool search needs the package bm25s"):
        search.check_machine()


def test_missing_and_empty_corpora_are_refused(tmp_path: Path) -> None:
    assert "there is no corpus" in refusal(tmp_path / "no.jsonl")
    assert "is empty" in refusal(write(tmp_path / "empty.jsonl", ["", ""]))


def test_missing_packages_are_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    assert "pip install 'mtgrpo[search]'" in refusal(corpus)


# --- the tool ---


@asynccontextmanager
async def opened(corpus: Path, folder: Path, **settings: Any) -> Any:
    environment = ToolUse(tools={"search": {"corpus": str(corpus), **settings}})
    task = Task("task/1", (Message("user", "?"),))
    async with environment.open(RunContext(folder, print, {})) as running, running.conversation(task) as started:
        yield started


def asked(corpus: Path, calls: list[tuple[str, Mapping[str, Any]]], **settings: Any) -> list[str]:
    async def run() -> list[str]:
        async with opened(corpus, corpus.parent, **settings) as (environment, _):
            message = Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in calls))
            return [answer.content for answer in (await environment.step(message)).messages]

    return asyncio.run(run())


def test_the_model_searches_and_reads(corpus: Path) -> None:
    calls = [
        ("search", {"query": "capital", "k": 2}),
        ("search", {"query": "stripes", "k": 1}),
        ("search", {"query": "sea"}),
        ("search", {"query": "quetzal"}),
        ("read", {"id": "d"}),
        ("read", {"id": "c"}),
    ]
    assert asked(corpus, calls, snippet_chars=20) == [
        "[a] Rome: Rome is the capital...\n[b] Paris: Paris is the capital...",
        "[d] Zebra: A zebra has stripes....",
        "[c] Rivers run to the se...",
        "no passage has any of these words",
        "Zebra\nA zebra has stripes.\nMany stripes.",
        "Rivers run to the sea.",
    ]
    assert asked(corpus, [("search", {"query": "river capital"})], results=1)[0].count("[") == 1
    assert asked(corpus, calls[:1], snippet_chars=0)[0].endswith("lies on the river Seine.")


def test_mistakes_of_the_model_are_answered(corpus: Path) -> None:
    calls = [
        ("search", {"query": " "}),
        ("search", {"query": "capital", "k": -1}),
        ("search", {"query": "capital", "k": 4}),
        ("search", {"q": "capital"}),
        ("search", {"query": "capital", "top": 3}),
        ("search", {"query": 3}),
        ("read", {"id": "zz"}),
        ("read", {}),
        ("find", {}),
    ]
    answers = asked(corpus, calls, max_results=3, results=1)
    assert all(answer.startswith("error: ") for answer in answers), answers
    assert "empty" in answers[0] and "k must be from 1 to 3, got -1" in answers[1] and "got 4" in answers[2]
    assert "no argument 'q'" in answers[3] and "no argument 'top'" in answers[4]
    assert "no passage 'zz'" in answers[6] and "the tools are: search, read" in answers[8]


def test_what_the_model_is_told_of_the_tools(corpus: Path) -> None:
    search, read = Search(corpus=str(corpus)).specs()
    assert (search.name, read.name) == ("search", "read")
    assert search.parameters["required"] == ["query"] and set(search.parameters["properties"]) == {"query", "k"}
    assert read.parameters["required"] == ["id"]


def test_nothing_is_opened_before_the_run(tmp_path: Path) -> None:
    tool = load({"search": {"corpus": str(tmp_path / "missing.jsonl")}})["search"]
    assert len(tool.specs()) == 2
    with pytest.raises(RuntimeError, match="not open"):
        asyncio.run(tool.call("search", {"query": "x"}))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, r"needs a corpus: environment.tools=\{search: \{corpus: FILE\}\}"),
        ({"corpus": "x", "max_results": 4}, "`results` must be >= 1 and <= 4 .max_results."),
        ({"corpus": "x", "results": 0}, "`results` must be >= 1 and <= 10 "),
        ({"corpus": "x", "snippet_chars": -1}, "`snippet_chars` must be >= 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Search(**settings)


@pytest.mark.real
def test_recall_on_real_questions(data_folder: Path) -> None:
    index = BM25S(data_folder / "search_qa" / "passages.jsonl")
    assert len(index) == 12_583
    recalls: defaultdict[str, list[float]] = defaultdict(list)
    for line in (data_folder / "search_qa" / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if gold := set(row["gold"]):
            recalls[row["source"]].append(len(gold & set(found(index, row["question"], k=10))) / len(gold))
    mean = {source: sum(values) / len(values) for source, values in recalls.items()}
    assert mean["hotpotqa-dev"] == pytest.approx(0.840, abs=0.005)
    assert mean["musique-train"] == pytest.approx(0.543, abs=0.005)
    assert mean["nq-dev"] == pytest.approx(0.925, abs=0.005)
