"""Task sources: streams are lazy, shuffled, resumable; data from outside is checked with errors people can act on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.config.compose import compose, parse
from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from
from mtgrpo.parts.extension import options
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.tasks import IndexedStream, Split, TaskSource, held_out, permuted, published
from mtgrpo.tasks.gsm8k import Gsm8k, solve_with_calculator
from mtgrpo.tasks.hub import Hub
from mtgrpo.tasks.jsonl import BadRows, Jsonl
from mtgrpo.tasks.ledger import PROMPT, Ledger
from mtgrpo.tasks.mixed import Mixed, MixedStream
from mtgrpo.tasks.parquet import Parquet
from mtgrpo.tasks.rows import Columns, HubRows, ParquetRows
from mtgrpo.tasks.word_problems import WordProblems
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import SUMMARY, Finish, Message, Task, ToolCall, Trajectory, Turn


def numbered(index: int) -> Task:
    return Task(str(index), (Message("user", f"question {index}"),))


def take(stream: Iterable[Task], count: int) -> list[str]:
    return [task.id for _, task in zip(range(count), stream, strict=False)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 1000) -> Path:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


# The shuffle and the stream


@given(length=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(length: int, key: int) -> None:
    assert sorted(permuted(index, length, key) for index in range(length)) == list(range(length))


def test_permuted_draws_every_order_about_equally_often() -> None:
    draws = 12_000
    counts = Counter(tuple(permuted(index, 4, key * 0x9E3779B9) for index in range(4)) for key in range(draws))
    assert len(counts) == 24
    assert max(abs(count - draws / 24) for count in counts.values()) < 0.25 * draws / 24


def test_permuted_is_the_same_on_every_machine_and_version() -> None:
    assert [permuted(index, 10, 7) for index in range(10)] == [0, 7, 3, 1, 8, 2, 6, 4, 5, 9]


@st.composite
def layouts(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))


@given(blocks=layouts(), seed=st.integers(0, 99))
def test_each_epoch_delivers_every_row_once_and_every_block_in_one_run(blocks: list[int], seed: int) -> None:
    length = sum(blocks)
    block_of = [number for number, size in enumerate(blocks) for _ in range(size)]
    stream = IndexedStream(length, numbered, seed, blocks=blocks)
    for epoch in range(3):
        assert stream.epoch == epoch
        rows = [int(row) for row in take(stream, length)]
        assert sorted(rows) == list(range(length))
        runs = [block_of[row] for row in rows]
        changes = sum(before != after for before, after in pairwise(runs))
        assert changes == len(set(runs)) - 1
    assert stream.epoch == 3


@given(
    blocks=layouts(), seed=st.integers(0, 99), before=st.integers(0, 60), after=st.integers(1, 40), repeat=st.booleans()
)
def test_resuming_anywhere_continues_exactly(
    blocks: list[int], seed: int, before: int, after: int, repeat: bool
) -> None:
    stream = IndexedStream(sum(blocks), numbered, seed, repeat, blocks)
    take(stream, before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = IndexedStream(sum(blocks), numbered, seed, repeat, blocks)
    resumed.load_state_dict(state)
    assert resumed.epoch == stream.epoch
    assert take(resumed, after) == take(stream, after)
    assert resumed.state_dict() == stream.state_dict()


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    stream = IndexedStream(100, numbered, 0)
    orders = [take(stream, 100), take(stream, 100), take(IndexedStream(100, numbered, 1), 100)]
    assert len({tuple(order) for order in orders}) == 3
    assert take(IndexedStream(100, numbered, 0), 200) == orders[0] + orders[1]


def test_one_pass_keeps_the_order_and_stays_ended() -> None:
    stream = IndexedStream(5, numbered, 3, repeat=False)
    assert take(stream, 99) == ["0", "1", "2", "3", "4"]
    assert stream.epoch == 1
    assert next(stream, None) is None


def test_a_generated_source_counts_up_without_an_end() -> None:
    stream = IndexedStream(None, numbered, 3)
    assert take(stream, 1000) == [str(index) for index in range(1000)]
    resumed = IndexedStream(None, numbered, 3)
    resumed.load_state_dict(stream.state_dict())
    assert next(resumed).id == "1000"
    assert resumed.epoch == 0


def test_a_source_of_nothing_ends_at_once() -> None:
    assert [list(IndexedStream(0, numbered, 0, repeat)) for repeat in (True, False)] == [[], []]


def test_a_state_of_other_data_is_refused() -> None:
    state = IndexedStream(10, numbered, 0).state_dict()
    message = error_of(lambda: IndexedStream(11, numbered, 0).load_state_dict(state))
    assert "10 rows" in message and "11 rows now" in message
    mixture = MixedStream([IndexedStream(10, numbered, 0), IndexedStream(5, numbered, 0)], [1.0, 1.0], 0)
    message = error_of(lambda: IndexedStream(10, numbered, 0).load_state_dict(mixture.state_dict()))
    assert "the data had other rows when the state was saved and has 10 rows now" in message
    assert "task.of had 0 entries when the state was saved, not 2" in error_of(lambda: mixture.load_state_dict(state))


# JSON Lines


def test_every_file_in_the_folder_is_one_option() -> None:
    found = options("mtgrpo.tasks", TaskSource)
    assert {"gsm8k", "word_problems", "jsonl", "parquet", "hub"} <= set(found)
    modules = {file.stem for file in Path(str(published.__file__)).parent.glob("[!_]*.py")}
    assert modules - set(found) == {"published", "rows"}  # no sources


def test_jsonl_maps_columns_and_keeps_the_rest_as_metadata(tmp_path: Path) -> None:
    row = {"question": "2+2?", "solution": {"value": 4.0}, "uid": 17, "answers": ["four"]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    columns = Columns(prompt="question", answer="solution.value", id="uid")
    source = Jsonl(path=str(path), columns=columns, eval_fraction=0, system_prompt="Be brief.")
    task = next(source.stream(Split.train, 0))
    assert (task.id, task.answer) == ("17", "4")
    assert task.messages == (Message("system", "Be brief."), Message("user", "2+2?"))
    assert task.metadata == {"solution": {"value": 4.0}, "answers": ["four"]}


@pytest.mark.parametrize(
    "row, answer, answers",
    [
        ({"reward_model": {"ground_truth": "4"}}, "4", None),
        ({"reward_model": {"ground_truth": 4.0}}, "4", None),
        ({"reward_model": {"ground_truth": "4"}, "answer": "5"}, "5", None),
        ({"reward_model": {"ground_truth": "4"}, "answer": None}, "4", None),
        ({"reward_model": {"ground_truth": ["4", "four"]}}, "4", ["4", "four"]),
        ({"reward_model": {"ground_truth": {"target": ["4", "four"]}}}, "4", ["4", "four"]),
        ({"reward_model": {"ground_truth": {"target": ["4"]}}}, "4", None),
        ({"reward_model": {"style": "model"}}, "", None),
        ({"answer": ["4", 5]}, "4", ["4", "5"]),
        ({"answer": "4", "answers": [{"text": "four", "score": 1}]}, "4", [{"text": "four", "score": 1}]),
    ],
)
def test_answers_are_found(tmp_path: Path, row: dict[str, Any], answer: str, answers: list[str] | None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", **row}])
    task = next(Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0))
    assert (task.answer, task.metadata.get("answers")) == (answer, answers)
    assert task.metadata.get("reward_model") == row.get("reward_model")


def test_a_call_without_arguments_may_have_none_as_openai_writes_it() -> None:
    call = {"type": "function", "function": {"name": "next", "arguments": ""}}
    (message,) = messages_from([{"role": "assistant", "content": None, "tool_calls": [call]}], "line 1")
    assert message.tool_calls == (ToolCall("next", {}),)


def test_jsonl_reads_conversations_with_tool_calls(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
    messages = [
        {"role": "system", "content": "You calculate."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "calculator"},
        {"role": "user", "content": "And again?"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    source = Jsonl(path=str(path), eval_fraction=0, system_prompt="not used: the row has its own")
    assert next(source.stream(Split.train, 0)).messages == (
        Message("system", "You calculate."),
        Message("user", "1+1?"),
        Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "1+1"}),)),
        Message("tool", "2", name="calculator"),
        Message("user", "And again?"),
    )


WORKED = [
    {"role": "user", "content": "2 * 3?"},
    {"role": "assistant", "tool_calls": [{"name": "calculator", "arguments": {"expression": "2 * 3"}}]},
    {"role": "tool", "name": "calculator", "content": "6"},
    {"role": "assistant", "content": "#### 6"},
]


def test_prompts_come_from_texts_and_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1 + {prompt}?"}])
    (tmp_path / "system.txt").write_text("Be brief.\n")
    source = Jsonl(
        path=str(path),
        eval_fraction=0,
        system_prompt=f"file:{tmp_path / 'system.txt'}",
        prompt_template="Q: {prompt}\nA:",
        examples=WORKED,
    )
    (task,) = source.stream(Split.train, 0, repeat=False)
    assert task.messages[0] == Message("system", "Be brief.") and task.messages[1].content == WORKED[0]["content"]
    assert task.messages[-1] == Message("user", "Q: 1 + {prompt}?\nA:")
    for settings, said in (
        ({"prompt_template": "Q: PROMPT"}, r"task\.prompt_template='Q: PROMPT' must have \{prompt\} where"),
        ({"system_prompt": "file:no.txt"}, r"task\.system_prompt=file:no\.txt: it cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(Jsonl(path=str(path), eval_fraction=0, **settings).stream(Split.train, 0, repeat=False))


def test_worked_examples_stand_between_the_system_prompt_and_the_problem(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "4 * 5?"},
        {"messages": [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "6 * 7?"}]},
    ]
    path = write_jsonl(tmp_path / "own.jsonl", rows)
    source = Jsonl(path=str(path), eval_fraction=0, system_prompt="Be exact.", examples=WORKED)
    first, second = source.stream(Split.train, 0, repeat=False)
    worked = (
        Message("user", "2 * 3?"),
        Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "2 * 3"}),)),
        Message("tool", "6", name="calculator"),
        Message("assistant", "#### 6"),
    )
    assert first.messages == (Message("system", "Be exact."), *worked, Message("user", "4 * 5?"))
    assert second.messages == (Message("system", "Be quick."), *worked, Message("user", "6 * 7?"))


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (WORKED[:1], "end with an assistant's, got the roles user"),
        (WORKED[1:], "begin with a user's .* got the roles assistant, tool, assistant"),
        ([{"role": "teacher", "content": "x"}], "task.examples, message 1: role must be one of .* 'teacher'"),
        (
            [WORKED[0], {"role": "assistant", "content": None}],
            'message 2: content must .* quote it, as content: "#### 12"',
        ),
        ("2 * 3 is 6", "task.examples, message 1: must be an object with role and content, got str"),
        (2, r"task\.examples=2: task Jsonl has no demonstrations .* 'task\.examples=\[{role: user, content:"),
    ],
)
def test_worked_examples_that_are_none_are_refused(tmp_path: Path, examples: Any, said: str) -> None:
    path = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "4 * 5?"}])
    with pytest.raises(ConfigError, match=said):
        Jsonl(path=str(path), eval_fraction=0, examples=examples).stream(Split.train, 0)


def test_demonstrations_are_shown_as_worked_examples() -> None:
    """As many as requested, with their tool calls and without answers to a condenser, before every task."""
    source = Ledger(examples=3, min_pages=2, max_pages=2, system_prompt="Be exact.")
    first, second = itertools.islice(source.stream(Split.eval, 0), 2)
    system, *worked, problem = first.messages
    assert (system.content, problem) == ("Be exact.", Message("user", PROMPT))
    assert second.messages[:-1] == first.messages[:-1]
    assert [message.role for message in worked] == ["user", *["assistant", "tool"] * 4, "assistant"] * 3
    assert not any(message.name == SUMMARY for message in worked)
    shown = {message.content for message in worked if message.role == "tool"}
    for seed in (0, 1, 2):
        for task in itertools.islice(source.stream(Split.train, seed), 20):
            assert not shown >= {str(page) for page in task.metadata["pages"]}


def test_tasks_without_a_demonstration_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"So <<{n}+1={n + n % 2}>>\n#### {n + n % 2}"} for n in range(1, 9)]
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    (task, *_) = Gsm8k(path=str(tmp_path), system_prompt="", examples=2).stream(Split.eval, 0, repeat=False)
    asked = [message.content for message in task.messages if message.role == "user"]
    assert len(asked) == 3 and {text[0] for text in asked[:2]} <= set("1357")


def test_jsonl_names_rows_without_an_id_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt": "é", "id": "mine"}\n  \n{"prompt": "z"}', encoding="utf-8")
    tasks_read = list(Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0, repeat=False))
    assert [(task.id, task.messages[0].content) for task in tasks_read] == [("a/1", "x"), ("mine", "é"), ("a/5", "z")]


def test_jsonl_splits_are_disjoint_complete_and_stable(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "id": f"id{number}"} for number in range(2000)]
    source = Jsonl(path=str(write_jsonl(tmp_path / "a.jsonl", rows)))
    train, held = (take(source.stream(split, 0, repeat=False), 9999) for split in (Split.train, Split.eval))
    assert not set(train) & set(held)
    assert set(train) | set(held) == {row["id"] for row in rows}
    assert 0.08 < len(held) / len(rows) < 0.12
    # More rows in another order leave every row where it was.
    more = [{"prompt": "new", "id": f"new{number}"} for number in range(500)]
    bigger = Jsonl(path=str(write_jsonl(tmp_path / "b.jsonl", more + rows[::-1])))
    assert set(take(bigger.stream(Split.eval, 5, repeat=False), 9999)) >= set(held)
    assert not set(take(bigger.stream(Split.train, 5, repeat=False), 9999)) & set(held)


def test_jsonl_folder_never_trains_on_the_files_held_out(tmp_path: Path) -> None:
    for name in ("a", "b", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}] * 3)
    source = Jsonl(path=str(tmp_path), val_files=[str(tmp_path / "test.jsonl")])
    assert take(source.stream(Split.train, 0, repeat=False), 99) == ["a/1", "a/2", "a/3", "b/1", "b/2", "b/3"]
    assert take(source.stream(Split.eval, 0, repeat=False), 99) == ["test/1", "test/2", "test/3"]
    source.val_files = [str(tmp_path)]
    assert "holds only the files of task.val_files=" in error_of(lambda: source.stream(Split.train, 0))


def test_a_file_behind_a_link_is_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"prompt": "a"}])
    (folder / "test.jsonl").symlink_to(write_jsonl(tmp_path / "blob", [{"prompt": "test"}]))
    source = Jsonl(path=str(folder), val_files=[str(tmp_path / "blob")])
    assert take(source.stream(Split.train, 0, repeat=False), 99) == ["a/1"]
    source = Jsonl(path=str(folder), val_files=[str(folder / "test.jsonl")])
    assert take(source.stream(Split.train, 0, repeat=False), 99) == ["a/1"]
    assert take(source.stream(Split.eval, 0, repeat=False), 99) == ["test/1"]


def test_rows_of_all_files_have_ids_of_their_own(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("x/train.jsonl", "y/train.jsonl", "y/train.json", "y/z.jsonl", "v/z.jsonl")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, [{"prompt": str(path)}] * 2)
    *training, other = map(str, paths)
    source = Jsonl(train_files=training, val_files=[other])
    train, held = (list(source.stream(split, 0, repeat=False)) for split in (Split.train, Split.eval))
    names = ["x/train.jsonl", "y/train.jsonl", "y/train.json", "y/z.jsonl", "v/z.jsonl"]
    assert [task.id for task in train + held] == [f"{name}/{line}" for name in names for line in (1, 2)]
    # Without held-out files the split is by these ids.
    source = Jsonl(train_files=training, eval_fraction=0.5)
    split = {s: [task.id for task in source.stream(s, 0, repeat=False)] for s in Split}
    assert sorted(split[Split.train] + split[Split.eval]) == sorted(
        f"{name}/{line}" for name in ("x/train.jsonl", "y/train.jsonl", "y/train.json", "z") for line in (1, 2)
    )
    assert all(held_out(task_id, 0.5) for task_id in split[Split.eval])
    assert not any(held_out(task_id, 0.5) for task_id in split[Split.train])


def test_lists_of_files_are_checked(tmp_path: Path) -> None:
    a, b = (str(write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])) for name in "ab")
    folder, away = str(tmp_path), str(tmp_path / "away.jsonl")
    for source, parts in (
        (Jsonl(), ["no file of tasks is named: give task.path=FILE"]),
        (Jsonl(path=a, train_files=[b]), [f"task.path={a}", f"task.train_files=[{b}]", "give one, not both"]),
        (
            Jsonl(train_files=[a, away]),
            [f"task.train_files=[{a},{away}]", f"no such file or folder of .jsonl files: {away!r}"],
        ),
        (
            Jsonl(train_files=[a], val_files=[away]),
            [f"task.val_files=[{away}]", f"no such file or folder of .jsonl files: {away!r}"],
        ),
        (Jsonl(train_files=[a, b, a]), [f"task.train_files=[{a},{b},{a}]", f"file {a} twice"]),
        (Jsonl(train_files=[a, folder]), [f"task.train_files=[{a},{folder}]", f"file {a} twice"]),
        (Jsonl(path=a, val_files=[b, b]), [f"task.val_files=[{b},{b}]", f"file {b} twice"]),
        (Jsonl(train_files=[a, b], val_files=[b]), ["task.train_files=", f"task.val_files=[{b}]", f"the file {b};"]),
        (Jsonl(path=b, val_files=[folder]), [f"task.path={b}", f"task.val_files=[{folder}]", f"the file {b};"]),
        (Jsonl(train_files=[""]), ["task.train_files=[]", "no such file or folder of .jsonl files: ''"]),
    ):
        for split in Split:
            message = error_of(lambda source=source, split=split: source.stream(split, 0))
            assert [part for part in parts if part not in message] == [], message
    alone = Jsonl(val_files=[a])  # enough for one of `eval.sets`
    assert [task.id for task in alone.stream(Split.eval, 0, repeat=False)] == ["a/1"]
    assert "no file of tasks is named" in error_of(lambda: alone.stream(Split.train, 0))


def test_a_file_that_lies_beside_the_one_that_is_named_is_offered(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").touch()
    said = error_of(lambda: Jsonl(path=str(tmp_path / "problem.jsonl")).stream(Split.train, 0))
    assert said.endswith("problem.jsonl); did you mean problems.jsonl?")


def test_jsonl_of_200k_rows_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    filler = "word " * 20
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f'{{"prompt": "{number} {filler}", "answer": {number}}}\n' for number in range(200_000))
    assert path.stat().st_size > 20e6
    tracemalloc.start()
    stream = Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0)
    for task in (next(stream) for _ in range(2000)):
        assert task.messages[0].content.startswith(task.answer + " ")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6  # three numbers a row


BAD_ROWS = {
    "no prompt": ({"question": "x", "meta": {"n": 1}}, ["'prompt'", "question, meta.n", "task.columns.prompt="]),
    "prompt of a wrong type": ({"prompt": 3}, ["'prompt'", "int 3", "task.columns.prompt="]),
    "no messages": ({"messages": []}, ["'messages'", "list []", "task.columns.messages="]),
    "message without a role": ({"messages": [{"content": "x"}]}, ["'messages'", "message 1", "role"]),
    "message without content": ({"messages": [{"role": "user"}]}, ["message 1", "content must be a string"]),
    "message that is none": ({"messages": ["x"]}, ["message 1", "role and content"]),
    "bad tool call": ({"messages": [{"role": "user", "tool_calls": [{"name": "f"}]}]}, ["message 1", "tool call"]),
    "nothing left to say": ({"messages": [{"role": "assistant", "content": "x"}]}, ["ends with an assistant message"]),
    "answer of a wrong type": ({"prompt": "x", "answer": {"value": 4}}, ["'answer'", "dict", "task.columns.answer="]),
    "answers of a wrong type": ({"prompt": "x", "answer": ["4", ["5"]]}, ["'answer'", "list", "task.columns.answer="]),
    "no answers": ({"prompt": "x", "answer": []}, ["'answer'", "list []", "task.columns.answer="]),
    "id of a wrong type": ({"prompt": "x", "id": True}, ["'id'", "bool", "task.columns.id="]),
    "no object": (["x"], ["JSON object"]),
}


@pytest.mark.parametrize("row, parts", BAD_ROWS.values(), ids=list(BAD_ROWS))
def test_bad_rows_are_named(tmp_path: Path, row: Any, parts: list[str]) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [row, {"prompt": "good"}])
    first = error_of(lambda: Jsonl(path=str(path), eval_fraction=0, bad_rows=BadRows.stop).stream(Split.train, 0))
    path = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "good"}, row])
    later = error_of(lambda: Jsonl(path=str(path), eval_fraction=0, bad_rows=BadRows.stop).stream(Split.train, 0))
    assert f"{path}, line 1" in first
    assert f"{path}, line 2" in later
    for part in parts:
        assert part in first and part in later


@pytest.mark.parametrize("line", [b'{"prompt": "x"', b"prompt", b'{"prompt": "\xff\xfe"}'])
def test_broken_json_is_found_before_anything_is_computed(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' * 3 + line + b"\n")
    message = error_of(lambda: Jsonl(path=str(path), bad_rows=BadRows.stop).stream(Split.train, 0))
    assert f"{path}, line 4" in message and "not valid JSON" in message


def test_a_column_the_user_named_must_exist(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "solution": "4"}])
    source = Jsonl(path=str(path), columns=Columns(answer="solutoin"), eval_fraction=0)
    message = error_of(lambda: source.stream(Split.train, 0))
    assert "'solutoin'" in message and "prompt, solution" in message and "task.columns.answer=solutoin" in message


def test_missing_files_are_named_with_their_option(tmp_path: Path) -> None:
    assert "no file of tasks is named" in error_of(lambda: Jsonl().stream(Split.train, 0))
    message = error_of(lambda: Jsonl(path=str(tmp_path / "none.jsonl")).stream(Split.train, 0))
    assert "task.path=" in message and "none.jsonl" in message
    assert "no such file or folder of .jsonl files" in error_of(
        lambda: Jsonl(path=str(tmp_path)).stream(Split.train, 0)
    )
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]))
    source = Jsonl(path=path, val_files=[str(tmp_path / "b.jsonl")])
    assert "task.val_files=" in error_of(lambda: source.stream(Split.eval, 0))
    assert "no rows for split eval" in error_of(lambda: Jsonl(path=path, eval_fraction=0).stream(Split.eval, 0))
    assert "`eval_fraction` must be" in error_of(lambda: Jsonl(path=path, eval_fraction=1).stream(Split.eval, 0))


# Parquet


def verl_rows(numbers: Iterable[int], split: str = "train") -> list[dict[str, Any]]:
    return [
        {
            "data_source": "made/here",
            "prompt": [{"role": "user", "content": f"{number}+1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": split, "index": number},
        }
        for number in numbers
    ]


def test_parquet_reads_verl_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    first = write_parquet(tmp_path / "train.parquet", verl_rows(range(20)), row_group_size=6)
    second = write_parquet(tmp_path / "more" / "train.parquet", verl_rows(range(20, 30)))
    third = write_parquet(tmp_path / "test.parquet", verl_rows(range(30, 35), "test"))
    words = ["task=parquet", f"task.train_files=[{first},{second}]", f"task.val_files=[{third}]"]
    source = compose(parse(words)).experiment.task
    train, held = (list(source.stream(split, 0, repeat=False)) for split in (Split.train, Split.eval))
    assert [task.answer for task in train] == [str(number + 1) for number in range(30)]
    assert [task.answer for task in held] == [str(number + 1) for number in range(30, 35)]
    ids = [f"train.parquet/{row}" for row in range(1, 21)] + [f"more/train.parquet/{row}" for row in range(1, 11)]
    assert [task.id for task in train] == ids
    assert [task.id for task in held] == [f"test/{row}" for row in range(1, 6)]
    (expected,) = verl_rows([34], "test")
    assert held[-1].messages == (Message("user", "34+1?"),)
    assert held[-1].metadata == {name: value for name, value in expected.items() if name != "prompt"}


def test_parquet_reads_verl_files_through_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", verl_rows(range(20)), row_group_size=6)
    columns = Columns(answer="reward_model.ground_truth", id="extra_info.index")
    read = [
        task
        for split in Split
        for task in Parquet(path=str(path), columns=columns, eval_fraction=0.3).stream(split, 0, repeat=False)
    ]
    assert sorted(task.id for task in read) == sorted(str(number) for number in range(20))
    for task in read:
        assert task.messages == (Message("user", f"{task.id}+1?"),)
        assert task.answer == str(int(task.id) + 1)
        assert task.metadata["data_source"] == "made/here"


def test_parquet_reads_each_row_group_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", [{"prompt": f"{name}{row}"} for row in range(50)], 20)
    source = Parquet(path=str(tmp_path))
    stream = source.stream(Split.train, 4)
    expected = {f"{name}/{row}" for name in "ab" for row in range(1, 51) if not held_out(f"{name}/{row}", 0.1)}
    reads: list[int] = []
    read_row_group = parquet.ParquetFile.read_row_group

    def counted(self: Any, number: int, **options: Any) -> Any:
        reads.append(number)
        return read_row_group(self, number, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    order = take(stream, len(expected))
    assert set(order) == expected and order != sorted(order)
    assert len(reads) <= 6
    assert order == take(source.stream(Split.train, 4), len(expected))
    assert order != take(source.stream(Split.train, 5), len(expected))


def test_a_large_row_group_is_read_in_parts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}", "more": [{"a": number, "b": str(number)}] * 9} for number in range(10_000)]
    readings = ParquetRows({write_parquet(tmp_path / "a.parquet", rows, len(rows)): "a"}).readings()
    tracemalloc.start()
    try:
        assert next(readings)() == rows[0]
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    assert [read() for read in readings] == rows[1:]


def test_parquet_resumes_exactly(tmp_path: Path) -> None:
    source = Parquet(path=str(write_parquet(tmp_path / "a.parquet", [{"prompt": str(row)} for row in range(40)], 7)))
    for position in (0, 1, 17, 36, 50):
        stream = source.stream(Split.train, 1)
        take(stream, position)
        resumed = source.stream(Split.train, 1)
        resumed.load_state_dict(stream.state_dict())
        assert take(resumed, 60) == take(stream, 60)


def test_parquet_errors_name_file_and_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": text} for text in ["x", "y", None]], 2)
    source = Parquet(path=str(path), eval_fraction=0, bad_rows=BadRows.stop)
    message = error_of(lambda: source.stream(Split.train, 0))
    assert f"{path}, row 3" in message and "task.columns.prompt=" in message
    bad = tmp_path / "b.parquet"
    bad.write_text("not a table")
    assert f"{bad}: not a Parquet file" in error_of(lambda: Parquet(path=str(bad)).stream(Split.train, 0))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_text("")
    for source in (Parquet(path=str(tmp_path)), Hub(path=str(tmp_path))):
        assert "pip install 'mtgrpo[data]'" in error_of(lambda source=source: source.stream(Split.train, 0))


# Tables, whose objects have the keys of all others

SCHEMAS = [{"type": "object", "properties": {key: {"type": "string"}}, "required": [key]} for key in ("table", "sql")]
TOOLS = [{"name": name, "description": "", "parameters": one} for name, one in zip("ab", SCHEMAS, strict=True)]
TOOLS[1]["parameters"] |= {"default": {"deep": {"er": 1}}}
CALLED = [
    {"function": {"name": "describe", "arguments": {"table": "a", "within": {"x": [{"y": 1}, {"z": 2}]}}}},
    {"function": {"name": "query", "arguments": {"sql": ""}}},
]
TOLD = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "", "tool_calls": CALLED},
    {"role": "user", "content": "then"},
]
ACCEPTED = [{"describe": {"table": ["a", ""]}}, {"query": {"sql": ["b"]}}]
TABLED = [{"prompt": TOLD, "tools": TOOLS, "calls": ACCEPTED, "extra": {"hint": hint}} for hint in ("x", None)]


@pytest.fixture(params=["parquet", "hub"])
def tabled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """A function: rows -> the source that reads them from a table."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def source(rows: list[dict[str, Any]]) -> Any:
        (folder := tmp_path / "made").mkdir()
        write_parquet(folder / "train.parquet", rows)
        return Hub(path=str(folder)) if request.param == "hub" else Parquet(path=str(folder), eval_fraction=0)

    return source


def test_a_table_gives_calls_and_tools_no_keys_that_nobody_wrote(tabled: Callable[[Any], Any]) -> None:
    stream = tabled(TABLED).stream(Split.train, 0, repeat=False)
    noted = "\n".join(stream.notes)
    for column in ("prompt", "tools", "calls"):
        assert f"column {column!r}: " in noted
    assert "column 'extra'" not in noted and "write arguments as JSON text" in noted
    for task, row in zip(stream, TABLED, strict=True):
        made = [{"function": {"name": c.name, "arguments": c.arguments}} for c in task.messages[1].tool_calls]
        assert made == CALLED
        assert (task.metadata["tools"], task.metadata["calls"]) == (TOOLS, ACCEPTED)
        assert task.metadata["extra"] == row["extra"], "a null in another object is what its reader expects"


def test_lines_of_json_on_the_hub_give_calls_no_keys_either(hub_folder: Path) -> None:
    (hub_folder / "alone").mkdir()
    write_jsonl(hub_folder / "alone" / "train.jsonl", TABLED)
    task = next(Hub(path=str(hub_folder / "alone")).stream(Split.train, 0, repeat=False))
    assert [{"function": {"name": c.name, "arguments": c.arguments}} for c in task.messages[1].tool_calls] == CALLED
    assert (task.metadata["tools"], task.metadata["calls"]) == (TOOLS, ACCEPTED)


def test_the_nulls_that_a_table_leaves_out_are_counted(tabled: Callable[[Any], Any]) -> None:
    prompts = [[TOLD[0], {**TOLD[1], "tool_calls": [{"name": "f", "arguments": {key: 1}}]}, TOLD[2]] for key in "abb"]
    stream = tabled([{"prompt": prompt} for prompt in prompts]).stream(Split.train, 0, repeat=False)
    [note] = stream.notes
    assert note.startswith("column 'prompt': 3 nulls in arguments or schemas are left out")


def test_a_null_in_arguments_that_are_json_text_stays(tabled: Callable[[Any], Any]) -> None:
    said = [{"name": "f", "arguments": json.dumps({"sql": None, "k": 1})}]
    stream = tabled([{"prompt": [TOLD[0], {**TOLD[1], "tool_calls": said}, TOLD[2]]}]).stream(Split.train, 0, False)
    assert next(stream).messages[1].tool_calls[0].arguments == {"sql": None, "k": 1}
    assert stream.notes == []


# The hub


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the layout of a data set on the hub: two files to train on, one to test on."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "made"
    folder.mkdir()
    write_jsonl(folder / "train-0.jsonl", [{"prompt": f"a{row}", "answer": row} for row in range(30)])
    write_jsonl(folder / "train-1.jsonl", [{"prompt": f"b{row}", "answer": row} for row in range(20)])
    write_jsonl(folder / "test-0.jsonl", [{"prompt": f"t{row}", "answer": row} for row in range(5)])
    return folder


def prompts(stream: Iterable[Task], count: int) -> list[str]:
    return [task.messages[-1].content for _, task in zip(range(count), stream, strict=False)]


def test_hub_streams_shuffles_and_resumes(hub_folder: Path) -> None:
    source = Hub(path=str(hub_folder))
    stream = source.stream(Split.train, 3)
    first, second = prompts(stream, 50), prompts(stream, 50)
    assert stream.epoch == 2
    everything = {f"a{row}" for row in range(30)} | {f"b{row}" for row in range(20)}
    assert len(first) == len(second) == 50 and set(first) == set(second) == everything
    other = prompts(source.stream(Split.train, 4), 50)
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    for position in (0, 1, 49, 50, 63):
        stream = source.stream(Split.train, 3)
        prompts(stream, position)
        resumed = source.stream(Split.train, 3)
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert prompts(resumed, 37) == (first + second)[position : position + 37]


def test_hub_evaluates_in_order_once(hub_folder: Path) -> None:
    source = Hub(path=str(hub_folder))
    stream = source.stream(Split.eval, 0, repeat=False)
    read = list(stream)
    assert [task.answer for task in read] == ["0", "1", "2", "3", "4"]
    assert stream.epoch == 1 and next(stream, None) is None
    resumed = source.stream(Split.eval, 0, repeat=False)
    resumed.load_state_dict(stream.state_dict())
    assert next(resumed, None) is None
    assert len({task.id for task in read}) == 5
    assert [task.id for task in read] == take(source.stream(Split.eval, 9, repeat=False), 5)


def test_hub_errors_name_the_option(hub_folder: Path) -> None:
    assert "task.path is not set" in error_of(lambda: Hub().stream(Split.train, 0))
    message = error_of(lambda: Hub(path=str(hub_folder), eval_split="validation").stream(Split.eval, 0))
    assert "split validation" in message and "['train', 'test']" in message and "task.eval_split" in message
    assert "task.path" in error_of(lambda: Hub(path=str(hub_folder / "none")).stream(Split.train, 0))
    columns = Columns(prompt="question")
    message = error_of(lambda: Hub(path=str(hub_folder), columns=columns).stream(Split.train, 0))
    assert "prompt, answer" in message and "task.columns.prompt=" in message


def test_a_prompt_column_that_is_named_is_not_replaced_by_that_of_messages(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2", "messages": [{"role": "user", "content": "Hello."}], "answer": 4}]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    for columns in (Columns(prompt="qestion"), Columns(prompt="qestion", messages="dialogue")):
        message = error_of(
            lambda columns=columns: Jsonl(path=path, columns=columns, eval_fraction=0).stream(Split.train, 0)
        )
        assert "no column 'qestion'" in message and "columns are question, messages" in message
        assert "'messages'" not in message and ("'dialogue'" in message) == (columns.messages == "dialogue")
    (task,) = Jsonl(path=path, eval_fraction=0).stream(Split.train, 0, repeat=False)
    assert task.messages[0].content == "Hello."


# GSM8K and SVAMP


@pytest.fixture
def no_local_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTGRPO_DATA", raising=False)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def grade(task: Task, messages: tuple[Message, ...]) -> float:
    turns = [Turn([], [], [], [], Finish.STOP, message) for message in messages if message.role == "assistant"]
    return Numeric().reward(Trajectory(task, turns=turns))


def check_demonstration(task: Task, messages: tuple[Message, ...]) -> None:
    assert grade(task, messages) == 1.0
    *calls, last = messages
    assert last.role == "assistant" and not last.tool_calls
    assert calls
    for asked, answered in zip(calls[::2], calls[1::2], strict=True):
        assert asked.role == "assistant" and answered.role == "tool" and answered.name == "calculator"
        (call,) = asked.tool_calls
        assert call.name == "calculator"
        assert answered.content == str(Calculator()(**call.arguments))


@pytest.mark.parametrize(
    "source, split, rows, demonstrated",
    [
        (Gsm8k(), Split.train, 7473, 7001),
        (Gsm8k(), Split.eval, 1319, 1208),
        (WordProblems(), Split.train, 707, 706),
        (WordProblems(), Split.eval, 293, 293),
    ],
    ids=["gsm8k-train", "gsm8k-eval", "svamp-train", "svamp-eval"],
)
def test_real_problems_and_their_demonstrations(
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: TaskSource,
    split: Split,
    rows: int,
    demonstrated: int,
) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    read = list(source.stream(split, 0, repeat=False))
    assert len(read) == rows == len({task.id for task in read})
    count = 0
    for task in read:
        assert [message.role for message in task.messages] == ["system", "user"]
        assert task.answer.removeprefix("-").isdecimal()
        assert "<<" not in task.messages[1].content and "####" not in task.messages[1].content
        demonstration = source.demonstration(task, 0)
        if demonstration:
            count += 1
            check_demonstration(task, demonstration)
    assert count == demonstrated


def test_svamp_splits_are_disjoint(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    train, held = (take(WordProblems().stream(split, 0), 293) for split in (Split.train, Split.eval))
    assert not set(train) & set(held)


def test_gsm8k_demonstration_is_the_gold_solution(tmp_path: Path) -> None:
    answer = "48/2 = <<48/2=24>>24 clips in May.\nShe sold <<48+24=72>>72 in all.\n#### 72"
    write_jsonl(tmp_path / "train.jsonl", [{"question": "How many clips?", "answer": answer}])
    source = Gsm8k(path=str(tmp_path), system_prompt="")
    task = next(source.stream(Split.train, 0))
    assert (task.id, task.answer, task.messages) == ("gsm8k/train/0", "72", (Message("user", "How many clips?"),))
    assert source.demonstration(task, 0) == (
        Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "48/2"}),)),
        Message("tool", "24", name="calculator"),
        Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "48+24"}),)),
        Message("tool", "72", name="calculator"),
        Message("assistant", "#### 72"),
    )


@pytest.mark.parametrize(
    "calculations, answer",
    [
        ([], "4"),
        ([("10/3", "3.33")], "3.33"),
        ([("2+2", "4"), ("4/0", "1")], "1"),
        ([("2+x", "4")], "4"),
        ([("2+2", "4")], "5"),
        ([("2+2", "four")], "4"),
        ([("2+2", "4")], "four"),
        ([("2+2", "4")], "4/0"),
    ],
)
def test_a_solution_the_calculator_does_not_confirm_is_no_demonstration(
    calculations: list[tuple[str, str]], answer: str
) -> None:
    assert solve_with_calculator(calculations, answer) is None


def test_word_problems_compose_text_and_equation(tmp_path: Path) -> None:
    row = {"ID": "chal-1", "Body": "Tom has 3 bags of 4", "Question": "How many?", "Equation": "( 3.0 * 4.0 )"}
    rows = [{**row, "ID": f"chal-{number}", "Answer": 12.0} for number in range(20)]
    source = WordProblems(path=str(write_jsonl(tmp_path / "svamp.jsonl", rows)), system_prompt="")
    task = next(source.stream(Split.train, 0))
    assert task.messages == (Message("user", "Tom has 3 bags of 4. How many?"),)
    demonstration = source.demonstration(task, 0)
    assert demonstration is not None
    assert demonstration[0].tool_calls == (ToolCall("calculator", {"expression": "3*4"}),)
    assert source.demonstration(Task("x", task.messages, "13", task.metadata), 0) is None


@pytest.mark.parametrize("source, file", [(Gsm8k(), "train.jsonl"), (WordProblems(), "svamp.jsonl")])
def test_another_layout_is_refused_with_its_columns(source: TaskSource, file: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / file, [{"problem": "x", "solution": "y", "ID": row} for row in range(9)])
    path = path.parent if isinstance(source, Gsm8k) else path
    opened = type(source)(path=str(path))  # pyright: ignore[reportCallIssue]
    message = error_of(lambda: opened.stream(Split.train, 0))
    assert f"{file}, line " in message and "problem, solution, ID" in message and "task=jsonl" in message
    missing = type(source)(path=str(tmp_path / "none"))  # pyright: ignore[reportCallIssue]
    assert "task.path=" in error_of(lambda: missing.stream(Split.train, 0))


@pytest.mark.usefixtures("no_local_data")
@pytest.mark.parametrize("source", [Gsm8k(), WordProblems()])
def test_without_files_and_network_the_error_says_what_to_set(source: TaskSource) -> None:
    pytest.importorskip("datasets")
    message = error_of(lambda: source.stream(Split.train, 0))
    assert "does not answer" in message and "task.path" in message and "MTGRPO_DATA" in message


@pytest.mark.usefixtures("no_local_data")
def test_without_files_the_hub_is_read(hub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{row}?", "answer": f"x\n#### {row},000"} for row in range(10)]
    write_jsonl(hub_folder / "train-0.jsonl", rows)
    (hub_folder / "train-1.jsonl").unlink()
    (hub_folder / "test-0.jsonl").unlink()
    monkeypatch.setattr(
        "mtgrpo.tasks.published.HubRows", lambda name, subset, split, cure: HubRows(str(hub_folder), "", split, cure)
    )
    read = list(Gsm8k().stream(Split.train, 0, repeat=False))
    assert [task.answer for task in read] == [f"{row}000" for row in range(10)]


@pytest.mark.usefixtures("no_local_data")
def test_the_data_folder_is_found_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert published.data_folder() is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert published.data_folder() == Path("../shared/data")
    monkeypatch.setenv("MTGRPO_DATA", str(tmp_path))
    assert published.data_folder() == tmp_path
    monkeypatch.setenv("MTGRPO_DATA", str(tmp_path / "none"))
    assert "MTGRPO_DATA=" in error_of(published.data_folder)


def test_varied_word_problems_keep_wording_and_equation(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    plain = WordProblems(prompt_template="In 20 words: {prompt}", system_prompt="Be brief.")
    varied = dataclasses.replace(plain, vary_numbers=True)
    originals = {task.id: task for task, _ in zip(plain.stream(Split.train, 0), range(1000), strict=False)}
    first = [task for task, _ in zip(varied.stream(Split.train, 5), range(800), strict=False)]
    again = [task for task, _ in zip(varied.stream(Split.train, 5), range(800), strict=False)]
    assert first == again
    other = 0
    for task in first:
        original = originals[task.id]
        text, new_text = original.messages[-1].content, task.messages[-1].content
        assert re.sub(r"\d+", "#", text) == re.sub(r"\d+", "#", new_text)
        assert new_text.startswith("In 20 words: ") and len(task.messages) == 2
        messages = varied.demonstration(task, 0)
        assert messages is not None or plain.demonstration(original, 0) is None
        if messages is not None:  # the calculator agrees with the answer
            assert messages[-1].content == f"#### {task.answer}"
            assert int(task.answer) >= 0
        other += text != new_text
    assert other > 600
    held_out = [list(source.stream(Split.eval, 0, repeat=False)) for source in (plain, varied)]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("truth", [{"tests": "x"}, [], [["5"]], None, True])
def test_a_ground_truth_that_is_no_answer_is_left_to_rewards(tmp_path: Path, truth: Any) -> None:
    """verl's sets for code have test cases there."""
    path = write_jsonl(tmp_path / "code.jsonl", [{"prompt": "x", "reward_model": {"ground_truth": truth}}])
    task = next(Jsonl(path=str(path), eval_fraction=0).stream(Split.train, 0))
    assert task.answer == ""
    assert task.metadata["reward_model"] == {"ground_truth": truth}


# --- several sources at once ---


def mixture(tmp_path: Path, **more: Any) -> Mixed:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}"} for n in range(30)])
    files = ({"task": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "eval_fraction": 0.2} for name in "ab")
    return Mixed(of=[{**file, "weight": weight} for file, weight in zip(files, (3, 1), strict=True)], **more)


def test_sources_are_mixed_by_weight_and_resume(tmp_path: Path) -> None:
    source = mixture(tmp_path)
    ids = [task.id for task in itertools.islice(source.stream(Split.train, 7), 400)]
    assert 270 < sum(name.startswith("a/") for name in ids) < 330
    assert ids[:40] != [task.id for task in itertools.islice(source.stream(Split.train, 8), 40)]
    stream = source.stream(Split.train, 7)
    assert [next(stream).id for _ in range(123)] == ids[:123]
    resumed = source.stream(Split.train, 7)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [next(resumed).id for _ in range(200)] == ids[123:323]
    assert resumed.epoch >= 1 and not resumed.endless


def test_files_of_one_name_in_a_mixture_have_ids_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", [{"prompt": f"{folder.name}{n}"} for n in range(3)])
    of = [{"task": "jsonl", "path": str(folder), "eval_fraction": 0} for folder in folders]
    found = {task.id: task.messages[0].content for task in Mixed(of=of).stream(Split.train, 0, repeat=False)}
    assert found == {f"{name}/train.jsonl/{n + 1}": f"{name}{n}" for name in "ab" for n in range(3)}


def test_one_pass_over_a_mixture_has_every_held_out_task_once(tmp_path: Path) -> None:
    source = mixture(tmp_path)
    found = [task.id for task in source.stream(Split.eval, 0, repeat=False)]
    alone = [Jsonl(path=str(tmp_path / f"{name}.jsonl"), eval_fraction=0.2) for name in "ab"]
    assert sorted(found) == sorted(task.id for one in alone for task in one.stream(Split.eval, 0, repeat=False))
    assert found != sorted(found)


def test_demonstrations_are_those_of_the_source() -> None:
    source = Mixed(of=[{"task": "ledger", "min_pages": 2, "max_pages": 2}, {"task": "calculator"}])
    tasks = list(itertools.islice(source.stream(Split.train, 0), 10))
    kinds = {task.id.partition("/")[0]: source.demonstration(task, 0) for task in tasks}
    assert len(kinds) == 2 and all(kinds.values()) and source.stream(Split.train, 0).endless


@pytest.mark.parametrize(
    "of, said",
    [
        ([], r"task\.of is empty"),
        ([{"weight": 2}], r"an entry is \{task: NAME"),
        ([{"task": "ledger", "weight": 0}], "weight: NUMBER above 0"),
        ([{"task": "ledger", "pages": 2}], "the task ledger has no setting 'pages'"),
        ([{"task": "legder"}], "legder"),
        ([{"task": "mixed", "of": [{"task": "ledger"}]}], "a mix in a mix"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(of: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mixed(of=of).stream(Split.train, 0)
    with pytest.raises(ConfigError, match=r"`system_prompt=x` has no effect"):
        Mixed(system_prompt="x")


@given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4), seed=st.integers(0, 9), data=st.data())
def test_a_mixture_goes_on_in_its_order_from_wherever_it_was_saved(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    """Also where some of its sources have ended."""
    weights = data.draw(st.lists(st.sampled_from([0.5, 1, 3]), min_size=len(sizes), max_size=len(sizes)))

    def mixed() -> MixedStream:
        parts = [
            IndexedStream(size, lambda row, n=n: Task(f"{n}/{row}", ()), seed, repeat=False)
            for n, size in enumerate(sizes)
        ]
        return MixedStream(parts, weights, seed)

    ids = [task.id for task in mixed()]
    assert len(set(ids)) == len(ids) == sum(sizes)
    for position in range(len(ids) + 1):
        stream = mixed()
        take(stream, position)
        resumed = mixed()
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert [task.id for task in resumed] == ids[position:]


def test_what_a_source_of_a_mixture_skips_is_noted() -> None:
    def task(row: int) -> Task:
        if row:
            raise ConfigError("row 1 is no task")
        return Task("0", ())

    stream = MixedStream([IndexedStream(2, task, 0, repeat=False, skips=True)], [1], 0)
    assert [task.id for task in stream] == ["0"]
    assert stream.notes == ["what cannot be used is skipped, the first time here: row 1 is no task"]
