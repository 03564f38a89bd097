"""What journal, self-checks and record cost of a training step, in processor time, in the recipe of `make demo`.

All are measured within a run, call by call, for steps differ from one another by more than any costs. Rounds of a
few steps take turns: in step with the rollouts as the recipe is (`exact`), and with scored groups in the journal too
(`continue`). The first step of a round does not count: it compares the token forest with plain forward passes, which
happens again only where contexts outgrow the next power of two.

    journal.overhead     turns and events: what writing them down takes, the comparison of contexts included
    selfcheck.overhead   what was sampled against what is trained, the sum of the weights, the engine's copy of the
                         weights and its log-probabilities against the trainer's, a trajectory's gradient against its
                         rewards, the update, copies for rewards, trends (not: that scores are finite)
    record.overhead      what became of each token, gathered and written (beside it, as `conversations`: their lines)

Each is the median over the rounds of `exact`, as a share of the processor time of whole steps.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from record import finish

from mtgrpo import preset
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.journal import Journal
from mtgrpo.policy import objective, step, updater
from mtgrpo.policy.update_check import UpdateCheck
from mtgrpo.policy.witness import Witness
from mtgrpo.record.curve import Curve
from mtgrpo.record.tokens import TokenRecorder
from mtgrpo.stages import trainer, update
from mtgrpo.stages.trends import Trends
from mtgrpo.types import Trajectory

FOLDER = Path("outputs/benchmarks/overhead")
WORDS = ("sft.steps=40", "eval.tasks=2", "eval.samples=1", "log=[jsonl]", "checkpoint.every_steps=0")
CHECKS: tuple[tuple[Any, str], ...] = (
    (update, "check_provenance"),
    (updater, "check_weights"),
    (objective, "worst_trajectory"),
    (update, "evidence_of"),
    (step, "compare"),
    (step.Policy, "judge"),
    (LocalEngine, "_check_fused"),
    (Trends, "warnings"),
    (Trajectory, "copy"),
    (objective, "choose"),
    (Witness, "watch"),
    (Witness, "_compare"),
    (Witness, "check"),
    (UpdateCheck, "before"),
    (UpdateCheck, "after"),
)
RECORD: tuple[tuple[Any, str], ...] = (
    (objective.Objective, "end_passes"),
    (objective.Objective, "record"),
    (TokenRecorder, "write"),
)
spent: Counter[str] = Counter()  # processor seconds
marks: list[Counter[str]] = []  # what was spent when each step began


class Resumed:
    """A coroutine whose processor time counts, `sign` times."""

    def __init__(self, work: Coroutine[Any, Any, Any], what: str, sign: int) -> None:
        self._work, self._what, self._sign = work, what, sign

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        while True:
            began = time.thread_time()
            try:
                waits = next(steps)
            except StopIteration as done:
                return done.value
            finally:
                spent[self._what] += self._sign * (time.thread_time() - began)
            yield waits


def timed(opens: Any, what: str, sign: int) -> Any:
    """The same conversations, the processor time of whose turns counts."""

    @asynccontextmanager
    async def opened(*key: Any) -> AsyncGenerator[Any]:
        async with opens(*key) as sample:
            yield lambda *asked: Resumed(sample(*asked), what, sign)

    return opened


def count(owner: Any, name: str, what: str) -> None:
    """Have the processor time of a function or method count."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return real(*arguments, **named)
        finally:
            spent[what] += time.thread_time() - began

    setattr(owner, name, call)


def watch() -> None:
    """Have journal, self-checks and record count, in every run of this process."""
    begin, recording = Journal.begin, Journal.recording

    def marked(self: Journal, version: int) -> None:
        begin(self, version)
        marks.append(Counter(spent, steps=time.process_time()))

    def recorded(self: Journal, opens: Any, replayable: bool) -> Any:
        turns = timed(recording(self, timed(opens, "journal", -1), replayable), "journal", 1)  # without the engine
        return timed(timed(turns, "timing", -1), "timing", 1)  # with nothing within: what the timing itself takes

    Journal.begin, Journal.recording = marked, recorded
    count(Journal, "_write", "journal")
    conversations = ((trainer, "write_trajectories"),)
    for what, functions in (("selfcheck", CHECKS), ("record", RECORD), ("conversations", conversations)):
        for owner, name in functions:
            count(owner, name, what)


def shares(folder: Path, mode: str, steps: int) -> dict[str, float]:
    """One round: the shares of its steps, and the seconds of the checks in the first."""
    shutil.rmtree(folder, ignore_errors=True)
    marks.clear()
    words = (*WORDS, f"trainer.steps={steps}", f"resume_mode={mode}")
    asyncio.run(trainer.train(preset("calculator_from_scratch", *words), folder, Curve()))
    first, second, last = marks[0], marks[1], marks[-1]
    took = {name: last[name] - second[name] for name in last}
    return {
        "journal": (took["journal"] - took["timing"]) / took["steps"],
        **{name: took[name] / took["steps"] for name in ("selfcheck", "record", "conversations")},
        "first_selfcheck_s": second["selfcheck"] - first["selfcheck"],
    }


def main() -> None:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each mode")
    parser.add_argument("--steps", type=int, default=8, help="of a round, the first of which does not count")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    watch()
    rounds: dict[str, list[dict[str, float]]] = {"exact": [], "continue": []}
    for _ in range(given.rounds):
        for mode, found in rounds.items():
            found.append(shares(given.folder, mode, given.steps))
    detail = {
        mode: {name: [round(one[name], 5) for one in found] for name in found[0]} for mode, found in rounds.items()
    }
    ratios: dict[str, float | None] = {
        f"{name}.overhead": statistics.median(detail["exact"][name]) for name in ("journal", "selfcheck", "record")
    }
    finish("overhead", ratios, detail, "overhead.json" if given.rounds >= 5 else None)


if __name__ == "__main__":
    main()
