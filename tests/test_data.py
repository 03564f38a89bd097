"""What `mtgrpo data check` says of files, and what `mtgrpo data build` makes of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtgrpo.stages.trial import unanswered
from mtgrpo.tasks import Split
from mtgrpo.tasks.conversations import Conversations
from mtgrpo.tasks.jsonl import Jsonl
from mtgrpo.tasks.parquet import Parquet, write_parquet
from mtgrpo.tasks.rows import JsonlRows, ParquetRows
from mtgrpo.types import Task

Run = Callable[..., tuple[int, str, str]]

PASSAGES = [{"id": "a", "title": "Rome", "text": "Rome is old."}, {"id": "b", "text": "Rivers run to the sea."}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **more}


def test_every_bad_row_is_said_with_file_and_line(place: Path, run: Run) -> None:
    rows = [asked("1+1?", id="x", answer="2"), asked("1+2?", id="y"), "{", asked("1+3?", id="x", answer=4), {"q": 1}]
    write(place / "mine.jsonl", *rows)
    code, said, _ = run("data", "check", "mine.jsonl")
    lines = said.splitlines()
    assert code == 1
    assert lines[:3] == ["--- mine.jsonl, line 1", "user: 1+1?", "answer: 2"]
    assert lines[5] == "mine.jsonl: 5 rows of tasks, 4 of which cannot be used"
    assert [line.partition(": ")[0] for line in lines[6:]] == [f"mine.jsonl, line {number}" for number in (2, 3, 4, 5)]
    assert "no answer in column 'answer', which other rows have" in lines[6]
    assert "not valid JSON" in lines[7] and "the id 'x' is that of mine.jsonl, line 1 already" in lines[8]
    assert "no column 'prompt'" in lines[9] and "--prompt NAME" in lines[9]


def test_what_looks_like_data_and_is_none_is_found(place: Path, run: Run) -> None:
    rows = [asked(f"{n}?", answer="1") for n in range(3)]
    write(place / "mine.jsonl", *rows, asked("  ", answer="1"), '{"prompt": "1?", "answer": NaN}')
    said = run("data", "check", "mine.jsonl")[1]
    assert "mine.jsonl, line 4: column 'prompt' must be a string that is not empty" in said
    assert "mine.jsonl, line 5: column 'answer' is nan, no number" in said


def test_a_file_of_another_format_takes_a_line(place: Path, run: Run) -> None:
    rows = [asked(f"{n}?", answer="1") for n in range(40)]
    (place / "array.jsonl").write_text(json.dumps(rows, indent=1))
    (place / "short.jsonl").write_text(json.dumps(rows))
    (place / "wide.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-16")
    (place / "packed.jsonl").write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    array = "is one JSON array"
    told = {"array": array, "short": array, "wide": "text in UTF-16", "packed": "gunzip -c "}
    for name, said in told.items():
        code, out, err = run("data", "check", f"{name}.jsonl")
        assert code == 2 and not out and len(err.splitlines()) == 1 and said in err


def test_text_in_another_encoding_is_told_how_to_be_converted(place: Path, run: Run) -> None:
    (place / "mine.jsonl").write_bytes('{"prompt": "Größe?"}\n'.encode("latin1"))
    lines = run("data", "check", "mine.jsonl")[1].splitlines()
    assert lines[-1].startswith("mine.jsonl, line 1: not valid JSON ('utf-8' codec can't decode byte 0xf6")
    assert lines[-1].endswith("; iconv -f LATIN1 -t UTF-8 FILE > new.jsonl")


def test_faults_of_a_kind_are_a_line(place: Path, run: Run) -> None:
    write(place / "mine.jsonl", asked("1?", answer="1"), *(f'{{"prompt": {n}x' for n in range(40)))
    lines = run("data", "check", "mine.jsonl")[1].splitlines()
    assert len(lines) == 5 and lines[4].startswith("mine.jsonl, line 2 and 39 more: not valid JSON")


def test_a_run_says_what_a_check_finds(place: Path, run: Run) -> None:
    rows = [asked(f"{n}?", id=str(n), answer="1") for n in range(40)]
    write(place / "mine.jsonl", *rows, asked("a?", id="3", answer="1"), asked("b?", id="unanswered"))
    code, _, err = run("train", "recipe=jsonl", "task.path=mine.jsonl", "reward=em", "model.name=tiny", "--dry-run")
    assert code == 0
    assert "mine.jsonl, line 41: the id '3' is that of mine.jsonl, line 4 already" in err.replace(str(place) + "/", "")
    assert "line 42: no answer in column 'answer', which other rows have" in err


def test_a_column_that_few_rows_lack_is_noted(place: Path, run: Run) -> None:
    rows = [asked(f"{n}?", answer="1", notes="x", **({"rare": "y"} if n % 2 else {})) for n in range(40)]
    del rows[7]["notes"]
    said = "line 8: no column 'notes', which other rows have"
    write(place / "mine.jsonl", *rows)
    code, out, _ = run("data", "check", "mine.jsonl")
    assert code == 0 and said in out and "rare" not in out
    code, _, err = run("train", "recipe=jsonl", "task.path=mine.jsonl", "reward=em", "model.name=tiny", "--dry-run")
    assert code == 0 and said in err and "rare" not in err


def test_what_is_collected_in_some_rows_alone_is_not_missed(place: Path, run: Run) -> None:
    said = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    rows = [{"messages": said, "turns": [], "status": "completed", "calls": [], "kind": "x"} for _ in range(20)]
    del rows[7]["calls"], rows[8]["kind"]
    write(place / "mine.jsonl", *rows)
    out = run("data", "check", "mine.jsonl")[1]
    assert "'calls'" not in out and "line 9: no column 'kind', which other rows have" in out


def test_held_out_rows_that_are_trained_on_are_told(place: Path, run: Run) -> None:
    rows = [asked(f"{n}?", answer=str(n)) for n in range(40)]
    write(place / "mine.jsonl", *rows)
    write(place / "held_out.jsonl", *rows[:3], asked("40?", answer="40"))
    words = ["recipe=jsonl", "task.path=mine.jsonl", "reward=em", "model.name=tiny", "--dry-run"]
    for more, told in ([], False), (["task.val_files=[held_out.jsonl]"], True):
        code, _, err = run("train", *words, *more)
        assert code == 0 and ("3 of 4 held-out tasks are training tasks too, such as held_out/1: " in err) is told


OWN = """
from dataclasses import dataclass

from mtgrpo.rewards import Reward


@dataclass
class Ends(Reward):
    def reward(self, trajectory):
        return float(trajectory.final.endswith(trajectory.task.answer))


def solve(task, address):
    return ""
"""
AGENT = ("agent=python", "agent.function=own.py:solve")


@pytest.mark.parametrize(
    ("column", "words", "said"),
    [
        ("anwser", ["reward=own.py:Ends"], "which reward Ends may want: did you mean anwser? set task.columns.answer="),
        ("anwser", ["reward=[own.py:Ends,length]"], "which reward Composed may want: did you mean anwser?"),
        ("gold", [*AGENT, "reward=numeric"], "reward Numeric may want: set task.columns.answer=NAME; beside the "),
        ("gold", ["reward=em"], "has no answer to compare with"),
        ("gold", ["reward=math_verify"], "which reward MathVerify wants: set task.columns.answer=NAME; beside the "),
        ("gold", ["reward=length"], ""),
        ("gold", [*AGENT, "reward=environment"], ""),
        ("gold", ["reward=ground_truth", "reward.file=answers.jsonl"], ""),
        ("gold", ["reward=own.py:Ends", "task.columns.answer=gold"], ""),
        ("answer", ["reward=own.py:Ends"], ""),
        ("answer", ["reward=math_verify"], ""),
    ],
)
def test_a_dry_run_says_that_no_row_has_the_answer(
    column: str, words: list[str], said: str, place: Path, run: Run
) -> None:
    if "reward=math_verify" in words:
        pytest.importorskip("math_verify")
    (place / "own.py").write_text(OWN)
    write(place / "mine.jsonl", *({"prompt": f"{n}?", "id": str(n), column: "1"} for n in range(40)))
    write(place / "answers.jsonl", *({"id": str(n), "answer": "1"} for n in range(40)))
    code, _, err = run("train", "task=jsonl", "task.path=mine.jsonl", "sft.steps=0", *words, "--dry-run")
    assert said in err and ("answer in column" in err or "no answer" in err) is bool(said)
    assert code == (2 if "wants" in said or "to compare" in said else 0)


def test_training_rows_are_looked_at_for_answers_too(place: Path, run: Run) -> None:
    (place / "own.py").write_text(OWN)
    write(place / "mine.jsonl", *(asked(f"{n}?", gold="1") for n in range(40)))
    write(place / "held.jsonl", asked("1?", answer="1"))
    words = ("task=jsonl", "task.path=mine.jsonl", "task.val_files=[held.jsonl]", "sft.steps=0", "reward=own.py:Ends")
    code, _, err = run("train", *words, "--dry-run")
    assert code == 0 and "no row, such as mine/" in err and "beside the prompt there is gold" in err


def test_a_task_of_ones_own_may_have_columns_that_are_none_of_a_file() -> None:
    board: Any = SimpleNamespace(task=SimpleNamespace(columns=7), reward=None)
    assert unanswered(board, [Task("c/0", ())], []) == []


def test_the_column_that_likely_holds_the_prompt_is_named(place: Path, run: Run) -> None:
    write(place / "mine.jsonl", *({"question": f"1+{n}?", "answer": str(1 + n)} for n in range(3)))
    lines = run("data", "check", "mine.jsonl")[1].splitlines()
    assert len(lines) == 2 and lines[1].startswith("mine.jsonl, line 1 and 2 more: no column 'prompt'")
    assert "--prompt question (a string)" in lines[1]


def test_an_answer_column_that_is_named_must_be_in_every_row(place: Path, run: Run) -> None:
    write(place / "mine.jsonl", asked("1+1?", gold="2"), asked("1+2?"))
    code, said, _ = run("data", "check", "mine.jsonl", "--answer", "gold")
    assert code == 1 and "mine.jsonl, line 2: no column 'gold'; the columns are prompt" in said
    code, said, _ = run("data", "check", "mine.jsonl")
    assert code == 0 and "no row has an answer in column 'answer'; name another with --answer" in said


@pytest.mark.parametrize(
    "rows, kind",
    [
        ([asked("1+1?")], "tasks"),
        ([{"messages": [{"role": "user", "content": "1+1?"}]}], "tasks"),
        ([{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}], "conversations"),
        (PASSAGES, "passages"),
    ],
)
def test_what_the_rows_are_is_seen(rows: list[Any], kind: str, place: Path, run: Run) -> None:
    write(place / "mine.jsonl", *rows)
    code, said, _ = run("data", "check", "mine.jsonl")
    assert code == 0 and f"{len(rows)} rows of {kind}, 0 of which cannot be used" in said


def test_rows_are_shown_as_a_model_sees_them(place: Path, run: Run) -> None:
    write(place / "mine.jsonl", asked("1+1?"))
    shown = run("data", "check", "mine.jsonl", "--model", "tiny")[1]
    assert "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n" in shown


def test_a_table_of_commas_is_turned_into_a_file_that_is_not_there_yet(place: Path, run: Run) -> None:
    (place / "mine.csv").write_text("prompt,answer\n1?,1\n")
    write(place / "mine.jsonl", asked("1?"))
    assert run("data", "check", "mine.csv")[2].endswith("mine.csv > mine.csv.jsonl\n")


def test_a_corpus_is_checked_and_indexed(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    write(place / "good.jsonl", *PASSAGES)
    write(place / "bad.jsonl", *PASSAGES, PASSAGES[0], {"id": "c"})
    code, said, _ = run("data", "check", "bad.jsonl")
    assert code == 1 and "bad.jsonl, line 3: the id 'a' is that of bad.jsonl, line 1 already" in said
    assert "bad.jsonl, line 4: a passage has id and text" in said
    code, said, _ = run("data", "build", "good.jsonl")
    assert code == 0 and said.startswith(str(place / "cache")) and "the index of 2 passages" in said
    assert run("data", "build", "good.jsonl", "--out", "index")[0] == 0
    code, _, said = run("data", "build", "bad.jsonl", "--out", "other")
    assert code == 2 and "bad.jsonl, line 3: the id 'a' is that of line 1 already" in said
    write(place / "good.jsonl", *PASSAGES[:1])
    code, _, said = run("data", "build", "good.jsonl", "--out", "index")
    assert code == 2 and "index is that of another corpus" in said


def test_a_parquet_file_gives_the_tasks_of_the_lines(place: Path, run: Run) -> None:
    pytest.importorskip("pyarrow")
    rows = [asked(f"1+{n}?", id=f"x{n}", answer=n + 1, more={"n": n} if n % 2 else {"m": [n]}) for n in range(20)]
    lines = write(place / "mine.jsonl", *rows)
    assert run("data", "build", "mine.jsonl", "--out", "mine.parquet")[:2] == (0, "mine.parquet: 20 rows\n")
    both = (Jsonl(path=str(lines)), Parquet(path="mine.parquet"))
    ours, theirs = (list(source.stream(Split.train, 0, repeat=False)) for source in both)
    assert len(ours) > 15 and [(task.id, task.messages, task.answer) for task in ours] == [
        (task.id, task.messages, task.answer) for task in theirs
    ]


def test_arguments_of_calls_gain_no_keys_in_a_parquet_file(place: Path) -> None:
    pytest.importorskip("pyarrow")
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "find", "arguments": {"query": "x", "k": [2]}}]
    write(
        place / "said.jsonl",
        *(
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [one], "content": ""}]}
            for one in calls
        ),
    )
    assert write_parquet(place / "said.jsonl", place / "said.parquet") == 2
    source, rows = Conversations(), ParquetRows({place / "said.parquet": "said"})
    tasks = [one for one in source.tried(rows) if isinstance(one, Task)]
    found = [source.demonstration(task, 0)[0].tool_calls[0] for task in tasks]
    assert [{"name": call.name, "arguments": dict(call.arguments)} for call in found] == calls


def test_check_counts_the_nulls_that_a_table_leaves_out_of_calls(place: Path, run: Run) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": []}]
    called = [{**said[1], "tool_calls": [{"name": "f", "arguments": {key: 1}}]} for key in "ab"]
    rows = [{"messages": [said[0], message]} for message in called]
    parquet.write_table(arrow.Table.from_pylist(rows), place / "said.parquet")
    code, out, _ = run("data", "check", "said.parquet")
    assert code == 0 and "f({'a': 1})" in out and "f({'b': 1})" in out
    assert "column 'messages': 2 nulls in arguments or schemas are left out" in out


@pytest.mark.parametrize("value, row", [([1], 4), ({"b": 1}, 4), ("text", 4), (10**23, 4)])
def test_a_row_that_does_not_fit_its_column_is_named(value: Any, row: int, place: Path, run: Run) -> None:
    pytest.importorskip("pyarrow")
    write(place / "mine.jsonl", *({"a": n} for n in range(row - 1)), {"a": value}, {"a": 5})
    code, _, said = run("data", "build", "mine.jsonl", "--out", "mine.parquet")
    assert code == 2 and f"mine.jsonl, line {row}: column 'a' is no text, or of another type than before" in said
    assert not (place / "mine.parquet").exists() and len(JsonlRows({place / "mine.jsonl": "mine"})) == row + 1


def test_what_is_not_there_is_said(place: Path, run: Run) -> None:
    assert "there is no file no.jsonl" in run("data", "check", "no.jsonl")[2]
    (place / "empty.jsonl").touch()
    assert "empty.jsonl is empty" in run("data", "check", "empty.jsonl")[2]


SVAMP = {"ID": "1", "Body": "Ann has 2 pens.", "Question": "How many?", "Equation": "( 2.0 )", "Answer": 2.0}


def test_a_data_set_is_got_by_its_name(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(place / "cache"))
    monkeypatch.setenv("MTGRPO_DATA", str(place))
    (place / "ChilleD/SVAMP").mkdir(parents=True)  # in the place of the hub, where `datasets` looks first
    for split in ("train", "test"):
        write(place / f"ChilleD/SVAMP/{split}.jsonl", SVAMP)
    assert run("data", "svamp")[:2] == (0, "ChilleD/SVAMP (train+test): 2 rows\n")
    (place / "word_problems").mkdir()
    copy = write(place / "word_problems/svamp.jsonl", SVAMP, SVAMP, SVAMP)
    assert run("data", "word_problems")[:2] == (0, f"{copy}: 3 rows\n")


def test_where_a_copy_of_a_data_set_belongs_is_said(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(place))
    code, said, refusal = run("data", "search_qa")
    assert (code, said) == (2, "") and "not on the hub: set task.path to a folder with questions.jsonl" in refusal
    assert f"({place} has no search_qa/questions.jsonl)" in refusal and len(refusal.splitlines()) == 1
    code, said, refusal = run("data", "gsm8k")
    assert (code, said) == (2, "") and "'openai/gsm8k'" in refusal and f"{place} has no gsm8k/train.jsonl" in refusal
    monkeypatch.delenv("MTGRPO_DATA")
    assert "MTGRPO_DATA, which names the folder of all data sets, is not set" in run("data", "search_qa")[2]


def test_an_index_of_wikipedia_is_there_or_is_said_where_to_put(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MTGRPO_DATA", raising=False)
    assert "set MTGRPO_DATA to the folder of all data sets" in run("data", "wikipedia")[2]
    monkeypatch.setenv("MTGRPO_DATA", str(place))
    folder, words = place / "wikipedia" / "bm25", ("train", "recipe=[triviaqa,from_scratch]", "--dry-run")
    code, said, refusal = run("data", "wikipedia")
    assert (code, said, len(refusal.splitlines())) == (2, "", 1) and refusal.endswith(f"into {folder}\n")
    assert f"there is no index {folder}" in run(*words)[2]
    network = iter([True, False, True])  # an interrupted download goes on, and is none of the index before its end

    def download(*_: object, local_dir: Path, **__: object) -> None:
        (local_dir / "bm25").mkdir(parents=True, exist_ok=True)
        if not (local_dir / "bm25/a").exists():
            (local_dir / "bm25/a").touch()
            raise TimeoutError("cut")

    def info(*_: object) -> SimpleNamespace:
        if not next(network):
            raise ConnectionError("offline")
        return SimpleNamespace(sha="1")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    for _ in range(2):
        assert run("data", "wikipedia")[0] == 2 and f"there is no index {folder}" in run(*words)[2]
    code, said, _ = run("data", "wikipedia")
    assert code == 0 and [path.name for path in folder.iterdir()] == ["a"]
    code, said, _ = run("data", "wikipedia")  # without asking the hub
    assert (code, said) == (0, f"environment.tools={{search: {{backend: lucene, index: {folder}}}}}\n")
    assert "there is no index" not in run(*words)[2]
