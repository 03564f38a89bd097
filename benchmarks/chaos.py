"""A run that is killed with kill -9 at random moments and resumed each time, beside one that never was.

The same small training run (a model from scratch, the calculator's tasks) twice: once from beginning to end, once
killed again and again by SIGKILL, between 0 and `--life` seconds after it took its work up, and started anew by the
same command with `resume=true`. Kills hit the warm start, rollouts, updates, evaluations and saves as they come.

    resume.exact     the share of all rows of metrics.jsonl, the last weights among them, that are the same to the
                     last digit in both runs (times excepted); only in step with the rollouts, --staleness 0
    tasks.lost       tasks before the last position of the task stream that were not trained
    tasks.repeated   tasks that were trained twice

Of each kill: the work that was done since the checkpoint from which the run went on, in seconds and in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import finish

from mtgrpo import checkpoint

FOLDER = Path("outputs/benchmarks/chaos")
LEARNING = "reinforcement learning"
WORDS = (
    *("sft.steps=20", "sft.batch_size=8", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.tasks=10"),
    *("eval.samples=2", "eval.every_steps=25", "checkpoint.keep_best=0", "optimizer.schedule=constant", "log=[jsonl]"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
)


def command(folder: Path, words: Sequence[str]) -> list[str]:
    """Begin the run in `folder`, or go on with it."""
    return [sys.executable, "-m", "mtgrpo", "train", *WORDS, *words, "resume=true", f"hydra.run.dir={folder}"]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def digits(row: dict[str, Any]) -> dict[str, Any]:
    """What is not measured of the machine."""
    return {name: value for name, value in row.items() if not name.startswith(("perf/", "time/"))}


def kill_once(folder: Path, words: Sequence[str], life_s: float) -> tuple[float, float] | None:
    """Run for `life_s` after the work was taken up, then kill; the seconds and turns that are lost. None: it ended."""
    notes = folder / "notes.txt"
    known = notes.read_text().count("engine: ") if notes.exists() else 0
    process = subprocess.Popen(command(folder, words))
    while not notes.exists() or notes.read_text().count("engine: ") == known:  # the last note before the work
        if process.poll() is not None:
            break
        time.sleep(0.01)
    began = time.time()
    try:
        process.wait(life_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = time.time()
    if process.returncode == 0:
        return None
    assert process.returncode == -signal.SIGKILL, f"it ended by itself with {process.returncode}"
    found = checkpoint.newest(folder, print)
    if found is None:
        return ended - began, 0.0
    lost = [row for row in rows(folder) if row["stage"] == LEARNING and row["step"] > found.step]
    turns = sum(row["rollout/turns"] for row in lost) * 16
    return ended - max(began, (found.path / checkpoint.STATE).stat().st_mtime), turns


def tasks_of(folder: Path) -> tuple[int, int]:
    """How many tasks were skipped, and how many were trained twice."""
    trained: Counter[int] = Counter()
    for path in sorted((folder / "trajectories").glob("step_*.jsonl")):
        trained.update({int(json.loads(line)["task"].rpartition("/")[2]) for line in path.read_text().splitlines()})
    last = checkpoint.newest(folder, print)
    assert last is not None
    stream = last.state["stream"]
    position = stream["tasks"]["position"]
    due = {*range(position), *(position + number for number in stream["trained"])}
    return len(due - trained.keys()), sum(count > 1 for count in trained.values()) + len(trained.keys() - due)


def exactness(found: Path, expected: Path) -> float:
    """The share of rows that are the same, and of the files of weights."""
    pairs = list(zip(rows(found), rows(expected), strict=True))
    same = [digits(one) == digits(other) for one, other in pairs]
    last = [checkpoint.newest(folder, print) for folder in (found, expected)]
    files = [{name: file for name, file in one.files.items() if "safetensors" in name} for one in last if one]
    return statistics.mean([*same, files[0] == files[1]])


def main() -> None:
    """Kill, resume, compare, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--life", type=float, default=6.0, help="seconds of work before a kill, at most")
    parser.add_argument("--steps", type=int, default=0, help="of the whole run; 0 = 15 for each kill")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    draw, exact = random.Random(given.seed), given.staleness == 0
    steps = given.steps or 15 * given.kills
    words = [f"trainer.steps={steps}", f"rollout.max_staleness={given.staleness}"]
    shutil.rmtree(given.folder, ignore_errors=True)
    killed, whole = given.folder / "killed", given.folder / "whole"
    lost: list[tuple[float, float]] = []
    while len(lost) < given.kills and (one := kill_once(killed, words, draw.uniform(0, given.life))):
        lost.append(one)
        print(f"kill {len(lost)}: {one[0]:.1f} s and {one[1]:.0f} turns lost", file=sys.stderr)
    for folder in (killed, whole) if exact else (killed,):
        subprocess.run(command(folder, words), check=True)
    skipped, repeated = tasks_of(killed)
    ratios = {
        "resume.exact": exactness(killed, whole) if exact else None,
        "tasks.lost": float(skipped),
        "tasks.repeated": float(repeated),
    }
    detail: dict[str, Any] = {"kills": len(lost), "steps": steps, "staleness": given.staleness, "life_s": given.life}
    for name, values in zip(("seconds", "turns"), zip(*lost, strict=True), strict=True):
        detail[f"lost_{name}"] = {"median": statistics.median(values), "max": max(values)}
    finish("chaos", ratios, detail, None if given.kills < 100 else f"chaos{given.staleness or ''}.json")


if __name__ == "__main__":
    main()
