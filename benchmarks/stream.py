"""100,000 tasks through stream, turn loop and journal, with kill -9 at three random points: none skipped or repeated.

All of a run but its policy: the tasks and the tool of recipe=calculator, two rewards, rollouts ahead, the journal, a
line of metrics for each step and all conversations on disk. An engine that follows a script takes the place of the
model, and a list of what was trained that of training. Every 10 batches the position is saved, as a checkpoint has it;
a process that goes on cuts the list back to there, as `resume=true` does with a run's record.

    stream.tasks          tasks that were trained
    stream.skipped        tasks before the last position that were not
    stream.repeated       tasks that were trained twice
    stream.memory_growth  peak memory of the last process and all it starts, at its end over after its first 1,000 tasks
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from record import finish

from mtgrpo.chat import open_chat
from mtgrpo.config.compose import preset
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Key
from mtgrpo.journal import Journal
from mtgrpo.log import Sink
from mtgrpo.log.jsonl import Jsonl
from mtgrpo.model import tiny
from mtgrpo.parts import RunContext
from mtgrpo.record.writing import write_trajectories
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages.checks import open_tasks
from mtgrpo.stages.metrics import describe_step
from mtgrpo.stages.run import make_runner, open_parts

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from scripted import ScriptedEngine

FOLDER = Path("outputs/benchmarks/stream")
BATCH, STALENESS, SAVED = 100, 2, 10  # tasks; updates; batches from one saved position to the next
ANEW = multiprocessing.get_context("forkserver")
ANEW.set_forkserver_preload(["mtgrpo.model.tiny", "mtgrpo.stages.run", "scripted"])
OPTIONS = (
    "reward=[numeric,format]",
    f"rollout.prompts_per_step={BATCH}",
    f"rollout.max_staleness={STALENESS}",
    "rollout.group_size=2",
)


def spoken(key: Key, turn: int) -> str:
    """One to three turns, of which the last has no call: quick tasks overtake slow ones."""
    number = int(key.task.rpartition("/")[2])
    if turn == number % 3:
        return f"#### {number}"
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{number} + {turn}"}})
    return f"<tool_call>\n{call}\n</tool_call>"


async def play(folder: Path, tasks: int) -> None:
    """Train `tasks` tasks, or what is left of them."""
    tokenizer = tiny.load_tokenizer()
    stop = [tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda key, turn: tokenizer.encode(spoken(key, turn), add_special_tokens=False) + stop)

    def conversation(key: Key) -> Any:
        engine.asked.clear()  # it keeps what it was asked
        return engine.conversation(key)

    context = RunContext(folder, print, os.environ)
    composed = preset("calculator_from_scratch", *OPTIONS)
    async with open_parts(composed, context) as experiment, Jsonl().open(context) as log:
        journal = Journal(folder / "journal")
        runner = make_runner(experiment, open_chat(tokenizer, experiment.chat), conversation, None, 1000)
        recorded = journal.recording(runner.open_conversation, experiment.environment.replayable)
        runner = dataclasses.replace(runner, open_conversation=recorded)
        stream = Stream(runner, open_tasks(experiment)[0], experiment.rollout, journal=journal)
        await train(stream, journal, experiment, folder, log, tasks)
        await stream.close()


async def train(stream: Stream, journal: Journal, experiment: Experiment, folder: Path, log: Sink, tasks: int) -> None:
    """Go on from the position that was saved, up to `tasks`; the record is that of a run."""
    done, place = folder / "trained.txt", folder / "state.json"
    version = bytes_written = 0
    if place.exists():
        state = json.loads(place.read_text())
        version, bytes_written = state["version"], state["bytes"]
        stream.load_state_dict(state["stream"])
        stream.go_on(version)
    elif folder.joinpath("journal").exists():
        stream.go_on(0)
    done.touch()
    os.truncate(done, bytes_written)
    with done.open("a") as file:
        while version * BATCH < tasks:
            began = time.perf_counter()
            batch = await stream.batch(version)
            write_trajectories(folder, f"step_{version + 1:06d}", batch.groups)
            log.log(describe_step(batch, experiment, version, time.perf_counter() - began, 0.0), version + 1)
            file.writelines(f"{group.task.id.rpartition('/')[2]}\n" for group in batch.groups)
            file.flush()
            version += 1
            if version % SAVED == 0:
                state = {"version": version, "bytes": done.stat().st_size, "stream": stream.state_dict()}
                place.with_suffix(".partial").write_text(json.dumps(state))
                os.replace(place.with_suffix(".partial"), place)
                journal.prune(version - SAVED - STALENESS)
    (folder / "end.json").write_text(json.dumps(stream.state_dict()))


def run(folder: str, tasks: int) -> None:
    """A process of its own."""
    asyncio.run(play(Path(folder), tasks))


def begin(folder: Path, tasks: int) -> Any:
    """Start it."""
    process = ANEW.Process(target=run, args=(str(folder), tasks))
    process.start()
    return process


def played(folder: Path) -> int:
    """Tasks that are written down as trained."""
    file = folder / "trained.txt"
    return file.read_text().count("\n") if file.exists() else 0


def tree_bytes(root: int) -> int:
    """Resident memory of a process and of all that it has started, now."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, left = 0, [root]
    while left:
        number = left.pop()
        left += parents.get(number, [])
        with suppress(OSError, ValueError):
            found += int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def watched(process: Any, folder: Path) -> tuple[int, int]:
    """Wait for its end: the peak memory of its tree, after 1,000 of its tasks and at the end, in bytes."""
    early = peak = 0
    began = played(folder)
    while process.exitcode is None:
        peak = max(peak, tree_bytes(process.pid))
        if played(folder) - began < 1000:
            early = peak
        process.join(0.2)
    return early, peak


def main() -> None:
    """Play, kill, play on, count, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    draw = random.Random(given.seed)
    points = sorted(draw.randrange(given.tasks // 2) for _ in range(3))
    for point in points:
        process = begin(given.folder, given.tasks)
        while process.exitcode is None and played(given.folder) < point:
            time.sleep(0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        print(f"killed after {played(given.folder)} tasks", file=sys.stderr)
    began = time.perf_counter()
    process = begin(given.folder, given.tasks)
    early, peak = watched(process, given.folder)
    assert process.exitcode == 0
    counts = Counter(map(int, (given.folder / "trained.txt").read_text().split()))
    end = json.loads((given.folder / "end.json").read_text())
    due = {*range(end["first"]), *end["trained"]}
    ratios: dict[str, float | None] = {
        "stream.tasks": float(counts.total()),
        "stream.skipped": float(len(due - counts.keys())),
        "stream.repeated": float(sum(count > 1 for count in counts.values()) + len(counts.keys() - due)),
        "stream.memory_growth": peak / early,
    }
    steps = [json.loads(line) for line in (given.folder / "metrics.jsonl").read_text().splitlines()]
    detail = {
        "killed_at": points,
        "last_process_s": time.perf_counter() - began,
        "peak_mib": peak / 2**20,
        "tool_calls_per_task": steps[-1]["tool/calculator/calls"],
        "reward": steps[-1]["reward/mean"],
        "trajectories_mib": sum(file.stat().st_size for file in given.folder.rglob("trajectories/*")) / 2**20,
    }
    finish("stream", ratios, detail, "stream.json" if given.tasks >= 100_000 else None)


if __name__ == "__main__":
    main()
