"""`mtgrpo show`: conversations in the terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.commands.show import main
from mtgrpo.errors import ConfigError
from mtgrpo.record.reading import places_of_turns


def conversation(task: str, reward: float, said: str) -> dict[str, Any]:
    call = {"name": "calculator", "arguments": {"expression": said}}
    return {
        **{"task": task, "sample": 1, "status": "completed", "reason": "", "reward": reward, "answer": "391"},
        "messages": [
            {"role": "user", "content": "What is 17 * 23?"},
            {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": "391"},
            {"role": "assistant", "content": "\x1b[2J#### 391", "error": "not JSON"},
        ],
        "turns": [{"output_tokens": 12, "parent": -1}, {"output_tokens": 3, "parent": -1}],
        "components": {"numeric": reward, "length": 0.5},
        "turn_rewards": [0.25, 0.75],
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"stage": "reinforcement learning", "step": 2}\n')
    rows = [conversation("t/1", 1.0, "17 * 23"), conversation("t/2", 0.0, "17 * 32")]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "trajectories" / "step_000002.jsonl").write_text(lines + '{"task": "t/3", "cut')
    return tmp_path


def test_the_turns_of_a_conversation_are_the_last_messages_of_the_assistant() -> None:
    row = conversation("t/1", 1.0, "17 * 23")
    assert [places_of_turns({**row, "turns": row["turns"][:count]}) for count in (0, 1, 2)] == [[], [3], [1, 3]]


def test_a_conversation_is_shown_as_it_went(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_folder), "--count", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "t/1, sample 1: reward 1, completed, expected 391",
        "  numeric 1, length 0.5",
        "[user] What is 17 * 23?",
        "[assistant] hm",
        '-> calculator({"expression": "17 * 23"})  turn 1: 12 tokens, reward 0.25',
        "[tool calculator] 391",
        "[assistant] \\x1b[2J#### 391",  # what would clear the screen is spelled out
        "unreadable: not JSON  turn 2: 3 tokens, reward 0.75, a new context (its text: --tokens)",
        f"mtgrpo view {run_folder} --at step_000002/c/0",
    ]


def test_tools_are_shown_where_they_change(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = {"function": {"name": "calculator"}}
    rows = [{**conversation("t/1", 1.0, "1"), "tools": [tool]}, conversation("t/2", 1.0, "1")]
    rows += [{**conversation("t/3", 1.0, "1"), "tools": []}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_folder / "trajectories" / "step_000002.jsonl").write_text(lines)
    main([str(run_folder), "--count", "3"])
    heads = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("too", "t/1", "t/2", "t/3", '{"f')]
    assert [line[:12] for line in heads] == [
        "tools of wha",
        '{"function":',
        "t/1, sample ",
        "t/2, sample ",
        "tools of wha",
        "t/3, sample ",
    ]


def test_what_an_agent_began_anew_with_is_shown(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = conversation("t/1", 1.0, "1")
    row["turns"][1]["opens_with"] = [{"role": "system", "content": "Check."}, {"role": "user", "content": "Is it 391?"}]
    (run_folder / "trajectories" / "step_000002.jsonl").write_text(json.dumps(row) + "\n")
    main([str(run_folder)])
    assert capsys.readouterr().out.splitlines()[-6:-1] == [
        "[a new context]",
        "[system] Check.",
        "[user] Is it 391?",
        "[assistant] \\x1b[2J#### 391",
        "unreadable: not JSON  turn 2: 3 tokens, reward 0.75",
    ]


def test_greedy_conversations_are_shown(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"evaluation_after": "t/1", "greedy_after": "t/2", "greedy_before": "t/3"}
    for file, task in rows.items():
        (run_folder / "trajectories" / f"{file}.jsonl").write_text(json.dumps(conversation(task, 1.0, "1")) + "\n")
    for words, task in (["--after"], "t/1"), (["--greedy"], "t/2"), (["--greedy", "--before"], "t/3"):
        main([str(run_folder), *words])
        assert [line[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("t/")] == [task]


def test_failures_are_of_different_tasks_first(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [conversation(f"t/{number // 3}", 0.0, "1") for number in range(9)]
    (run_folder / "trajectories" / "step_000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown: list[list[str]] = []
    for words in (["--count", "2"], ["--count", "4"], ["--count", "2", "--task", "t/1"]):
        main([str(run_folder), "--failures", *words])
        shown.append([line[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("t/")])
    assert shown == [["t/0", "t/1"], ["t/0", "t/1", "t/2", "t/0"], ["t/1", "t/1"]]


@pytest.mark.parametrize(
    ("words", "tasks"), [([], ["t/1", "t/2"]), (["--failures"], ["t/2"]), (["--task", "1", "--step", "2"], ["t/1"])]
)
def test_those_that_were_asked_for_are_shown(
    words: list[str], tasks: list[str], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run_folder), *words])
    assert [line[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("t/")] == tasks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "0"], "has kept no step_000000; it has step_000002"),
        (["--step", "9"], "has kept no step_000009; it has step_000002"),
        (["--set", "easy"], "has kept no evaluation_after_easy"),
        (["--greedy", "--set", "easy"], "has kept no greedy_after_easy"),
        (["--greedy", "--before"], "has kept no greedy_before"),
        (["--greedy", "--step", "2"], "give --before or --after in place of --step"),
        (["--before"], "it has step_000002; mtgrpo show /[^ ]* shows the newest"),
        (["--sample", "7"], "has no such conversation"),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        main([str(run_folder), *words])


def test_which_steps_there_are_is_said(run_folder: Path) -> None:
    for name in ("evaluation_after", "step_000004"):
        (run_folder / "trajectories" / f"{name}.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step_000009; it has step_000002 to step_000004; "):
        main([str(run_folder), "--step", "9"])


@pytest.mark.parametrize("command", ["show", "report"])
def test_where_nobody_reads_on_it_ends_in_silence(command: str, run_folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "mtgrpo", command, str(run_folder)]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_without_a_run_it_is_the_newest_below_the_working_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match=r"no run below .* has written metrics\.jsonl or summary\.json"):
        main([])
    places = [here / place for place in ("outputs/2026-11-21/10-00-00", "multirun/2026-11-21/09-00-00/1", "runs/a")]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        shutil.copytree(run_folder / "trajectories", place / "trajectories")
        (place / "metrics.jsonl").write_text("{}\n")
        os.utime(place / "metrics.jsonl", (number, number))
        assert main(["--count", "1"]) == 0
        assert capsys.readouterr().out.startswith(str(place))
    (places[0] / "metrics.jsonl").write_text("")  # of a run that only played
    os.utime(places[0] / "metrics.jsonl", (9, 9))
    assert main(["--count", "1"]) == 0
    assert capsys.readouterr().out.startswith(str(places[2]))


def test_a_run_that_has_only_begun_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with pytest.raises(ConfigError, match="has written nothing yet"):
        main([str(tmp_path)])
