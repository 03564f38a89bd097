"""A run's folder that somebody sent, with anything in the place of anything: each reader ends, with at most a line."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import cli
from mtgrpo.record import reading
from mtgrpo.report import content

CALL = {"name": "calculator", "arguments": {"expression": "17 * 23"}}
CONVERSATION = {
    **{"task": "t/1", "sample": 0, "status": "completed", "reason": "max_turns", "reward": 0.5, "answer": "391"},
    "messages": [
        {"role": "user", "content": "What is 17 * 23?"},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL], "error": "not JSON"},
        {"role": "tool", "name": "calculator", "content": "391"},
        {"role": "assistant", "content": "#### 391"},
    ],
    "turns": [{"output_tokens": 12, "parent": -1}, {"output_tokens": 3, "parent": 0}],
    "components": {"numeric": 1.0},
    "turn_rewards": [0.25, 0.75],
}
LEARNED = {"stage": "reinforcement learning", "step": 1, "reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 1.0}
RECORD: dict[str, Any] = {  # what a run leaves, by its files
    "summary.json": {"eval/success/before": 0.25, "eval/success/after": 0.5, "time/total_s": 9.5, "train/steps": 2},
    "versions.json": {"python": "3.11", "torch": "2.9"},
    "metrics.jsonl": [LEARNED, {**LEARNED, "step": 2}, {"stage": "evaluation", "step": 1, "eval/success": 0.5}],
    "trajectories/step_000002.jsonl": [CONVERSATION, {**CONVERSATION, "task": "t/2"}],
    "trajectories/evaluation_before.jsonl": [CONVERSATION],
    "trajectories/evaluation_after.jsonl": [CONVERSATION, {**CONVERSATION, "reward": 1.0}],
    ".hydra/config.yaml": {
        **{"seed": 3, "eval": {"tasks": 40, "interval": "wilson"}, "reward": {"success_at": 1.0}},
        **{"trainer": {"steps": 5}, "sft": {"steps": 2}, "task": {"name": "x", "files": ["a"]}},
    },
    ".hydra/hydra.yaml": {"hydra": {"runtime": {"choices": {"recipe": ["calculator"], "task": "calculator"}}}},
    ".hydra/overrides.yaml": ["seed=3"],
}
COMMANDS = [["report"], ["report", "--markdown"], ["show"], ["show", "--failures"], ["show", "--before"], ["watch"]]
COMMANDS += [["view"]]

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202eltr\u2066\x00\ud800"
DEEP: Any = 1
for _ in range(400):
    DEEP = [DEEP]
HOSTILE = [
    *(None, True, -1, 0.5, "", "text", [], {}, [[]], [None], ["x"], {"a": 1}, [{"a": [1]}], {"": None}, DEEP),
    *(10**40, -(10**40), 10**400, 1e300, -1e300, 5e-324, 1e15, float("nan"), float("inf"), "9" * 40, "\u00b2"),
    *(ESCAPES, {ESCAPES: ESCAPES}, [ESCAPES] * 3, "x" * 100_000, "../../../etc/passwd", "/dev/zero", "${oc.env:HOME}"),
]


def write(folder: Path, record: dict[str, Any]) -> None:
    for name, held in record.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in held))
        else:
            path.write_text(json.dumps(held))  # which is YAML too
    (folder / "notes.txt").write_text("a note\n")


def places(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a value, itself included."""
    yield way
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, *way, key)


def with_value(value: Any, way: tuple[Any, ...], put: Any) -> Any:
    """A copy of `value` with another value at the end of `way`."""
    changed = copy.deepcopy(value)
    *outer, last = way
    held = changed
    for key in outer:
        held = held[key]
    held[last] = put
    return changed


def assert_ends(folder: Path, capsys: pytest.CaptureFixture[str], commands: list[list[str]] = COMMANDS) -> list[str]:
    """Each command ends as commands do, and what it writes is harmless to a terminal. What they wrote to stderr."""
    said: list[str] = []
    for name, *flags in commands:
        if name == "view":  # all that the page may ask for, of each
            shutil.rmtree(page := folder.parent / f"{folder.name}-page", ignore_errors=True)
            flags = ["--out", str(page)]
        with pytest.raises(SystemExit) as ended:
            cli.main([name, str(folder), *flags])
        printed = capsys.readouterr()
        assert ended.value.code in (0, 1, 2), name
        assert printed.err.count("\n") <= 1 and "Traceback" not in printed.err, printed.err
        assert all(c.isprintable() or c in "\n\t" for c in printed.out + printed.err)
        said.append(printed.err)
    for page in folder.glob("report.*"):
        assert all(c.isprintable() or c in "\n\t" for c in page.read_text())
    return said


SPOTS = [(name, way) for name, content in RECORD.items() for way in places(content) if way]


@pytest.mark.parametrize(
    ("part", "commands", "every"),
    [
        (0, 1, 8),
        (7, 1, 8),
        *(pytest.param(part, len(COMMANDS), 1, marks=pytest.mark.slow) for part in range(len(HOSTILE))),
    ],
)
def test_any_value_in_the_place_of_any_other(
    part: int, commands: int, every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every spot of every file, or one of so many, one of the hostile values, read by so many commands."""
    for number, (name, way) in list(enumerate(SPOTS))[part % every :: every]:
        put = HOSTILE[(part + number) % len(HOSTILE)]
        write(tmp_path, {**RECORD, name: with_value(RECORD[name], way, put)})
        first = (part + number) % len(COMMANDS)
        assert_ends(tmp_path, capsys, [*COMMANDS, *COMMANDS][first : first + commands])


@pytest.mark.parametrize("name", ["notes.txt", ".hydra/config.yaml", ".hydra/overrides.yaml"])
def test_a_link_to_a_file_outside_is_not_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run := tmp_path / "run", RECORD)
    (tmp_path / "key").write_text("secret: of mine\n")
    (run / name).unlink()
    (run / name).symlink_to(tmp_path / "key")
    said = assert_ends(run, capsys, [["report"], ["view"]])
    assert "is a link to" in said[0]
    shown = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("key", Path(name).name)]
    assert not any(b"of mine" in path.read_bytes() for path in shown)
    assert any(b"is a link to" in path.read_bytes() for path in shown)  # in the page, in the run's place


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz")
)
CONTENTS = {
    "nothing": b"",
    "bytes": bytes(range(256)) * 40,
    "zeros": b"\0" * 5000,
    "no JSON": b'{"a": 1',
    "a list": b"[1, 2]",
    "a number": b"9" * 5000,
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep lines": b"- " * 100_000,
    "aliases": BOMB.encode(),
    "merges": MERGES.encode(),
    "around itself": b"a: &a [*a]",
    "tags": b"a: !!python/object/apply:os.system [id]\nb: !!timestamp 1\nc: !!set {x}\nd: 2020-01-01\n1: 2\n",
    "escapes": ESCAPES.encode("utf-8", "surrogatepass"),
}


FAST = (".hydra/config.yaml", "metrics.jsonl")  # one in YAML, one in lines of JSON


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in [*RECORD, "notes.txt"]]
)
def test_any_content_in_the_place_of_any_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in CONTENTS.values():
        write(tmp_path, RECORD)
        (tmp_path / name).write_bytes(data)
        assert_ends(tmp_path, capsys, [["report"], ["show"], ["watch"], ["view"]])
    shutil.rmtree(tmp_path)
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")):
        write(tmp_path, RECORD)
        (tmp_path / name).unlink()
        make(tmp_path / name)
        assert_ends(tmp_path, capsys, [["report"], ["show"], ["watch"], ["view"]])
        shutil.rmtree(tmp_path)


def test_what_is_too_large_for_what_it_is_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, RECORD)
    with (tmp_path / "summary.json").open("ab") as file:
        file.truncate(2**40)  # nothing of it is on the disk
    (said, *_) = assert_ends(tmp_path, capsys, [["report"]])
    assert "summary.json has more than 16,777,216 bytes" in said
    write(tmp_path, RECORD)
    (tmp_path / ".hydra" / "config.yaml").write_text(BOMB)
    assert all(
        "has aliases, tags, or more than 32 levels" in said for said in assert_ends(tmp_path, capsys, [["report"]])
    )


def test_a_line_without_an_end_is_no_row(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"step": 1}\n' + b'{"step": "' + b"x" * 2**25 + b'"}\n' + b'{"step": 3}\n')
    metrics = reading.read_metrics(rows)
    assert ([row["step"] for row in metrics.rows], metrics.total, metrics.unreadable) == ([1, 3], 3, 1)


def test_a_report_is_written_in_the_place_of_a_link_and_not_where_it_leads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    write(run, RECORD)
    (run / "report.html").symlink_to(tmp_path / "mine")
    assert_ends(run, capsys, [["report"]])
    assert ((tmp_path / "mine").read_text(), (run / "report.html").is_symlink()) == ("mine", False)


def test_a_report_reads_no_file_that_a_record_names_as_a_recipe(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("seed: 5\n")
    write(
        tmp_path / "run", {**RECORD, ".hydra/hydra.yaml": {"hydra": {"runtime": {"choices": {"recipe": [str(mine)]}}}}}
    )
    (run,) = reading.read_runs([tmp_path / "run"])
    assert run.settings["recipe"] == f"[{mine}]"
    assert content.set_by_recipe(run) == set()


def test_a_terminal_gets_no_escapes_of_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = tmp_path / ESCAPES.replace("\0", "").replace("\ud800", "")
    for command in ([*("report", str(strange))], ["eval", f"checkpoint={strange}"], [f"tr{ESCAPES}ain"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert "2J" in said and all(c.isprintable() or c in "\n\t" for c in said)
