"""Do slow rewards hold up decoding? Conversations of many groups, of which some are scored while others are sampled.

    none           scored at once
    asynchronous   the reward of each trajectory awaits 1 s, as a judge behind a network does
    cpu_heavy      the reward of each trajectory takes 1 s of processor time, in processes of its own

One thread computes; what is measured ends with the last token that is sampled, not with the last score.

    slow_reward.asynchronous, slow_reward.cpu_heavy   tokens/s / tokens/s with none
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import record  # before torch
import torch

from mtgrpo.config.compose import preset
from mtgrpo.rewards import Reward
from mtgrpo.stages.run import open_run
from mtgrpo.types import Completion, Sample, Trajectory

SECOND = 1.0
WARM, SIZE, GROUPS = 2, 8, 24  # trajectories to start with, and of a group
WORDS = ("log=[]", "rollout.max_concurrent=32", "sampling.max_new_tokens=120", "environment.max_turns=1")


class Immediate(Reward):
    """0 at once."""

    def reward(self, trajectory: Trajectory) -> float:
        """0."""
        return 0.0


class Asynchronous(Reward):
    """0 after a second."""

    async def rewards(self, siblings: Any) -> list[float]:
        """0 for each."""
        await asyncio.sleep(SECOND)
        return [0.0 for _ in siblings]


class Heavy(Reward):
    """0 after a second of the processor's time."""

    cpu_heavy = True

    def reward(self, trajectory: Trajectory) -> float:
        """0."""
        began = time.process_time()
        while time.process_time() - began < SECOND:
            pass
        return 0.0


ARMS = {"none": Immediate, "asynchronous": Asynchronous, "cpu_heavy": Heavy}


async def measure(arm: str, groups: int) -> float:
    """Tokens/s until the last is sampled."""
    tokens, last_s, left = 0, 0.0, groups * SIZE
    over = asyncio.Event()
    with TemporaryDirectory() as folder:
        experiment = replace(preset("calculator_from_scratch", *WORDS), reward=ARMS[arm]())
        async with open_run(experiment, Path(folder), trains=False) as run:

            @asynccontextmanager
            async def counted(scope: str, task: str, sample_index: int) -> AsyncGenerator[Sample]:
                async with run.runner.open_conversation(scope, task, sample_index) as sample:

                    async def counting(*arguments: Any) -> Completion:
                        nonlocal tokens, last_s
                        completion = await sample(*arguments)
                        tokens, last_s = tokens + len(completion.tokens), time.perf_counter()
                        return completion

                    yield counting
                nonlocal left
                left -= 1
                if not left:
                    over.set()

            await run.runner.at("warm").run_group(next(run.tasks), WARM)  # processes start
            runner, began = replace(run.runner, open_conversation=counted), time.perf_counter()
            running = [asyncio.create_task(runner.run_group(next(run.tasks), SIZE)) for _ in range(groups)]
            await over.wait()
            for group in running:
                group.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return tokens / (last_s - began)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two groups, one repeat; no file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    repeats, groups = (1, 2) if given.quick else (given.repeats, GROUPS)
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm, values in found.items():
            values.append(asyncio.run(measure(arm, groups)))
            print(f"{arm:14}{values[-1]:10,.0f} tokens/s", flush=True)
    median = {arm: statistics.median(values) for arm, values in found.items()}
    ratios: dict[str, float | None] = {
        f"slow_reward.{arm}": round(median[arm] / median["none"], 3) for arm in ("asynchronous", "cpu_heavy")
    }
    print(json.dumps(ratios))
    record.finish("slow_reward", ratios, {"tokens_per_s": found}, None if given.quick else "slow_reward.json")


if __name__ == "__main__":
    main()
