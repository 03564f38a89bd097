"""What a run leaves behind: metrics, console output, curves, trajectories, the summary."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich import console as rich_console

from mtgrpo.config.compose import preset
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sinks, open_sinks
from mtgrpo.log import console as console_module
from mtgrpo.parts import RunContext
from mtgrpo.record.curve import Curve, save_curve
from mtgrpo.record.reading import conversations
from mtgrpo.record.writing import trajectory_row, write_summary, write_trajectories
from mtgrpo.runtime.files import strict_json
from mtgrpo.stages.trainer import train
from mtgrpo.types import (
    CallOutcome,
    CallRecord,
    Finish,
    Group,
    Message,
    Status,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    WeightPush,
)

TRAINING = {
    "reward/mean": 0.712,
    "reward/success": 0.684,
    "policy/kl": 0.0123,
    "policy/entropy": 0.31,
    "policy/loss": 0.01,
    "policy/clip_fraction": 0.02,
    "perf/tokens_per_s": 5120.4,
}


def loads(line: bytes | str) -> Any:
    """JSON as the standard has it: no NaN, no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


# ---------------------------------------------------------------- sinks


@contextmanager
def opened(names: Sequence[str], folder: Path) -> Iterator[Sinks]:
    """The sinks while they are open."""
    opening = open_sinks(names, RunContext(folder, print, {}))
    with asyncio.Runner() as loop:
        sinks = loop.run(opening.__aenter__())
        try:
            yield sinks
        finally:
            loop.run(opening.__aexit__(None, None, None))


def test_an_unknown_sink_lists_the_known(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"named .wandbb.; did you mean wandb. known: console, jsonl, mlflow,",
        ),
        opened(["jsonl", "wandbb"], tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


MINE = """
from contextlib import asynccontextmanager
from mtgrpo.log import Sink

class Mine(Sink):
    @asynccontextmanager
    async def open(self, context):
        with (context.folder / f"{type(self).__name__}.txt").open("w") as self.file:
            try:
                yield self
            finally:
                print("end", file=self.file, flush=True)
                raise OSError("disk full")
    def stage(self, name, total): pass
    def log(self, metrics, step): print(step, metrics, file=self.file)
    def note(self, text): pass

class Second(Mine): pass
class Other: pass
"""


def test_sinks_of_your_own_are_all_closed_though_one_fails(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    with opened(["jsonl", f"{mine}:Mine", f"{mine}:Second"], tmp_path) as sinks:
        sinks.log({"a": 1.5}, 3)
    notes = (tmp_path / "notes.txt").read_text().splitlines()
    for name, note in zip(("Second", "Mine"), notes, strict=True):
        assert note.startswith(f"the sink {name} failed and gets nothing more: OSError: disk full ({mine}, line ")
    for name in ("Mine", "Second"):
        assert (tmp_path / f"{name}.txt").read_text() == "3 {'a': 1.5}\nend\n"
    with pytest.raises(ConfigError, match="Other"), opened([f"{mine}:Other"], tmp_path):
        pass


# ---------------------------------------------------------------- jsonl


def test_metrics_are_on_disk_after_every_line_at_full_precision(tmp_path: Path) -> None:
    with opened(["jsonl"], tmp_path) as sinks:
        sinks.stage("warm start", 2)
        sinks.log({"sft/loss": 1 / 3}, 1)
        sinks.stage("reinforcement learning", 5)
        sinks.log({"reward/mean": 0.1 + 0.2, "policy/kl": math.nan, "perf/tokens_per_s": -math.inf, "n": 3}, 1)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before it is closed
    assert [loads(line) for line in lines] == [
        {"stage": "warm start", "step": 1, "sft/loss": 0.3333333333333333},
        {
            "stage": "reinforcement learning",
            "step": 1,
            "reward/mean": 0.30000000000000004,
            "policy/kl": None,
            "perf/tokens_per_s": None,
            "n": 3,
        },
    ]


def test_notes_are_kept_and_a_second_run_appends(tmp_path: Path) -> None:
    for text in ("saved \ud800\x1b[2J\r", "[bold]é[/bold]"):
        with opened(["jsonl"], tmp_path) as sinks:
            sinks.note(text)
            sinks.log({}, 1)
    assert (tmp_path / "notes.txt").read_text("utf-8") == "saved \\ud800\\x1b[2J\\r\n[bold]é[/bold]\n"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(), max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(ANYTHING)
def test_strict_json_is_one_line_that_every_reader_accepts(value: Any) -> None:
    text = strict_json(value).decode("utf-8")
    assert text.splitlines() == [text]
    assert loads(text) == as_json(value)


def as_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, bytes) else value


def test_strict_json_survives_any_depth() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert strict_json(deep).decode().strip("[]") == '"..."'
    while deep:  # taken apart by hand: freeing it recursively would overflow
        deep = deep.pop()


def test_the_summary_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, {"success": {"before": 0.2, "after": math.nan}})
    assert loads((tmp_path / "summary.json").read_bytes()) == {"success": {"before": 0.2, "after": None}}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_summary(tmp_path, {"success": "half"})
    assert "before" in loads((tmp_path / "summary.json").read_bytes())["success"]


# ---------------------------------------------------------------- console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_stage(total: int, steps: int, folder: Path, metrics: Mapping[str, float] = TRAINING) -> None:
    with opened(["console"], folder) as sinks:
        sinks.stage("reinforcement learning", total)
        for step in range(1, steps + 1):
            sinks.log(metrics, step)


@pytest.mark.parametrize("total", [10, 21, 41, 60, 101, 250, 1000, 99_999])
def test_plain_output_is_ten_to_twenty_lines(total: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stage(total, total, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"reinforcement learning ({total} steps): what did better than its siblings")
    assert 10 <= len(lines) - 1 <= 21
    assert lines[1].split()[:2] == ["step", f"{1:>{len(str(total))}}/{total}".split()[0]]
    assert f"{total}/{total}" in lines[-1]
    assert "\x1b" not in "".join(lines)


def test_an_evaluation_says_how_far_it_is(
    clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(["console"], tmp_path) as sinks:
        sinks.stage("evaluation", 90)
        for done in (*range(8, 81, 8), *range(81, 91)):  # eight samples of ten tasks, and a greedy one
            clock[0] += 2.0 if done % 16 else 0.0  # two groups end at once
            sinks.progress(done)
        sinks.log({"eval/success": 0.5}, 90)
    title, *lines = [line.removeprefix("  conversation ") for line in capsys.readouterr().out.splitlines()]
    assert title.startswith("evaluation (90 conversations): ")
    assert lines == [
        "16/90  0:02  ETA 0:09",
        "24/90  0:04  ETA 0:11",
        "32/90  0:04  ETA 0:07",
        "40/90  0:06  ETA 0:08",
        "48/90  0:06  ETA 0:05",
        "56/90  0:08  ETA 0:05",
        "64/90  0:08  ETA 0:03",
        "72/90  0:10  ETA 0:02",
        "81/90  0:12  ETA 0:01",
        "90/90  held-out 50.0%  0:30",
    ]


def test_plain_output_of_a_stage_of_unknown_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stage(0, 2000, tmp_path)
    assert 10 <= len(capsys.readouterr().out.splitlines()) <= 40


def test_a_plain_line_names_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stage(1, 1, tmp_path)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split("  ") == [
        *("", "step 1/1", "reward 0.712", "success 68.4%", "KL 0.0123", "entropy 0.310"),
        *("clipped 2.0%", "tokens/s 5,120", "0:00"),
    ]


def test_the_warm_start_shows_its_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stage(1, 1, tmp_path, {"sft/loss": 1.25})
    assert "  loss 1.2500  " in capsys.readouterr().out


@pytest.mark.parametrize("samples", [1, 2, 16])
def test_pass_at_any_number_of_samples_is_shown(
    samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(1, 1, tmp_path, {f"eval/pass@{samples}": 0.75, "eval/success": 0.5})
    shown = f"pass@{samples} 75.0%  " if samples > 1 else ""  # of one sample it is the same number
    assert f"  held-out 50.0%  {shown}" in (out := capsys.readouterr().out) and ("pass@1 " in out) is False


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"reward/groups_with_variance": 0.0}, "no group's rewards differ: nothing to learn"),
        ({"policy/entropy": math.nan}, ""),
        (
            {"reward/mean": 1.0, "reward/success": 0.0, "rollout/truncated": 0.9}
            | {"rollout/truncated/max_turns": 0.02, "rollout/truncated/max_new_tokens": 0.88},
            "88% cut by max_new_tokens, which is no success",
        ),
        ({"eval/success": 0.1, "eval/truncated": 0.9, "eval/truncated/max_turns": 0.9}, "90% cut by max_turns"),
        ({"eval/success": 0.0, "eval/truncated": 1.0, "eval/truncated/max_turns": 1.0}, ""),  # a note has it
        ({"eval/success": 0.0, "eval/truncated": 1.0, "eval/truncated/policy_error": 1.0}, "100% cut by policy_error"),
    ],
)
def test_why_nothing_is_learned_stands_beside_the_reward(
    metrics: dict[str, float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(1, 1, tmp_path, TRAINING | metrics)
    line = capsys.readouterr().out.splitlines()[1]
    assert said in line and line.startswith("  step 1/1  reward ")
    assert ("nothing" in line or "cut" in line) == bool(said)


def test_a_step_without_an_update_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_stage(1, 1, tmp_path, {"reward/mean": 0.5})
    assert "no update: too few conversations to compare" in capsys.readouterr().out


def test_evaluations_between_plain_lines_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(["console"], tmp_path) as sinks:
        sinks.stage("reinforcement learning", 1000)
        for step in range(1, 141):
            sinks.log(TRAINING, step)
            if step % 70 == 0:
                sinks.log({"eval/success": step / 200, "eval/pass@8": math.nan}, step)
    held_out = [line.split() for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    assert [words[:6] for words in held_out] == [
        ["step", "70/1000", "held-out", "35.0%", "pass@8", "nan%"],
        ["step", "140/1000", "held-out", "70.0%", "pass@8", "nan%"],
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("first", [1, 41])  # 41: resumed
def test_the_time_left(first: int, clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the first step takes, which has checks of its own."""
    with opened(["console"], tmp_path) as sinks:
        sinks.stage("reinforcement learning", 100)
        for step in range(first, 51):
            clock[0] += 90.0 if step > first else 9000.0
            sinks.log(TRAINING, step)
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 1:15:00")  # 50 steps of 90 s


def test_what_is_played_of_a_step_is_counted_until_the_step_is_logged() -> None:
    bar = console_module.Console()

    def shown() -> str:
        out = io.StringIO()
        rich_console.Console(file=out, width=200).print(bar._panel())
        return out.getvalue().splitlines()[0]

    bar.stage("reinforcement learning", 3)
    bar.played()
    bar.played()
    assert "0/3  2 conversations  " in shown()
    bar.log(TRAINING, 1)
    assert "1/3" in shown() and "conversations" not in shown()


def test_names_of_stages_and_sets_are_data() -> None:
    bar, shown = console_module.Console(), io.StringIO()
    bar.stage("warm\x1b[2J", 3)
    bar.log({"eval/far\u202e/success": 0.5}, 1)
    rich_console.Console(file=shown, width=200).print(bar._panel())
    assert "warm\\x1b[2J" in shown.getvalue() and re.search(r"far\\u202e +50.0%", shown.getvalue())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_notes_are_data(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with opened(["console"], tmp_path) as sinks:
        sinks.note("[red]x[/red] [/nothing] :smile: \x1b[31m\x07\rover\u202e \ud83d")
        sinks.note("a long word " + "w" * 300)
        sinks.note("naïve ⣿\nsecond line")
    lines = raw.getvalue().decode(encoding).split("\n")
    assert lines[0] == "[red]x[/red] [/nothing] :smile: \\x1b[31m\\x07\\rover\\u202e \\ud83d"
    assert lines[1] == "a long word " + "w" * 300  # a path stays in one piece
    shown = {"ascii": "na\\xefve \\u28ff", "latin-1": "naïve \\u28ff", "utf-8": "naïve ⣿"}
    assert lines[2:4] == [shown[encoding], "second line"]


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_the_bar_fits_the_terminal(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": str(width), "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    with opened(["console"], tmp_path) as sinks:
        sinks.note("before [b]")
        sinks.log({}, 0)
        sinks.stage("warm start", 0)
        sinks.log({"sft/loss": 1.5}, 1)
        sinks.stage("reinforcement learning", 1000)
        sinks.log({**TRAINING, "eval/success": 0.5, "eval/greedy": 0.5, "eval/pass@8": 1.0}, 999)
        sinks.note("during")
    output = screen.getvalue()
    assert output.endswith("\x1b[?25h")  # the cursor is back
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", output)]
    about = [line for line in lines if "imitates" in line or "siblings" in line]  # which the terminal itself breaks
    assert len(about) == 2
    assert max(len(line) for line in lines if line not in about) <= width
    if width >= 60:
        for value in (
            "before [b]",
            "loss 1.5000",
            "999/1000",
            "KL 0.0123",
            "tokens/s 5,120",
            "pass@8 100.0%",
            "during",
        ):
            assert any(value in re.sub(" +", " ", line) for line in lines), value


# ---------------------------------------------------------------- curves


@pytest.mark.parametrize(("encoding", "bars"), [("utf-8", "▁▃▆█"), ("ascii", "")])
def test_a_run_ends_with_its_curve(encoding: str, bars: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    drawn = Curve([0.25, 0.5, math.nan, 0.75, 1.0], {0: 0.2}).draw(tmp_path, 80)
    assert drawn == f"training reward {bars} 0.25 -> 1"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(Curve([float(step) for step in range(500)]).draw(tmp_path, 80)) <= 80
    assert Curve([math.nan]).draw(tmp_path, 80).endswith("no values")


def test_the_picture_shows_every_series(tmp_path: Path) -> None:
    steps = list(range(1, 61))
    rewards = [math.nan if step == 30 else 0.2 + step / 100 for step in steps]
    series = {"reward": (steps, rewards), "held-out success": ([0, 30, 60], [0.2, 0.5, 0.9])}
    picture = _picture(tmp_path, series)
    assert picture.shape[:2] == (1000, 1600)
    assert _share(picture, "1f77b4") > 0.002 and _share(picture, "ff7f0e") > 0.001
    assert _share(_picture(tmp_path, {"reward": series["reward"]}), "ff7f0e") == 0


@pytest.mark.parametrize("values", [[], [math.nan], [0.5]])
def test_a_picture_of_almost_nothing(values: list[float], tmp_path: Path) -> None:
    assert _picture(tmp_path, {"reward": (range(len(values)), values)}).shape[:2] == (1000, 1600)


def test_drawing_leaves_no_trace_in_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mtgrpo.record.curve import save_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "save_curve(Path(sys.argv[1]), {'a': ([1], [1.0])})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path / "curve.png")], check=True)


def _picture(folder: Path, series: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> np.ndarray:
    from matplotlib.image import imread  # noqa: PLC0415

    save_curve(folder / "curve.png", series)
    return imread(folder / "curve.png")


def _share(picture: np.ndarray, color: str) -> float:
    """The part of the picture that has about this colour."""
    target = np.array([int(color[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return float((np.abs(picture[..., :3] - target).max(axis=-1) < 0.1).mean())


# ---------------------------------------------------------------- trajectories


def test_trajectories_are_readable(tmp_path: Path) -> None:
    task = Task(
        "calculator/1", (Message("system", "s"), Message("user", "17 * 23?")), answer="391", metadata={"level": 3}
    )
    call = ToolCall("calculator", {"expression": "17 * 23", "precision": math.nan})
    turns = [
        Turn(
            new_context=[1, 2, 3],
            output=[4, 5],
            logprobs=[-0.1, -0.2],
            versions=[7, 8],
            finish=Finish.STOP,
            message=Message("assistant", "", reasoning="hm", tool_calls=(call,)),
            observations=(Message("tool", "391", name="calculator"),),
        ),
        Turn([6], [], [], [], Finish.LENGTH, Message("assistant", "lone \ud83d\u2028é", error="bad JSON"), parent=0),
    ]
    failed = Trajectory(task, 1, status=Status.FAILED, reason="tool outage", reward=math.nan)
    group = Group(task, [Trajectory(task, 0, turns, Status.TRUNCATED, "max_turns", reward=0.5), failed])
    write_trajectories(tmp_path, "step_000010", [group, group])

    content = (tmp_path / "trajectories" / "step_000010.jsonl").read_text("utf-8")
    assert "é" in content  # readable, not escaped
    records = [loads(line) for line in content.splitlines()]
    assert [record["sample"] for record in records] == [0, 1, 0, 1]
    assert records[0] == {
        "task": "calculator/1",
        "sample": 0,
        "status": "truncated",
        "reason": "max_turns",
        "tools": [],
        "group": 0,
        "reward": 0.5,
        "answer": "391",
        "metadata": {"level": 3},
        "messages": [
            {"role": "system", "content": "s", "tokens": [0, 3]},
            {"role": "user", "content": "17 * 23?", "tokens": [0, 3]},
            {
                "tokens": [3, 5],
                "role": "assistant",
                "content": "",
                "reasoning": "hm",
                "tool_calls": [{"name": "calculator", "arguments": {"expression": "17 * 23", "precision": None}}],
            },
            {"role": "tool", "content": "391", "name": "calculator", "tokens": [5, 6]},
            {"role": "assistant", "content": "lone \ud83d\u2028é", "error": "bad JSON", "tokens": [6, 6]},
        ],
        "turns": [
            {"new_context_tokens": 3, "output_tokens": 2, "finish": "stop", "parent": -1}
            | {"version_min": 7, "version_max": 8},
            {"new_context_tokens": 1, "output_tokens": 0, "finish": "length", "parent": 0}
            | {"version_min": None, "version_max": None},
        ],
    }
    assert records[1]["status"] == "failed" and records[1]["reward"] is None and len(records[1]["messages"]) == 2
    assert "metadata" not in records[1] and records[2]["metadata"] == {"level": 3}  # of another group
    file = tmp_path / "trajectories" / "step_000010.jsonl"
    assert [(line, row["metadata"]) for line, row in conversations(file)] == [(n, {"level": 3}) for n in range(4)]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + "{cut\n" + lines[1] + lines[2])
    read = [(line, row["metadata"]) for line, row in conversations(file)]
    assert read == [(0, {"level": 3}), (2, None), (3, {"level": 3})], "whose metadata line 2 has is not known"


FLAKY = """
from dataclasses import dataclass
from mtgrpo.log import Tracker

@dataclass
class Flaky(Tracker):
    def begin(self, context): pass
    def write(self, metrics, step): pass
    def end(self): raise ConnectionError("the network is gone")
"""


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_tracker_that_fails_as_it_closes_ends_nothing(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    names = ["console", "jsonl"]
    names.insert(place, f"{tmp_path}/flaky.py:Flaky")
    async with open_sinks(names, RunContext(tmp_path, print, {})) as sinks:
        sinks.stage("evaluation", 1)
    said = "the sink Flaky failed and gets nothing more: ConnectionError: the network is gone"
    assert said in (tmp_path / "notes.txt").read_text() + "".join(capsys.readouterr())


def test_trajectories_tell_when_everything_began(tmp_path: Path) -> None:
    turn = Turn([1], [2], [-0.1], [4], Finish.STOP, Message("assistant", "x"), asked_s=103.0, ended_s=104.5)
    calls = (CallRecord("calculator", CallOutcome.refused, 2, 0.25, "down", 104.5), CallRecord("look", seconds=0.0))
    said = Trajectory(Task("t", ()), 0, [turn], queued_s=1.0, began_s=102.0, sample_s=1.5, calls=calls)
    pushes = [WeightPush(3, 90.0, 100.0), WeightPush(4, 100.5, 102.0)]
    write_trajectories(tmp_path, "step_000001", [Group(said.task, [said, said])], {}, pushes)
    first, second = (tmp_path / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    row = loads(first)
    assert row["times"] == {"began_s": 1.0, "queued_s": 1.0, "sample_s": 1.5}
    assert (row["turns"][0]["asked_s"], row["turns"][0]["ended_s"]) == (2.0, 3.5)
    assert row["calls"] == [
        {"name": "calculator", "outcome": "refused", "retries": 2, "why": "down", "began_s": 3.5, "seconds": 0.25},
        {"name": "look", "outcome": "answered"},
    ]
    assert row["pushes"] == [{"version": 4, "began_s": -0.5, "ended_s": 1.0}] and "pushes" not in loads(second)
    assert "times" not in trajectory_row(said) and "seconds" not in trajectory_row(said)["calls"][0]


def test_every_metric_that_a_run_writes_is_documented(tmp_path: Path) -> None:
    words = ["trainer.steps=1", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"]
    words += ["sampling.max_new_tokens=8", "eval.tasks=2", "eval.samples=2", "eval.every_steps=1", "log=[jsonl]"]
    words += ["reward=[numeric,length]", "kl.coef=0.1", "correction.weight=token", "checkpoint.every_steps=0"]
    asyncio.run(train(preset("calculator_from_scratch", *words), tmp_path, Curve()))
    rows = [loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row} - {"stage", "step"}
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    patterns = [re.sub("NAME|CAUSE|8$", "[^/]+", name) for name in re.findall(r"`([a-z]+/[^`]+)`", page)]
    as_rollout = {name.replace("eval/", "rollout/", 1) for name in written}
    missing = {name for name in as_rollout if not any(re.fullmatch(p, name) for p in patterns)}
    assert {name for name in missing if name.replace("rollout/", "eval/", 1) not in patterns} == set()
    assert {"policy/kl", "reward/length/mean", "policy/correction/weight", "eval/greedy", "sft/loss"} <= written
