"""100,000 tasks through stream, turn loop and journal, with kill -9 at three random points: none skipped or repeated.

The real stream with rollouts ahead, the real turn loop and journal, an engine that follows a script, and in the place
of training a list of what was trained. Every 10 batches the position is saved, as a checkpoint has it; a process that
goes on cuts the list back to there, as `resume=true` does with a run's record.

    stream.tasks          tasks that were trained
    stream.skipped        tasks before the last position that were not
    stream.repeated       tasks that were trained twice
    stream.memory_growth  peak memory of the last process at its end over that after its first 1,000 tasks
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from record import finish, resident
from talk import Talk, Tokens

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.condensers.none import Whole
from mtgrpo.engines import Key
from mtgrpo.journal import Journal
from mtgrpo.model import tiny
from mtgrpo.rollout.conversation import Limits
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import RolloutSettings
from mtgrpo.rollout.stream import Stream
from mtgrpo.tasks import IndexedStream
from mtgrpo.types import Message, Sampling, Task

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from scripted import ScriptedEngine

FOLDER = Path("outputs/benchmarks/stream")
BATCH, STALENESS, SAVED = 100, 2, 10  # tasks; updates; batches from one saved position to the next
ANEW = multiprocessing.get_context("forkserver")
ANEW.set_forkserver_preload(["mtgrpo.model.tiny", "mtgrpo.rollout.stream", "scripted"])


class Uneven(Talk):
    """One to three turns: quick tasks overtake slow ones."""

    async def start(self, task: Task) -> Any:
        self.turns = 1 + int(task.id) % 3
        return await super().start(task)


def make_stream(folder: Path) -> tuple[Stream, Journal]:
    """The stream of tasks 0, 1, 2, ... and its journal."""
    stop, journal = tiny.load_tokenizer().eos_token_id, Journal(folder / "journal")
    engine = ScriptedEngine(lambda key, turn: [300 + turn, 400 + int(key.task) % 100, stop])
    environment = Uneven(nap_s=0.0)

    def opened(scope: str, task: str, sample_index: int) -> Any:
        engine.asked.clear()  # it keeps what it was asked
        return engine.conversation(Key(0, scope, task, sample_index))

    runner = RolloutRunner(
        environment=environment,
        chat=open_chat(tiny.load_tokenizer(), ChatSettings()),
        reward=Tokens(),
        sampling=Sampling(max_new_tokens=8),
        limits=Limits(1000, 1000, 1000),
        condenser=Whole(),
        retries=0,
        timeout_s=0.0,
        open_conversation=journal.recording(opened, environment.replayable),
        attend=None,
        slots=asyncio.Semaphore(64),
    )
    tasks = IndexedStream(None, lambda index: Task(str(index), (Message("user", f"number {index}"),)), seed=0)
    settings = RolloutSettings(prompts_per_step=BATCH, max_staleness=STALENESS, group_size=1)
    return Stream(runner, tasks, settings, journal=journal), journal


async def play(folder: Path, tasks: int) -> None:
    """Train `tasks` tasks, or what is left of them."""
    stream, journal = make_stream(folder)
    trained, place = folder / "trained.txt", folder / "state.json"
    version = bytes_written = 0
    if place.exists():
        state = json.loads(place.read_text())
        version, bytes_written = state["version"], state["bytes"]
        stream.load_state_dict(state["stream"])
        stream.go_on(version)
    elif folder.joinpath("journal").exists():
        stream.go_on(0)
    trained.touch()
    os.truncate(trained, bytes_written)
    began, early = version, 0
    with trained.open("a") as file:
        while version * BATCH < tasks:
            batch = await stream.batch(version)
            file.writelines(f"{group.task.id}\n" for group in batch.groups)
            file.flush()
            version += 1
            if version == began + 1000 // BATCH:
                early = resident("VmHWM")
            if version % SAVED == 0:
                state = {"version": version, "bytes": trained.stat().st_size, "stream": stream.state_dict()}
                place.with_suffix(".partial").write_text(json.dumps(state))
                os.replace(place.with_suffix(".partial"), place)
                journal.prune(version - SAVED - STALENESS)
    state = {"stream": stream.state_dict(), "growth": resident("VmHWM") / early}
    (folder / "end.json").write_text(json.dumps(state))
    await stream.close()


def run(folder: str, tasks: int) -> None:
    """A process of its own."""
    asyncio.run(play(Path(folder), tasks))


def begin(folder: Path, tasks: int) -> Any:
    """Start it."""
    process = ANEW.Process(target=run, args=(str(folder), tasks))
    process.start()
    return process


def main() -> None:
    """Play, kill, play on, count, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    draw, trained = random.Random(given.seed), given.folder / "trained.txt"
    points = sorted(draw.randrange(given.tasks // 2) for _ in range(3))
    for point in points:
        process = begin(given.folder, given.tasks)
        while process.exitcode is None and not (trained.exists() and trained.read_text().count("\n") >= point):
            time.sleep(0.05)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        print(f"killed after {trained.read_text().count(chr(10))} tasks", file=sys.stderr)
    process = begin(given.folder, given.tasks)
    process.join()
    assert process.exitcode == 0
    counts = Counter(map(int, trained.read_text().split()))
    end = json.loads((given.folder / "end.json").read_text())
    due = {*range(end["stream"]["first"]), *end["stream"]["trained"]}
    ratios: dict[str, float | None] = {
        "stream.tasks": float(counts.total()),
        "stream.skipped": float(len(due - counts.keys())),
        "stream.repeated": float(sum(count > 1 for count in counts.values()) + len(counts.keys() - due)),
        "stream.memory_growth": end["growth"],
    }
    finish("stream", ratios, {"killed_at": points}, "stream.json" if given.tasks >= 100_000 else None)


if __name__ == "__main__":
    main()
