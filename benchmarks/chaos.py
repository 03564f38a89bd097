"""A run that is killed with kill -9 at random moments and resumed each time, in both modes.

A small training run (a model from scratch, conversations of four turns) is killed again and again by SIGKILL, between 0
and `--life` seconds of its processor time after it took its work up, and started anew by the same command with
`resume=true`. Kills hit the warm start, rollouts, updates, evaluations and saves as they come. Each process is forked
from one that has imported everything, which is all that differs from the command in a shell. In step with the rollouts
(`resume_mode=exact`) the same run is made once more, and never killed; with rollouts ahead (`resume_mode=continue`)
there is no such run.

    resume.exact     in step: the share of all rows of metrics.jsonl, the last weights among them, that are the same to
                     the last digit in both runs (times excepted). Ahead: the share of steps that were trained again
                     after a kill whose losses, gradients and rewards are those of the first time, to the last digit
    tasks.lost       tasks before the last position of the task stream that were not trained
    tasks.repeated   tasks that were trained twice

Of each kill: the processor seconds of work that are done again (in step: all since the checkpoint; ahead: the updates
since the checkpoint, and the time since the last event of the journal), and the turns that are sampled again (in step:
those in the journal since the checkpoint; a kill before the work went on counts those of the kill before it once more).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import finish

from mtgrpo import cli, journal
from mtgrpo.weights.saved import STATE, find_newest

FOLDER = Path("outputs/benchmarks/chaos")
LEARNING = "reinforcement learning"
PARTS = Path(__file__).resolve().with_name("talk.py")
STALENESS = {"exact": 0, "continue": 2}
WORDS = (
    *("sft.steps=20", "sft.batch_size=8", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.tasks=4"),
    *("eval.samples=1", "eval.every_steps=25", "checkpoint.keep_best=0", "optimizer.schedule=constant", "log=[jsonl]"),
    *(f"environment={PARTS}:Talk", f"reward={PARTS}:Tokens", "sampling.max_new_tokens=12"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
)
ANEW = multiprocessing.get_context("forkserver")  # processes that have imported everything
ANEW.set_forkserver_preload(["mtgrpo.cli", "mtgrpo.config.compose", "mtgrpo.stages.trainer"])
Turn = tuple[str, str, int, int]  # scope, task, sample, number


def begin(folder: Path, words: Sequence[str]) -> Any:
    """A process that begins the run in `folder`, or goes on with it."""
    process = ANEW.Process(target=cli.main, args=(["train", *WORDS, *words, "resume=true", f"hydra.run.dir={folder}"],))
    process.start()
    return process


def processor_s(pid: int) -> float:
    """The processor time that a process has had; 0 where it has ended."""
    stat = Path(f"/proc/{pid}/stat")
    fields = stat.read_text().rpartition(")")[2].split() if stat.exists() else ["0"] * 13
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def learned(folder: Path) -> dict[int, dict[str, Any]]:
    """What each step of learning came to."""
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith(("policy/", "reward/"))}
        for row in rows(folder)
        if row["stage"] == LEARNING
    }


def digits(row: dict[str, Any]) -> dict[str, Any]:
    """What is not measured of the machine."""
    return {name: value for name, value in row.items() if not name.startswith(("perf/", "time/"))}


def turns_of(folder: Path, since: int = 0) -> Counter[Turn]:
    """How often each turn was sampled, of those that the journal has from version `since` on."""
    found: Counter[Turn] = Counter()
    for path in sorted((folder / "journal").glob("step_*")):
        if int(path.name[5:11]) >= since:
            events = [event for event in journal.read(path) if "turn" in event]
            found.update((event["scope"], event["task"], event["sample"], event["turn"]) for event in events)
    return found


class Killed:
    """The run that is killed, and what that costs."""

    def __init__(self, folder: Path, mode: str, words: Sequence[str]) -> None:
        self.folder, self.exact, self.words = folder, mode == "exact", words
        self.seconds: list[float] = []
        self.turns: list[float] = []
        self.first: dict[int, dict[str, Any]] = {}  # what a step came to when it was trained first
        self.again: set[int] = set()  # steps that were trained more than once
        self._sampled_again: set[Turn] = set()
        self._undone: set[int] = set()  # steps after the checkpoint at the last kill

    def kill(self, life_s: float) -> bool:
        """Run for `life_s` after the work was taken up, then kill; False: it ended before."""
        notes = self.folder / "notes.txt"
        known = notes.read_text().count("engine: ") if notes.exists() else 0
        process = begin(self.folder, self.words)
        while not notes.exists() or notes.read_text().count("engine: ") == known:  # the last note before the work
            if process.exitcode is not None:
                break
            time.sleep(0.01)
        began, used_s, lived_s = time.time(), processor_s(process.pid), 0.0
        while process.exitcode is None and lived_s < life_s:
            time.sleep(0.01)
            lived_s = processor_s(process.pid) - used_s
        process.kill()
        process.join()
        ended = time.time()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, f"it ended by itself with {process.exitcode}"
            return False
        self._count(began, ended, min(1.0, lived_s / (ended - began)))
        return True

    def _count(self, began: float, ended: float, share: float) -> None:
        """What is done again; `share` of the time went into processor time."""
        found = find_newest(self.folder, print)
        step, saved_s = (found.step, (found.path / STATE).stat().st_mtime) if found else (0, began)
        now = learned(self.folder)
        self.again |= self._undone & now.keys()
        self._undone = {number for number in now if number > step}
        self.first = now | self.first
        if self.exact:
            self.seconds.append((ended - max(began, saved_s)) * share)
            self.turns.append(float(sum(turns_of(self.folder, step).values())))
            return
        later = [row for row in rows(self.folder) if row["stage"] == LEARNING and row["step"] > step]
        written = max((path.stat().st_mtime for path in (self.folder / "journal").glob("step_*")), default=began)
        self.seconds.append((sum(row["time/train_s"] for row in later) + ended - max(began, written)) * share)
        repeated = {turn for turn, count in turns_of(self.folder).items() if count > 1}
        self.turns.append(float(len(repeated - self._sampled_again)))
        self._sampled_again |= repeated

    def same_again(self) -> float:
        """The share of steps that were trained again with the same digits."""
        last = learned(self.folder)
        return statistics.mean(last[step] == self.first[step] for step in self.again) if self.again else 0.0


def tasks_of(folder: Path) -> tuple[int, int]:
    """How many tasks were skipped, and how many were trained twice."""
    trained: Counter[int] = Counter()
    for path in sorted((folder / "trajectories").glob("step_*.jsonl")):
        trained.update({int(json.loads(line)["task"].rpartition("/")[2]) for line in path.read_text().splitlines()})
    last = find_newest(folder, print)
    assert last is not None
    stream = last.state["stream"]
    due = {*range(stream["first"]), *stream["trained"]}  # task number n is the n-th that is admitted
    return len(due - trained.keys()), sum(count > 1 for count in trained.values()) + len(trained.keys() - due)


def exactness(found: Path, expected: Path) -> float:
    """The share of rows that are the same, and of the files of weights."""
    pairs = list(zip(rows(found), rows(expected), strict=True))
    same = [digits(one) == digits(other) for one, other in pairs]
    last = [find_newest(folder, print) for folder in (found, expected)]
    files = [{name: file for name, file in one.files.items() if "safetensors" in name} for one in last if one]
    return statistics.mean([*same, files[0] == files[1]])


def chaos(mode: str, given: argparse.Namespace) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Kill and resume in one mode; what it came to."""
    draw = random.Random(given.seed)
    steps = given.steps or 8 * given.kills
    words = [f"trainer.steps={steps}", f"rollout.max_staleness={STALENESS[mode]}", "checkpoint.every_steps=5"]
    folder, whole = given.folder / mode, given.folder / "whole"
    run = Killed(folder, mode, words)
    while len(run.seconds) < given.kills and run.kill(draw.uniform(0, given.life)):
        lost = f"{run.seconds[-1]:.2f} s and {run.turns[-1]:.0f} turns again"
        print(f"{mode}, kill {len(run.seconds)}: {lost}", file=sys.stderr)
    for place in (folder, whole) if run.exact else (folder,):
        process = begin(place, words)
        process.join()
        assert process.exitcode == 0
    skipped, repeated = tasks_of(folder)
    detail: dict[str, Any] = {"kills": len(run.seconds), "steps": steps, "life_s": given.life}
    for name, values in (("seconds", run.seconds), ("turns", run.turns)):
        detail[f"{name}_again"] = {"median": statistics.median(values), "max": max(values)}
    detail["steps_trained_again"] = len(run.again)
    exact = exactness(folder, whole) if run.exact else run.same_again()
    return {"resume.exact": exact, "tasks.lost": float(skipped), "tasks.repeated": float(repeated)}, detail


def main() -> None:
    """Kill, resume, compare, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in each mode")
    parser.add_argument("--life", type=float, default=2.0, help="processor seconds of work before a kill, at most")
    parser.add_argument("--steps", type=int, default=0, help="of the whole run; 0 = 8 for each kill")
    parser.add_argument("--modes", nargs="+", choices=list(STALENESS), default=list(STALENESS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shutil.rmtree(given.folder, ignore_errors=True)
    ratios: dict[str, float | None] = {}
    detail: dict[str, Any] = {}
    file = "chaos.json" if given.kills >= 100 else None
    for mode in given.modes:
        found, detail[mode] = chaos(mode, given)
        ratios |= {f"{name}.{mode}": value for name, value in found.items()}
        finish("chaos", ratios, detail, file)


if __name__ == "__main__":
    main()
