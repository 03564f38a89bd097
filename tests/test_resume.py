"""A run that was killed anywhere and resumed is, to the last digit, one that never was; every ending saves."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import checkpoint
from mtgrpo.config.compose import compose, parse
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.log.jsonl import Jsonl
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.record.curve import Curve
from mtgrpo.rewards import Reward
from mtgrpo.stages import evaluate as evaluation
from mtgrpo.stages.saving import Saver
from mtgrpo.stages.trainer import train
from mtgrpo.types import Trajectory

SMALL = [
    *("trainer.steps=5", "sft.steps=4", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=12", "eval.tasks=2", "eval.samples=2", "eval.every_steps=2", "log=[jsonl]"),
    *("checkpoint.every_steps=2", "optimizer.lr=1e-3", "optimizer.schedule=linear", f"reward={__file__}:Second"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]
ANEW = multiprocessing.get_context("forkserver")  # processes that have imported everything
ANEW.set_forkserver_preload(["mtgrpo.stages.trainer", "mtgrpo.config.compose"])


class Second(Reward):
    """Every conversation has a worth of its own."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(token % 7 for turn in trajectory.turns for token in turn.output))


class KilledError(BaseException):
    """The process is gone: nothing more is saved."""


def ran(folder: Path, *words: str) -> Path:
    asyncio.run(train(compose(parse([*SMALL, *words])).experiment, folder, Curve()))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def digits(values: dict[str, Any]) -> dict[str, Any]:
    """What is not a measurement of the machine."""
    return {name: value for name, value in values.items() if not name.startswith(("perf/", "time/"))}


def everything(folder: Path) -> dict[str, Any]:
    """All that a run computed: metrics, summary, conversations, weights."""
    found: dict[str, Any] = {path.name: path.read_text() for path in sorted((folder / "trajectories").iterdir())}
    last = checkpoint.newest(folder, print)
    assert last is not None
    weights = {name: file["sha256"] for name, file in last.files.items() if name.endswith(".safetensors")}
    summary = json.loads((folder / "summary.json").read_text())
    return found | {"rows": [digits(row) for row in rows(folder)], "summary": digits(summary), "weights": weights}


def same(found: Path, expected: Path) -> None:
    one, other = everything(found), everything(expected)
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name] == value, name


def patched(owner: Any, name: str, at: int, act: Callable[[], Any], patch: pytest.MonkeyPatch) -> None:
    """`act` comes before the `at`-th call of a method or function."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            act()
        return real(*arguments, **named)

    patch.setattr(owner, name, call)


def killed(folder: Path, words: list[str], owner: Any, name: str, at: int) -> None:
    """A run that is gone before the `at`-th call, in this process."""

    def die() -> None:
        patch.setattr(Saver, "save_last", lambda self: None)
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patched(owner, name, at, die, patch)
        with pytest.raises(KilledError):
            ran(folder, *words)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("unbroken"))


# --- kill -9


def _train(folder: Path, words: list[str]) -> None:
    ran(folder, *words)


def _killed_run(folder: Path, point: str, at: int) -> None:
    """In a process of its own."""
    owner, name = POINTS[point]
    patched(owner, name, at, lambda: os.kill(os.getpid(), signal.SIGKILL), pytest.MonkeyPatch())
    ran(folder, "resume=true")


POINTS: dict[str, tuple[Any, str]] = {
    "sampling": (LocalEngine, "_sample"),
    "updating": (Optimizer, "step"),
    "updated": (LocalEngine, "_take_over_weights"),
    "logging": (Jsonl, "log"),
    "saving": (checkpoint, "save_file"),
    "put": (checkpoint, "_put"),
    "renaming": (os, "replace"),
    "ending": (evaluation, "describe"),
}


@pytest.mark.parametrize(
    "deaths",
    [
        [("updating", 3), ("logging", 4)],  # in the warm start, twice
        [("saving", 2), ("sampling", 1), ("put", 3)],
        [("sampling", 20), ("updating", 6), ("updated", 3), ("renaming", 5)],
        [("logging", 8), ("ending", 2), ("saving", 1)],
    ],
)
def test_killed_runs_end_with_the_digits_of_one_that_never_was(
    deaths: list[tuple[str, int]], tmp_path: Path, unbroken: Path
) -> None:
    for point, at in deaths:
        process = ANEW.Process(target=_killed_run, args=(tmp_path, point, at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    same(ran(tmp_path, "resume=true"), unbroken)
