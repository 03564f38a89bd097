"""Data sets of questions, instructions and programs: rows become tasks, bad rows are named, splits never meet."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.config.compose import compose, parse
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.humaneval import HumanEval
from mtgrpo.integrations.ifeval import IFEvalTasks, followed
from mtgrpo.integrations.triviaqa import TriviaQA
from mtgrpo.parts.extension import options
from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import EM, Convention
from mtgrpo.runtime.text import boxed
from mtgrpo.tasks import Split, TaskSource
from mtgrpo.tasks.gsm8k import Gsm8k
from mtgrpo.tasks.math import Math
from mtgrpo.tasks.mbpp import MBPP
from mtgrpo.tasks.search_qa import SearchQA
from mtgrpo.tasks.wiki_years import WikiYears
from mtgrpo.tools.search import Search
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("MTGRPO_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def tasks(source: TaskSource, split: Split) -> list[Task]:
    return list(source.stream(split, seed=0, repeat=False))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def said(task: Task, text: str) -> Trajectory:
    return Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])


@pytest.mark.parametrize("make", [IFEvalTasks, HumanEval, MBPP])
def test_a_missing_file_is_named(make: Callable[..., TaskSource], tmp_path: Path) -> None:
    message = refusal(functools.partial(tasks, make(path=str(tmp_path / "no.jsonl")), Split.eval))
    assert "there is no such file" in message and ".jsonl" in message


def test_a_folder_without_its_files_is_said_to_be_one(tmp_path: Path) -> None:
    message = refusal(functools.partial(tasks, Gsm8k(path=str(tmp_path)), Split.train))
    assert message.endswith("give a folder with train.jsonl or train.parquet")


@pytest.mark.parametrize("make", [IFEvalTasks, HumanEval, MBPP, TriviaQA, functools.partial(Math, path="nobody/math")])
def test_without_files_and_network_the_cure_is_said(make: Callable[..., TaskSource]) -> None:
    pytest.importorskip("datasets")
    message = refusal(functools.partial(tasks, make(), Split.eval))
    assert "is not on this machine" in message and ("set task.path" in message or "give a file" in message)


# --- IFEval ---


def test_the_100_smallest_hashes_are_held_out(tmp_path: Path) -> None:
    keys = list(range(1000, 1250))
    rows = [
        {"key": key, "prompt": f"{key}?", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]} for key in keys
    ]
    source = IFEvalTasks(path=str(write(tmp_path / "if.jsonl", rows)), system_prompt="Be exact.")
    held_out, trained = ({task.id for task in tasks(source, split)} for split in (Split.eval, Split.train))
    by_hash = sorted(keys, key=lambda key: hashlib.sha256(str(key).encode()).hexdigest())
    assert held_out == {f"ifeval/{key}" for key in by_hash[:100]}
    assert trained == {f"ifeval/{key}" for key in by_hash[100:]}
    task = tasks(source, Split.train)[0]
    assert [message.content for message in task.messages] == ["Be exact.", f"{task.id.removeprefix('ifeval/')}?"]
    assert followed(task, '"yes"') == [True]
    few = IFEvalTasks(path=str(write(tmp_path / "two.jsonl", rows[:2])))
    assert "it has only 2" in refusal(functools.partial(tasks, few, Split.train))


@pytest.mark.parametrize(
    "change", [{"prompt": 3}, {"kwargs": []}, {"instruction_id_list": "a"}, {"kwargs": None}, {"key": None}]
)
def test_bad_instructions_are_named_with_their_line(change: dict[str, Any], tmp_path: Path) -> None:
    row = {"key": 1, "prompt": "?", "instruction_id_list": ["a:b"], "kwargs": [{}]}
    file = write(tmp_path / "if.jsonl", [row | change])
    assert refusal(functools.partial(tasks, IFEvalTasks(path=str(file)), Split.eval)).startswith(f"{file}, line 1: ")


def test_the_real_prompts_of_ifeval(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    trained, held_out = tasks(IFEvalTasks(), Split.train), tasks(IFEvalTasks(), Split.eval)
    assert (len(trained), len(held_out)) == (441, 100)
    assert sum(len(followed(task, "x")) for task in [*trained, *held_out]) == 834


# --- TriviaQA: rows as rc.nocontext has them ---

CAPITALS = ["Rome", "Paris", "Oslo", "Cairo", "Lima", "Quito", "Bern", "Riga", "Kyiv", "Baku"] * 2
TRIVIA = [
    {
        "question": f"Question {number}?",
        "question_id": f"tc_{number}",
        "question_source": "http://example.com/",
        "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
        "answer": {
            "aliases": [name, f"The city of {name}", f"{name}_(city)"],
            "normalized_aliases": [name.lower(), f"city of {name.lower()}", f"{name.lower()} city"],
            "matched_wiki_entity_name": "",
            "normalized_value": name.lower(),
            "type": "WikipediaEntity",
            "value": name,
        },
    }
    for number, name in enumerate(CAPITALS)
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_trivia_rows_become_tasks(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "trivia"
    if kind == "jsonl":
        write(folder / "train.jsonl", TRIVIA[:15])
        write(folder / "validation.jsonl", TRIVIA[15:])
    else:
        end = "" if kind == "parquet" else "-00000-of-00001"
        write_parquet(folder / f"train{end}.parquet", TRIVIA[:15])
        write_parquet(folder / f"validation{end}.parquet", TRIVIA[15:])
    trained, held_out = tasks(TriviaQA(path=str(folder)), Split.train), tasks(TriviaQA(path=str(folder)), Split.eval)
    assert [task.id for task in trained] == [f"triviaqa/tc_{number}" for number in range(15)]
    assert len(held_out) == 5
    task = trained[0]
    assert task.answer == "Rome" and task.messages[-1] == Message("user", "Question 0?")
    assert task.metadata["answers"] == [
        *("Rome", "The city of Rome", "Rome_(city)"),
        *("rome", "city of rome", "rome city"),
    ]
    for text, worth in [("ROME", 1), ("the City of Rome.", 1), ("Rome (city)", 1), ("Paris", 0), ("", 0)]:
        assert EM(convention=Convention.triviaqa).reward(said(task, text)) == worth


@pytest.mark.parametrize(
    "change, part",
    [
        ({"answer": {"aliases": []}}, "TriviaQA rows have"),
        ({"answer": None}, "TriviaQA rows have"),
        ({"answer": {"value": " "}}, "TriviaQA rows have"),
        ({"question": None}, "TriviaQA rows have"),
        ({"answer": {"value": "x", "aliases": "x"}}, "aliases and normalized_aliases"),
    ],
)
def test_bad_trivia_is_named_with_its_line(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    file = write(tmp_path / "validation.jsonl", [TRIVIA[0], "", TRIVIA[1] | change])
    message = refusal(functools.partial(tasks, TriviaQA(path=str(tmp_path)), Split.eval))
    assert message.startswith(f"{file}, line 3: ") and part in message, message


def test_a_folder_without_the_split_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", TRIVIA)
    read = functools.partial(tasks, TriviaQA(path=str(tmp_path)), Split.eval)
    assert "there is no such file; give a folder with validation*.jsonl or validation*.parquet" in refusal(read)
    write(tmp_path / "validation.jsonl", TRIVIA)
    (tmp_path / "validation.parquet").touch()
    assert "it has both of them" in refusal(read)


# --- MATH ---

PROBLEMS = [
    {"problem": "1/2?", "solution": r"So \boxed{1}, no: \boxed{\frac{1}{2}}.", "level": "Level 1", "type": "Algebra"},
    {"problem": "2?", "solution": r"$\boxed{2}$", "level": "Level 2", "type": "Algebra"},
]


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$\boxed{ (1, \{2\}) }$", r"(1, \{2\})"),
        (r"\boxed{a}b}", "a"),
        (r"\boxed {x \in \{1, 2} \}", r"x \in \{1, 2"),
        (r"\boxed{1 \\} \\}", r"1 \\"),
        (r"\boxed{1", ""),
        (r"\boxed 3", ""),
        (r"\boxed", ""),
        ("3", ""),
        ("", ""),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str) -> None:
    assert boxed(text) == answer


def test_problems_come_from_a_folder_or_a_file(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", PROBLEMS)
    write_parquet(tmp_path / "test.parquet", [{"problem": "3?", "answer": "3", "solution": "", "unique_id": "test/3"}])
    source = Math(path=str(tmp_path))
    first, second = tasks(source, Split.train)
    assert (first.answer, second.answer) == (r"\frac{1}{2}", "2")
    assert first.metadata == {"solution": PROBLEMS[0]["solution"], "level": "Level 1", "subject": "Algebra"}
    assert source.demonstration(first, 0) == (Message("assistant", str(PROBLEMS[0]["solution"])),)
    (third,) = tasks(source, Split.eval)
    assert (third.id, third.answer, source.demonstration(third, 0)) == ("math/test/3", "3", None)
    numbered = [PROBLEMS[1] | {"unique_id": f"a/{number}"} for number in range(200)]
    single = Math(path=str(write(tmp_path / "all.jsonl", numbered)))
    trained, held_out = ({task.id for task in tasks(single, split)} for split in (Split.train, Split.eval))
    assert len(trained | held_out) == 200 and not trained & held_out and 5 < len(held_out) < 40


@pytest.mark.parametrize("change", [{"problem": None}, {"solution": "no box"}, {"solution": None}, {"answer": ""}])
def test_bad_problems_are_named_with_their_line_and_end_no_run(change: dict[str, Any], tmp_path: Path) -> None:
    for rows, line in (([PROBLEMS[0], PROBLEMS[1] | change], 2), ([PROBLEMS[1] | change, PROBLEMS[0]], 1)):
        file = write(tmp_path / "train.jsonl", rows)
        stream = Math(path=str(tmp_path)).stream(Split.train, seed=0, repeat=False)
        assert [task.answer for task in stream] == [r"\frac{1}{2}"] and stream.skipped == 1
        assert f"here: {file}, line {line}: " in stream.notes[0] and "task=jsonl" in stream.notes[0]
    write(tmp_path / "train.jsonl", [PROBLEMS[1] | change])
    assert refusal(functools.partial(tasks, Math(path=str(tmp_path)), Split.train)).startswith(f"{file}, line 1: ")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("So $\\boxed 2$.", "2"),
        ("$\\boxed 1/2$", "1/2"),
        ("It is \\fbox{3} or so", "3"),
        ("$\\boxed{5}$ (\\fbox{3})", "5"),
    ],
)
def test_boxes_without_braces_or_of_another_name_are_answers_of_math(
    solution: str, answer: str, tmp_path: Path
) -> None:
    write(tmp_path / "train.jsonl", [{"problem": "?", "solution": solution}])
    assert [task.answer for task in tasks(Math(path=str(tmp_path)), Split.train)] == [answer]


def test_the_copy_of_math_must_be_named() -> None:
    assert "name the copy of MATH" in refusal(functools.partial(tasks, Math(), Split.train))


# --- programs ---


def passes(programs: list[str]) -> list[bool]:
    """Which of these trusted programs run without an error."""
    code = (
        "import json, sys, io, contextlib\n"
        "def passes(program):\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()):\n"
        "            exec(program, {'__name__': 'x'})\n"
        "        return True\n"
        "    except Exception:\n"
        "        return False\n"
        "json.dump([passes(one) for one in json.load(sys.stdin)], sys.stdout)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    return json.loads(subprocess.run(command, input=json.dumps(programs), stdout=-1, text=True, check=True).stdout)


def program(task: Task, code: str) -> str:
    return f"{task.metadata['setup']}\n{code}\n{task.metadata['tests']}"


FUNCTION = {
    "task_id": "HumanEval/7",
    "prompt": "from typing import List\n\n\ndef last(values: List[int]) -> int:\n    '''The last one.'''\n",
    "entry_point": "last",
    "canonical_solution": "    return values[-1]\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n",
}
PROGRAM = {
    "task_id": 600,
    "text": "Write a function to double.",
    "code": "def double(n):\r\n  return 2 * n",
    "test_setup_code": "",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
}


def test_a_function_is_completed_and_tested(tmp_path: Path) -> None:
    source = HumanEval(path=str(write(tmp_path / "he.jsonl", [FUNCTION])))
    (task,) = tasks(source, Split.eval)
    assert task.id == "humaneval/7" and "def last(values: List[int])" in task.messages[-1].content
    right, wrong = "def last(values: List[int]):\n    return values.pop()", "def last(values): return values[0]"
    assert passes([program(task, code) for code in (task.answer, right, wrong, "")]) == [True, True, False, False]
    (shown,) = source.demonstration(task, 0) or ()
    assert last_code_block(shown.content) == task.answer.strip()
    assert "for evaluation alone" in refusal(functools.partial(tasks, source, Split.train))


def test_a_program_is_described_by_its_tests(tmp_path: Path) -> None:
    rows = [PROGRAM | {"task_id": number} for number in (3, 11, 367, 510, 511, 927, 974)]
    source = MBPP(path=str(write(tmp_path / "mbpp.jsonl", rows)))
    assert [task.id for task in tasks(source, Split.eval)] == ["mbpp/11", "mbpp/510"]
    task, last = tasks(source, Split.train)
    assert (task.id, last.id) == ("mbpp/511", "mbpp/974")
    assert "assert double(0) == 0" in task.messages[-1].content
    assert passes([program(task, code) for code in (task.answer, "double = abs")]) == [True, False]
    (shown,) = source.demonstration(task, 0) or ()
    assert last_code_block(shown.content) == task.answer.strip()


@pytest.mark.parametrize("name", ["prompt", "entry_point", "canonical_solution", "test", "task_id"])
def test_bad_functions_are_named_with_their_line(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "he.jsonl", [FUNCTION | {name: None}])
    assert refusal(functools.partial(tasks, HumanEval(path=str(file)), Split.eval)).startswith(f"{file}, line 1: ")


@pytest.mark.parametrize("change", [{"text": None}, {"code": 3}, {"test_list": []}, {"test_list": "x"}])
def test_bad_programs_are_named_with_their_line(change: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "mbpp.jsonl", [PROGRAM, PROGRAM | change])
    assert refusal(functools.partial(tasks, MBPP(path=str(file)), Split.train)).startswith(f"{file}, line 2: ")


def test_no_task_of_a_split_at_all(tmp_path: Path) -> None:
    source = MBPP(path=str(write(tmp_path / "mbpp.jsonl", [PROGRAM])))
    assert "no rows for split eval" in refusal(functools.partial(tasks, source, Split.eval))


@pytest.mark.real
def test_reference_solutions_pass_their_tests(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    found = [*tasks(HumanEval(), Split.eval), *tasks(MBPP(), Split.train), *tasks(MBPP(), Split.eval)]
    assert len(found) == 164 + 463 + 499
    verdicts = passes([program(task, task.answer) for task in found])
    assert [task.id for task, passed in zip(found, verdicts, strict=True) if not passed] == []


# --- questions to search for ---

PASSAGES = [
    {
        "id": "p1",
        "title": "Ann Lee",
        "text": "Ann Lee wrote the song Blue Door. " + "She sang. " * 20 + "Born in Oslo.",
    },
    {"id": "p2", "title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"id": "p3", "title": "Zebra", "text": "A zebra has stripes."},
]
STEPS = [
    {"question": "Who wrote the song Blue Door?", "answer": "Ann Lee", "gold": "p1"},
    {"question": "#1 born where? #10", "answer": "Oslo", "gold": "p1"},
]
ASKED = [
    {
        "id": "q1",
        "question": "What has stripes?",
        "answers": ["zebra", "a zebra"],
        "gold": ["p3"],
        "source": "hotpotqa-train",
    },
    {
        **{"id": "q2", "question": "Where was the writer of Blue Door born?", "answers": ["Oslo"], "gold": ["p1"]},
        **{"source": "musique-train", "type": "multihop", "decomposition": STEPS},
    },
    {
        **{"id": "q3", "question": "Is Oslo in Norway?", "answers": ["yes"], "gold": ["p2"], "source": "hotpotqa-dev"},
        "decomposition": None,  # as Parquet has it
    },
    {"id": "q4", "question": "Who?", "answers": ["yes"], "gold": ["p2"], "source": "2wikimultihopqa-train"},
    {"id": "q5", "question": "What has stripes?", "answers": ["a tiger"], "gold": ["p3"], "source": "hotpotqa-train"},
    *[
        {"id": f"n{number}", "question": "?", "answers": ["x"], "gold": [], "source": "nq-dev", "type": "singlehop"}
        for number in range(40)
    ],
    {"id": "x1", "question": "?", "answers": ["x"], "gold": [], "source": "xquad-en"},
]


@pytest.fixture
def asked(tmp_path: Path) -> SearchQA:
    write(tmp_path / "qa" / "passages.jsonl", PASSAGES)
    write(tmp_path / "qa" / "questions.jsonl", ASKED)
    return SearchQA(path=str(tmp_path / "qa"), snippet_chars=60)


def test_questions_are_divided_by_their_source(asked: SearchQA) -> None:
    trained, held_out = ({task.id for task in tasks(asked, split)} for split in (Split.train, Split.eval))
    even = {f"n{n}" for n in range(40) if int(hashlib.sha256(f"n{n}".encode()).hexdigest(), 16) % 2 == 0}
    assert trained == {f"search_qa/{one}" for one in {"q1", "q2", "q4", "q5"} | even}
    assert held_out == {f"search_qa/{one}" for one in {"q3"} | {f"n{n}" for n in range(40)} - even}
    asked.multihop_only = True
    assert [task.id for task in tasks(asked, Split.train)] == ["search_qa/q2"]


def test_demonstrations_search_and_read_until_the_answer_is_seen(asked: SearchQA) -> None:
    pytest.importorskip("bm25s")
    found = {task.id.removeprefix("search_qa/"): task for split in Split for task in tasks(asked, split)}
    said = {name: asked.demonstration(task, 0) for name, task in found.items()}

    def calls(name: str) -> list[tuple[str, Any]]:
        return [(call.name, dict(call.arguments)) for message in said[name] or () for call in message.tool_calls]

    assert calls("q1") == [("search", {"query": "What has stripes?"})]
    assert [message.role for message in said["q1"] or ()] == ["assistant", "tool", "assistant"]
    assert said["q1"] and said["q1"][1].content.startswith("[p3] Zebra: A zebra has stripes.")
    assert said["q1"][-1] == Message("assistant", "zebra")
    assert calls("q2") == [
        ("search", {"query": "Who wrote the song Blue Door?"}),
        ("search", {"query": "Ann Lee born where? #10"}),
        ("read", {"id": "p1"}),
    ]
    assert said["q2"] and said["q2"][-1].content == "Oslo"
    assert calls("q3") == [("search", {"query": "Is Oslo in Norway?"})]
    assert said["q4"] is None  # not found
    assert said["q5"] is None  # not what the passage says
    assert said["n0"] is None  # nothing to find


YEARS = [
    {"id": "a", "title": "Ann Lee", "text": "Ann Lee (born 2 May 1961, died 1999) is a writer."},
    {"id": "b", "title": "Blue Door (song)", "text": "Blue Door is a 1987 song, and again of 1990."},
    {"id": "c", "title": "Blue Door (song)", "text": "Blue Door is a 1988 song."},
    {"id": "d", "title": "!?", "text": "!? was a 1977 film."},
    {"id": "e", "title": "Late", "text": f"{'Late. ' * 20}It is a 1970 film."},
    {"id": "f", "title": "Zebra", "text": "A zebra has stripes."},
    *[{"id": f"t{n}", "title": f"Title {n}", "text": f"Title {n} is a {1900 + n} book."} for n in range(40)],
]


def test_years_are_asked_for_that_paragraphs_begin_with(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    write(tmp_path / "qa" / "passages.jsonl", YEARS)
    asked = WikiYears(path=str(tmp_path / "qa"), right=0.5)
    divided = [{task.id: task for task in tasks(asked, split)} for split in Split]
    assert 0 < len(divided[1]) < len(divided[0]) and not divided[0].keys() & divided[1].keys()
    found = divided[0] | divided[1]
    assert found.keys() == {f"wiki_years/{row['id']}" for row in YEARS} - {f"wiki_years/{letter}" for letter in "cdef"}
    ann, door = found["wiki_years/a"], found["wiki_years/b"]
    assert (ann.messages[-1].content, ann.answer) == ('In which year was "Ann Lee" born?', "1961")
    assert (door.messages[-1].content, door.answer) == ('From which year is "Blue Door (song)"?', "1987")
    said = [asked.demonstration(task, 0) or () for task in found.values()]
    assert {len(messages) for messages in said} == {0, 1, 3}, "half of them guess; some years are not found"
    asked.right = 1.0
    call, reply, answer = asked.demonstration(ann, 0) or ()
    assert (call.tool_calls[0].arguments, answer.content) == ({"query": "Ann Lee"}, "1961")
    assert reply.content.startswith("[a] Ann Lee: Ann Lee (born 2 May 1961")
    assert WikiYears(path=asked.path, snippet_chars=10).demonstration(ann, 0) is None, "the search does not show it"


def test_worked_examples_come_from_demonstrations(asked: SearchQA) -> None:
    pytest.importorskip("bm25s")
    asked.examples = 1
    task = tasks(asked, Split.eval)[0]
    assert [message.role for message in task.messages][:4] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    "change", [{"answers": []}, {"answers": "x"}, {"answers": [1]}, {"gold": None}, {"question": 1}, {"source": None}]
)
def test_bad_questions_are_named_with_their_line(change: dict[str, Any], asked: SearchQA) -> None:
    file = write(Path(asked.path) / "questions.jsonl", [ASKED[0], ASKED[1] | change])
    message = refusal(functools.partial(tasks, asked, Split.train))
    assert message.startswith(f"{file}, line 2: "), message


def test_missing_questions_are_named(tmp_path: Path) -> None:
    assert "questions.jsonl" in refusal(functools.partial(tasks, SearchQA(path=str(tmp_path)), Split.train))


@pytest.mark.real
def test_the_real_questions(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    trained, held_out = tasks(SearchQA(), Split.train), tasks(SearchQA(), Split.eval)
    assert (len(trained), len(held_out)) == (962, 762)
    assert not {task.id for task in trained} & {task.id for task in held_out}
    demonstrated = [SearchQA().demonstration(task, 0) for task in trained[:50]]
    assert sum(one is not None for one in demonstrated) > 10


# --- the page about them ---

PAGE = (Path(__file__).parents[1] / "docs" / "tasks_and_rewards.md").read_text()


def test_the_page_names_what_there_is() -> None:
    for group, base in (("task", TaskSource), ("reward", Reward)):
        table = PAGE.partition(f"| `{group}=` |")[2].partition("\n\n")[0]
        listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.M)
        assert len(listed) >= 6
        assert set(listed) <= set(options(f"mtgrpo.{group}s", base)), group


def test_the_recipe_searches_as_its_demonstrations_do(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    made = compose(parse(["recipe=search_qa_tiny", "task.results=3"])).experiment
    assert isinstance(made.environment, ToolUse) and isinstance(made.task, SearchQA)
    tool = made.environment._loaded["search"]
    assert isinstance(tool, Search)
    assert (tool.results, tool.snippet_chars) == (3, made.task.snippet_chars)
    assert Path(tool.corpus) == data_folder / "search_qa" / "passages.jsonl"
