"""`mtgrpo watch`: what it shows of a run that begins, goes on, is silent, or has ended."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtgrpo.commands import watch
from mtgrpo.commands.watch import main, read_progress
from mtgrpo.errors import ConfigError
from mtgrpo.runtime.files import read_last_lines
from mtgrpo.types import LEARNING

NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still: the last row of every run has just been written."""
    monkeypatch.setattr(watch.time, "time", lambda: NOW)


def make_run(folder: Path, rows: Sequence[dict[str, Any]], notes: str = "chat: template auto\n") -> Path:
    """A folder as a run leaves it while it runs."""
    (folder / ".hydra").mkdir(parents=True)
    settings = {"trainer": {"steps": 40}, "sft": {"steps": 200}}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "notes.txt").write_text(notes)
    os.utime(folder / "metrics.jsonl", (NOW, NOW))
    return folder


def warm(step: int) -> dict[str, Any]:
    return {"stage": "warm start", "step": step, "sft/loss": 1 / step, "time/sft_s": 0.5 * step}


def learned(step: int, **metrics: float | None) -> dict[str, Any]:
    times = {"time/rollout_s": 2.0, "time/train_s": 1.0}
    return {"stage": LEARNING, "step": step, "reward/mean": step / 100, **times, **metrics}


def once(run: Path, capsys: pytest.CaptureFixture[str], width: int = 100) -> list[str]:
    os.environ["COLUMNS"] = str(width)
    try:
        assert main([str(run), "--once"]) == 0
    finally:
        del os.environ["COLUMNS"]
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*(warm(step) for step in range(1, 201)), *(learned(step) for step in range(1, 21))]
    lines = once(make_run(tmp_path / "run", rows), capsys)
    assert lines[0] == "run  reinforcement learning  step 20 of 40  1:00 left, last row 0:00 ago"
    assert lines[1] == "━" * 50  # of 100
    shown = {re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:] for line in lines[2:]}
    assert shown["reward"] == ["0.200", "▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██"]
    assert shown["loss"][0] == "0.0050"
    assert lines[-1] == "  chat: template auto"


def test_the_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(make_run(tmp_path / "run", [warm(step) for step in range(1, 101)]), capsys)
    assert lines[0] == "run  warm start  step 100 of 200  0:50 left, last row 0:00 ago"


def test_the_first_step_has_checks_of_its_own(tmp_path: Path) -> None:
    rows = [learned(1, **{"time/train_s": 600.0}), learned(2), learned(3)]
    assert read_progress(make_run(tmp_path / "run", rows), {}).step_s == 3.0


def test_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(make_run(tmp_path / "run", []), capsys)
    assert lines[0] == "run  last row 0:00 ago"
    assert lines[1].startswith("no metrics yet")


def test_a_run_that_has_ended_and_one_that_goes_on_after_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [learned(40), {"stage": "evaluation", "step": 1, "eval/success": 0.9}])
    assert not read_progress(run, {}).ended
    (run / "summary.json").write_text("{}")
    assert read_progress(run, {}).ended
    os.utime(run / "summary.json", (NOW - 60, NOW - 60))  # of before it was resumed
    assert not read_progress(run, {}).ended


def test_a_run_that_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [learned(step) for step in range(1, 11)])
    os.utime(run / "metrics.jsonl", (NOW - 59, NOW - 59))
    assert "1:30 left, last row 0:59 ago" in once(run, capsys)[0]
    os.utime(run / "metrics.jsonl", (NOW - 3725, NOW - 3725))
    assert "it may have stopped: last row 1:02:05 ago" in once(run, capsys)[0]


def test_whatever_the_rows_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [learned(1), {"stage": LEARNING}, {"step": None}, learned(2, **{"reward/mean": None, "time/train_s": None})]
    run = make_run(tmp_path / "\x1b[31mred", odd, notes="a note \x1b]0;title\x07 [bold]\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[]\nnull\n{"stage": "reinf')
    lines = once(run, capsys)
    assert "step 2 of 40" in lines[0]
    assert lines[0].startswith("\\x1b[31mred")
    assert lines[-1] == "  a note \\x1b]0;title\\x07 [bold]"


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_screen_of_any_width(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [learned(step) for step in range(1, 30)], notes="a long note " * 40 + "\n")
    assert max(map(len, once(run, capsys, width))) <= width


def test_the_run_of_a_sweep_that_wrote_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        run = make_run(tmp_path / str(number), [learned(number + 1)])
        os.utime(run / "metrics.jsonl", (NOW - abs(number - 1), NOW - abs(number - 1)))
    assert once(tmp_path, capsys)[0].startswith("1  reinforcement learning  step 2 of 40")
    with pytest.raises(ConfigError, match="holds no run"):
        main([str(tmp_path / "nowhere")])


def test_live_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [learned(1)])
    monkeypatch.setattr(watch, "_EVERY_S", 0.05)
    monkeypatch.setattr(watch.Console, "is_terminal", True)
    watched = threading.Thread(target=main, args=([str(run)],))
    watched.start()
    time.sleep(0.3)
    assert watched.is_alive()
    (run / "summary.json").write_text("{}")
    watched.join(timeout=10)
    assert not watched.is_alive()


def test_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read_last_lines(path, 100) == []
    path.write_bytes(b"first\nsecond\nthird\npart")
    assert read_last_lines(path, 100) == [b"first", b"second", b"third"]
    assert read_last_lines(path, 16) == [b"third"]
    assert read_last_lines(path, 3) == []


def test_a_million_rows(tmp_path: Path) -> None:
    row = json.dumps(learned(1))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(row.replace('"step": 1', f'"step": {step}') + "\n" for step in range(1, 1_000_001))
    code = (
        "import sys; from mtgrpo.commands.watch import main; main(sys.argv[1:]); "
        "print(open('/proc/self/status').read())"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, str(tmp_path), "--once"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "step 1,000,000" in run.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", run.stdout)[0]) < 200 * 1024
