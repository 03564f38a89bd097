"""Success on every held-out task, in a process of its own: what smollm2.py measures after each arm.

    python benchmarks/held_out.py '{"words": ["recipe=smollm2"], "folder": "outputs/measured"}'

With `imitate_s` the policy first imitates its own successes for so many seconds (learning.py).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning import imitate

from mtgrpo.config.compose import compose, parse
from mtgrpo.record.writing import write_summary
from mtgrpo.stages.metrics import describe
from mtgrpo.stages.run import Run, open_run


@dataclass(frozen=True)
class Settings:
    """The arguments of the process."""

    words: list[str]  # of `mtgrpo train`
    folder: str  # `summary.json` is written there
    imitate_s: float = 0.0


async def measure(run: Run) -> dict[str, Any]:
    """The metrics of an evaluation, and the success of every task."""
    samples, success_at = run.experiment.eval.samples, run.experiment.reward.success_at
    runner = run.runner.at("eval", temperature=1.0)
    groups = await asyncio.gather(*(runner.run_group(task, samples) for task in run.held_out))
    whole = describe(groups, success_at, samples)
    if whole["failed"]:
        raise RuntimeError(f"{whole['failed']:.0%} of the held-out conversations failed")
    tasks = [describe([group], success_at, samples)["success"] for group in groups]
    assert abs(statistics.mean(tasks) - whole["success"]) < 1e-9
    return {**whole, "tasks": tasks, "samples": samples}


async def main() -> None:
    """Imitate for `imitate_s`, measure, write."""
    settings = Settings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    async with open_run(compose(parse([*settings.words, "log=[]"])).experiment, folder) as run:
        steps = {"steps": await imitate(run, settings.imitate_s)} if settings.imitate_s else {}
        write_summary(folder, await measure(run) | steps)


if __name__ == "__main__":
    asyncio.run(main())
