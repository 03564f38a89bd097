"""A run that was killed anywhere and resumed is, to the last digit, one that never was; every ending saves."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fast_part import fast_part
from mtgrpo import journal
from mtgrpo.config.compose import compose, parse, preset
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.evaluation.findings import what_was_learned
from mtgrpo.log import Tracker
from mtgrpo.log.jsonl import Jsonl
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import ModelSettings
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.parts import RunContext, extension
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.step import Policy
from mtgrpo.record.curve import Curve
from mtgrpo.rewards import Reward
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages import checks, trainer
from mtgrpo.stages import evaluate as evaluation
from mtgrpo.stages.budget import described
from mtgrpo.stages.checks import check, refuse_other_steps
from mtgrpo.stages.evaluate import AllFailedError
from mtgrpo.stages.resume import NO_MEASURE, differences, told_of
from mtgrpo.stages.saving import Saver
from mtgrpo.stages.sft import run_sft
from mtgrpo.stages.trainer import train
from mtgrpo.tasks import Split
from mtgrpo.tasks.jsonl import Jsonl as Rows
from mtgrpo.types import Group, Task, Trajectory
from mtgrpo.weights import checkpoint
from mtgrpo.weights.saved import Checkpoint, find_newest, read_checkpoint
from saving import save_model

pytestmark = pytest.mark.real  # for their length

SMALL = [
    "recipe=calculator_from_scratch",  # also where model.name= names a checkpoint
    *("trainer.steps=5", "sft.steps=4", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=12", "eval.tasks=2", "eval.samples=2", "eval.every_steps=2", "log=[jsonl]"),
    *("checkpoint.every_steps=2", "optimizer.lr=1e-3", "optimizer.schedule=linear", f"reward={__file__}:Tokens"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]
ANEW = multiprocessing.get_context("forkserver")  # processes that have imported everything
ANEW.set_forkserver_preload(["mtgrpo.stages.trainer", "mtgrpo.config.compose"])


class Tokens(Reward):
    """Every conversation has a worth of its own."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(token % 7 for turn in trajectory.turns for token in turn.output))


@dataclass
class Noted(Tracker):
    """At which steps of training there were evaluations of their own."""

    def begin(self, context: RunContext) -> None:
        self._path = context.folder / "noted.txt"

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        if "eval/greedy" in metrics:
            with self._path.open("a") as file:
                file.write(f"{step}\n")

    def end(self) -> None:
        pass


class KilledError(BaseException):
    """The process is gone: nothing more is saved."""


def ran(folder: Path, *words: str) -> Path:
    asyncio.run(train(compose(parse([*SMALL, *words])).experiment, folder, Curve()))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TIMES = {"times", "seconds", "began_s", "asked_s", "ended_s", "pushes"}  # of conversations


def digits(values: dict[str, Any]) -> dict[str, Any]:
    """What is not a measurement of the machine."""
    return {name: value for name, value in values.items() if not name.startswith(("perf/", "time/", "engine/"))}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def conversations(folder: Path) -> dict[str, Any]:
    """All that a run wrote down of them, by file, but when it was."""
    files = sorted((folder / "trajectories").glob("[!.]*"))  # a killed process leaves what it was writing
    return {file.name: [without_times(json.loads(line)) for line in file.read_text().splitlines()] for file in files}


def everything(folder: Path) -> dict[str, Any]:
    """All that a run computed: metrics, summary, conversations, weights."""
    found = conversations(folder)
    last = find_newest(folder, print)
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
    "put": (checkpoint, "put_whole"),
    "renaming": (os, "replace"),
    "measuring": (evaluation, "describe"),
}


@pytest.mark.parametrize(
    "deaths",
    [
        [("updating", 3), ("saving", 2), ("sampling", 1)],
        pytest.param([("logging", 4), ("put", 3)], marks=pytest.mark.slow),
        pytest.param([("sampling", 20), ("updating", 2), ("updated", 2), ("renaming", 5)], marks=pytest.mark.slow),
        pytest.param([("logging", 8), ("saving", 1), ("measuring", 1), ("measuring", 2)], marks=pytest.mark.slow),
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


def test_a_run_that_is_not_there_begins_and_one_that_is_done_is_left_as_it_is(tmp_path: Path, unbroken: Path) -> None:
    folder = ran(tmp_path / "run", "resume=true")
    same(folder, unbroken)
    before = (folder / "metrics.jsonl").read_bytes()
    ran(folder, "resume=true")
    assert (folder / "metrics.jsonl").read_bytes() == before
    same(folder, unbroken)


def test_a_run_goes_on_in_another_folder_and_further(tmp_path: Path, unbroken: Path) -> None:
    from_there = shutil.copytree(unbroken / "checkpoints" / "step_000004", tmp_path / "best")  # of whatever name
    folder = ran(tmp_path / "run", f"resume={from_there}")
    assert rows(folder)[0]["step"] == 5
    last = [row for row in rows(unbroken) if row["step"] == 5]
    assert [digits(row) for row in rows(folder)][:1] == [digits(row) for row in last]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step_000004", "step_000005"]
    ran(folder, "resume=true", "trainer.steps=6")
    steps = [row["step"] for row in rows(folder) if row["stage"] == "reinforcement learning"]
    assert steps == [5, 6]


def test_a_run_that_had_ended_and_goes_on_has_no_end_until_it_has_another(tmp_path: Path, unbroken: Path) -> None:
    folder = shutil.copytree(unbroken, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError):
        patched(Stream, "batch", 1, lambda: _raise(EngineError("broken")), patch)
        ran(folder, "resume=true", "trainer.steps=6")
    kept = {path.stem for path in (folder / "trajectories").iterdir()} - {f"step_{n:06d}" for n in range(1, 6)}
    assert kept == {"evaluation_before", "greedy_before"} and not (folder / "summary.json").exists()


# --- everything that an update depends on


def base(folder: Path) -> Path:
    """A model that can be adapted."""
    save_model(load_model(ModelSettings("tiny"), 0), load_tokenizer("tiny"), folder)
    return folder


@pytest.mark.parametrize(
    "words",
    fast_part(
        [
            "model.lora.rank=4 sft.steps=0",
            "kl.coef=0.1 kl.target=0.001 reference.ema=0.3",
            "kl.coef=0.1 reference.update_every=2 optimizer.kind=muon",
            "algorithm=ppo advantage=gae model.value_head=true sft.steps=0",
            "filter.zero_variance=true filter.refill=true",
            "eval.every_steps=0 checkpoint.every_steps=1 rollout.prompts_per_step=3",
            "trainer.minibatch_trajectories=2 trainer.updates_per_batch=2 kl.coef=0.1",
        ],
        3,
    ),
)
@pytest.mark.parametrize("at", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_to_learn_goes_on_to_the_last_digit(words: str, at: int, tmp_path: Path) -> None:
    given = [f"model.name={base(tmp_path / 'base')}", *words.split()]
    unbroken = ran(tmp_path / "unbroken", *given)
    learned = [row for row in rows(unbroken) if row["stage"] == "reinforcement learning"]
    assert all(row["policy/grad_norm"] > 0 for row in learned), "nothing is learned: the test is too easy"
    killed(tmp_path / "run", given, trainer, "update", at)
    same(ran(tmp_path / "run", *given, "resume=true"), unbroken)


def test_a_curriculum_goes_on_with_what_it_has_measured(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{number} + {number}?", "answer": "{2 * number}"}}\n' for number in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "val.jsonl").write_text("".join(lines[5:]))
    files = [f"task.train_files=[{tmp_path}/train.jsonl]", f"task.val_files=[{tmp_path}/val.jsonl]", "sft.steps=0"]
    given = ["task=jsonl", *files, "curriculum.easy=0.2", "curriculum.hard=0.2", "reward.success_at=30"]
    unbroken = ran(tmp_path / "unbroken", *given)
    skipped = [row["rollout/skipped"] for row in rows(unbroken) if row["stage"] == "reinforcement learning"]
    assert sum(skipped) > sum(skipped[:3]) > 0, "nothing is skipped: the test is too easy"
    killed(tmp_path / "run", given, trainer, "update", 4)
    same(ran(tmp_path / "run", *given, "resume=true"), unbroken)


def test_groups_ahead_of_the_trainer_are_trained_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them were quick: a run that is killed four times trains no task twice and skips none."""
    trained: list[str] = []
    update, one = trainer.update, RolloutRunner.run_group

    async def noted(run: Any, updater: Any, groups: list[Group], step: int, *rest: Any) -> Any:
        result = await update(run, updater, groups, step, *rest)
        by_step[step] = [group.task.id for group in groups]  # the last time that it is trained is what counts
        return result

    async def slow(self: RolloutRunner, task: Task, *rest: Any) -> Group:
        if self.scope.startswith("train"):
            await asyncio.sleep(0.2 * (int(task.id.rpartition("/")[2]) % 3 == 0))
        return await one(self, task, *rest)

    by_step: dict[int, list[str]] = {}
    monkeypatch.setattr(trainer, "update", noted)
    monkeypatch.setattr(RolloutRunner, "run_group", slow)
    words = ["sft.steps=0", "rollout.max_staleness=2", "trainer.steps=10", "eval.every_steps=0"]
    killed(tmp_path, words, trainer, "describe_step", 5)
    for at in (1, 4, 3):
        killed(tmp_path, [*words, "resume=true"], trainer, "describe_step", at)
    ran(tmp_path, *words, "resume=true")
    trained = [task for step in range(1, 11) for task in by_step[step]]
    assert len(trained) == 20
    assert set(Counter(trained).values()) == {1}
    numbers = sorted(int(task.rpartition("/")[2]) for task in trained)
    assert len(set(range(20)) - set(numbers)) <= 4, "what is missing was still running at the end"


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_was_trained_after_the_checkpoint_comes_again_from_the_journal(staleness: int, tmp_path: Path) -> None:
    """Killed after step 5, saved after step 3: the same updates to the last digit, and no turn sampled twice."""
    words = [f"rollout.max_staleness={staleness}", "resume_mode=continue", "eval.every_steps=0", "trainer.steps=8"]
    words += ["sft.steps=0", "checkpoint.every_steps=3"]
    killed(tmp_path, words, Stream, "batch", 6)
    before = rows(tmp_path)
    ran(tmp_path, *words, "resume=true")
    after = {row["step"]: row for row in rows(tmp_path) if row["stage"] == "reinforcement learning"}
    assert sorted(after) == list(range(1, 9))
    for row in before[-5:]:
        learned = {name: value for name, value in row.items() if name.startswith(("policy/", "reward/"))}
        assert learned.items() <= after[row["step"]].items()
    assert "2 steps are trained again with the groups they had" in (tmp_path / "notes.txt").read_text()
    events = [event for path in sorted((tmp_path / "journal").iterdir()) for event in journal.read(path)]
    turns = Counter((e["scope"], e["task"], e["sample"], e["turn"]) for e in events if "turn" in e)
    assert len(turns) > 8 and set(turns.values()) == {1}
    assert min(path.name for path in (tmp_path / "journal").iterdir()) == f"step_{3 - staleness:06d}.jsonl.gz"


@pytest.mark.parametrize("words", [["resume_mode=exact"], ["optimizer.lr=2e-3"]])
def test_the_journal_is_left_aside_where_it_would_not_lead_to_the_same(words: list[str], tmp_path: Path) -> None:
    given = ["rollout.max_staleness=2", "eval.every_steps=0", "trainer.steps=8", "sft.steps=0"]
    record = tmp_path / ".hydra"
    record.mkdir()
    (record / "config.yaml").write_text("optimizer: {lr: 1.0e-3}\n")
    killed(tmp_path, given, Stream, "batch", 6)
    if "optimizer" in words[0]:
        (record / "config.yaml").write_text("optimizer: {lr: 2.0e-3}\n")
    ran(tmp_path, *given, *words, "resume=true")
    assert "are trained again" not in (tmp_path / "notes.txt").read_text()
    assert min(path.name for path in (tmp_path / "journal").iterdir()) >= "step_000002"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_with_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, resident, begin = Path("/proc/self/status"), dict[int, int](), journal.Journal.begin
    if not status.exists():
        pytest.skip("resident memory is read from /proc")

    def looked(self: journal.Journal, version: int) -> None:
        lines = dict(line.split(":") for line in status.read_text().splitlines())
        resident[version] = int(lines["VmRSS"].split()[0])  # KiB
        begin(self, version)

    monkeypatch.setattr(journal.Journal, "begin", looked)
    words = ["trainer.steps=3001", "trainer.idle_steps=0", "sft.steps=0", "eval.every_steps=0"]
    ran(tmp_path, *words, "checkpoint.every_steps=100")
    # After 1,400 steps the policy says as much as it may; before, conversations grow with what it learns.
    print(f"resident memory after 1,500 steps {resident[1500]} KiB, after 3,000 {resident[3000]} KiB")
    assert resident[3000] - resident[1500] < 15 * 1024, "10 KiB a step"


# --- endings


@pytest.mark.parametrize(
    ("owner", "name", "at", "error", "last"),
    [
        (Optimizer, "step", 3, RuntimeError, 0),  # in the warm start
        (Stream, "batch", 4, EngineError, 3),
        (Policy, "judge", 2, MemoryError, 0),
        (Optimizer, "step", 8, MemoryError, 3),
        (evaluation, "describe", 3, EngineError, 2),  # while the policy after step 2 is measured
        (Jsonl, "log", 8, OSError, 3),
        (trainer, "describe_step", 4, KeyboardInterrupt, 2),  # after the update, before its step is whole
    ],
)
def test_whatever_ends_a_run_the_last_whole_step_is_saved(
    owner: Any, name: str, at: int, error: type[BaseException], last: int, tmp_path: Path, unbroken: Path
) -> None:
    def fail() -> None:
        raise error("the world ends")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patched(owner, name, at, fail, patch)
        ran(tmp_path)
    saved = find_newest(tmp_path, print)
    assert saved is not None and saved.step == last
    notes = (tmp_path / "notes.txt").read_text()
    assert f"To go on: the same command with resume=true hydra.run.dir={tmp_path}" in notes
    same(ran(tmp_path, "resume=true"), unbroken)


def _ended_run(folder: Path, point: str, at: int, asked: list[str]) -> None:
    """In a process of its own, whose output may be closed."""

    def end() -> None:
        if "output" in asked:
            reading, writing = os.pipe()
            os.close(reading)
            os.dup2(writing, 1)
        for name in asked:
            if name != "output":
                os.kill(os.getpid(), signal.Signals[name])

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as a terminal starts it
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    owner, name = POINTS[point]
    patched(owner, name, at, end, pytest.MonkeyPatch())
    ran(folder, "log=[console,jsonl]")


@pytest.mark.parametrize(
    ("point", "at", "asked", "last"),
    [
        ("updating", 3, ["SIGTERM"], 0),  # in the warm start
        ("sampling", 20, ["SIGHUP"], 0),
        ("updating", 7, ["SIGINT", "SIGINT"], 3),  # the update is finished
        ("measuring", 3, ["SIGINT"], 2),
        ("logging", 8, ["output"], 2),
    ],
)
def test_signals_and_a_closed_output_save_too(
    point: str, at: int, asked: list[str], last: int, tmp_path: Path, unbroken: Path
) -> None:
    process = ANEW.Process(target=_ended_run, args=(tmp_path, point, at, asked))
    process.start()
    process.join()
    assert process.exitcode == 1
    saved = find_newest(tmp_path, print)
    assert saved is not None and saved.step >= last
    assert "To go on: the same command with resume=true" in (tmp_path / "notes.txt").read_text()
    same(ran(tmp_path, "resume=true"), unbroken)


def test_a_final_evaluation_that_fails_leaves_a_summary(tmp_path: Path, unbroken: Path) -> None:
    tracked = f"log=[jsonl,{__file__}:Noted]"

    def fail() -> None:
        raise AllFailedError("the tool is gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AllFailedError):
        patched(trainer, "evaluate_fully", 2, fail, patch)
        ran(tmp_path, tracked)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train/steps"] == 5 and "eval/success/before" in summary and "eval/success/after" not in summary
    same(ran(tmp_path, tracked, "resume=true"), unbroken)
    assert (tmp_path / "noted.txt").read_text() == "0\n5\n"


def test_a_run_that_goes_on_beyond_its_end_and_dies_has_no_step_twice(tmp_path: Path, unbroken: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    further = ["resume=true", "trainer.steps=8"]
    killed(tmp_path / "run", further, Stream, "batch", 2)
    ran(tmp_path / "run", *further)
    steps = [row["step"] for row in rows(tmp_path / "run") if row["stage"] == "reinforcement learning"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_first_entropy_is_remembered(unbroken: Path) -> None:
    last = find_newest(unbroken, print)
    first = next(row for row in rows(unbroken) if row["stage"] == "reinforcement learning")
    assert last is not None and last.state["entropy"] == first["policy/entropy"]


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    def full(folder: Path, name: str, *groups: object) -> Path:
        if name == "untrained":
            raise OSError("no space left on device")
        return real(folder, name, *groups)

    real: Any = trainer.write_trajectories
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(trainer, "write_trajectories", full)
        patched(Optimizer, "step", 5, lambda: _raise(MemoryError), patch)
        ran(tmp_path)


def test_what_is_saved_elsewhere_is_not_said_to_be_here(tmp_path: Path, unbroken: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patched(trainer, "make_stream", 1, lambda: _raise(MemoryError), patch)
        ran(tmp_path, f"resume={unbroken / 'checkpoints' / 'step_000004'}")
    assert "To go on" not in (tmp_path / "notes.txt").read_text()


def test_the_warm_start_alone_goes_on(tmp_path: Path, unbroken: Path) -> None:
    def learned(folder: Path, *words: str) -> list[dict[str, Any]]:
        asyncio.run(run_sft(compose(parse([*SMALL, *words])).experiment, folder))
        return [digits(row) for row in rows(folder)]

    expected = learned(tmp_path / "unbroken")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patched(Optimizer, "step", 4, lambda: 1 / 0, patch)
        learned(tmp_path / "run")
    assert learned(tmp_path / "run", "resume=true") == expected
    again = compose(parse([*SMALL, "resume=true"])).experiment
    refuse_other_steps(again, tmp_path / "run", alone=True)
    refuse_other_steps(again, unbroken)
    with pytest.raises(ConfigError, match=r"run is the folder of a warm start: this needs .*resume=.*step_"):
        refuse_other_steps(again, tmp_path / "run")
    with pytest.raises(ConfigError, match="is the folder of a run that trains: this needs another"):
        refuse_other_steps(again, unbroken, alone=True)


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    def spoil(saver: Saver) -> Any:
        if saver._mark is not None and saver._mark.step == 3:
            next(iter(saver._run.trainer.rank.model.parameters())).data.view(-1)[0] = math.nan
        return real(saver)

    real = Saver.save_last
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError):
        patched(Stream, "batch", 4, lambda: _raise(EngineError("broken")), patch)
        patch.setattr(Saver, "save_last", spoil)
        ran(tmp_path)
    saved = find_newest(tmp_path, print)
    assert saved is not None and saved.step == 2
    assert "is not finite: not saved" in (tmp_path / "notes.txt").read_text()


def test_after_a_checkpoint_that_could_not_be_written_the_last_whole_step_is(tmp_path: Path) -> None:
    def full_once(folder: Path, step: int, *rest: Any) -> Path:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, step, *rest)

    real = checkpoint.write
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint, "write", full_once)
        ran(tmp_path)
    saved = find_newest(tmp_path, print)
    assert saved is not None and saved.step == 4


def _raise(error: type[BaseException] | BaseException) -> None:
    raise error


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path, unbroken: Path) -> None:
    ran(tmp_path)
    (tmp_path / "checkpoints" / "step_000005" / "model.safetensors").write_bytes(b"")
    same(ran(tmp_path, "resume=true"), unbroken)
    notes = (tmp_path / "notes.txt").read_text()
    assert "step_000005/model.safetensors: it has 0 bytes instead of" in notes
    assert "; it is now damaged_step_000005, and the one before it is taken" in notes
    assert "another checkpoint" not in notes
    for path in (tmp_path / "checkpoints").glob("step_*"):
        (path / "state.json").write_bytes(b"{}")
    recorded = (tmp_path / "metrics.jsonl").read_bytes()
    for refused in (looked_at, ran, ran, looked_at):  # a dry run says what a start does, whichever it is
        with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
            refused(tmp_path, "resume=true")
    assert (tmp_path / "metrics.jsonl").read_bytes() == recorded


def looked_at(folder: Path, *words: str) -> None:
    """Check, as a dry run does, a run that goes on in `folder`."""
    check(compose(parse([*SMALL, *words])).experiment, folder=folder)


def test_a_penalty_without_its_reference_is_refused(tmp_path: Path) -> None:
    ran(tmp_path, "trainer.steps=1", "sft.steps=0")
    words = ["trainer.steps=2", "sft.steps=0", "resume=true"]
    for refused in (ran, looked_at):
        with pytest.raises(ConfigError, match=r"kl\.coef was 0, so the reference was not kept"):
            refused(tmp_path, *words, "kl.coef=0.1")
    looked_at(tmp_path, *words)


def test_a_penalty_goes_on_with_its_reference(tmp_path: Path) -> None:
    ran(tmp_path, "trainer.steps=1", "sft.steps=0", "kl.coef=0.1")
    words = ["trainer.steps=2", "sft.steps=0", "kl.coef=0.1", "resume=true"]
    looked_at(tmp_path, *words)
    assert ran(tmp_path, *words)


def test_an_optimizer_of_other_weights_or_kind_is_refused(tmp_path: Path) -> None:
    (record := tmp_path / ".hydra").mkdir()
    (record / "config.yaml").write_text("optimizer: {kind: adamw}\nsft: {optimizer: {kind: adamw}}\n")
    words = ["sft.steps=2", "trainer.steps=1", "sft.optimizer.kind=adamw"]
    ran(tmp_path, *words, "checkpoint.every_steps=1")
    newest = tmp_path / "checkpoints/step_000001"
    looked_at(tmp_path, *words, "resume=true", "sft.optimizer.kind=muon")  # the warm start is behind it
    warm = tmp_path / "warm"
    (warm / ".hydra").mkdir(parents=True)
    (warm / ".hydra/config.yaml").write_text("sft: {optimizer: {kind: adamw}}\n")
    asyncio.run(run_sft(compose(parse([*SMALL, *words])).experiment, warm))
    on = [f"resume={warm}/checkpoints/step_000002", "sft.optimizer.kind=muon"]
    looked_at(tmp_path, *on, "sft.steps=2")  # its end is a beginning
    assert "no step is left" not in described("train", compose(parse([*SMALL, *words, *on[:1]])), None)
    saver: Any = object.__new__(Saver)
    saver._run = SimpleNamespace(resumed=read_checkpoint(warm / "checkpoints/step_000002"))
    saver.path = saver._run.resumed.path
    assert saver.step == 0
    with pytest.raises(ConfigError, match=r"sft\.optimizer\.kind was adamw"):
        looked_at(tmp_path, *on, "sft.steps=4")
    for why, other in {
        "optimizer.kind was adamw": ["optimizer.kind=muon"],
        "model.value_head was false": ["algorithm=ppo", "advantage=gae", "model.value_head=true"],
        "all weights were trained, not adapters": [f"model.name={newest}", "model.lora.rank=4"],
    }.items():
        for resume in ("resume=true", f"resume={newest}"):
            with pytest.raises(ConfigError, match=f"step_000001: {why}.*or begin anew with model.name=.*step_000001"):
                looked_at(tmp_path, *words, resume, *other)


def test_other_settings_are_told(tmp_path: Path) -> None:
    record = tmp_path / ".hydra"
    record.mkdir()
    (record / "config.yaml").write_text("optimizer: {lr: 1.0e-3}\nresume: ''\nseed: 0\ntask: {min_steps: 2}\n")
    ran(tmp_path, "trainer.steps=1", "sft.steps=0")
    (record / "config.yaml").write_text("optimizer: {lr: 2.0e-3}\nresume: 'true'\nseed: 0\ntask: {min_steps: 2}\n")
    ran(tmp_path, "trainer.steps=2", "sft.steps=0", "resume=true", "optimizer.lr=4e-3")
    assert "is no measure of the new" not in (tmp_path / "notes.txt").read_text()
    steps = [row for row in rows(tmp_path) if row["stage"] == "reinforcement learning"]
    assert [row["policy/lr"] for row in steps] == pytest.approx([1e-3 / 3, 4e-3 * 2 / 3])  # of a warm-up of three
    assert "with other settings than before: optimizer.lr=0.002 (was 0.001)\n" in (tmp_path / "notes.txt").read_text()
    (record / "config.yaml").write_text("optimizer: {lr: 2.0e-3}\nresume: 'true'\nseed: 0\ntask: {min_steps: 1}\n")
    ran(tmp_path, "trainer.steps=3", "sft.steps=0", "resume=true", "task.min_steps=1")
    assert "is no measure of the new: task.min_steps\n" in (tmp_path / "notes.txt").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval/other_before"] == 1 and "\nno comparison: " in what_was_learned(summary, 1, lr=1e-3)
    (record / "config.yaml").write_text("model: {name: another}\n")
    ran(tmp_path, "trainer.steps=4", "sft.steps=0", "resume=true")
    assert "model.name has no effect where a run goes on" not in (tmp_path / "notes.txt").read_text()  # it was not set
    (record / "config.yaml").write_text("model: {name: a third}\n")
    ran(tmp_path, "trainer.steps=5", "sft.steps=0", "resume=true")
    assert "model.name has no effect where a run goes on: its weights are" in (tmp_path / "notes.txt").read_text()
    saved = read_checkpoint(tmp_path / "checkpoints/step_000005").state["settings"]
    assert saved["model.name"] == "another"  # whose weights they are, as an export's card says


def test_a_finished_run_that_is_measured_otherwise_is_measured_anew(tmp_path: Path) -> None:
    record, summary = tmp_path / ".hydra/config.yaml", tmp_path / "summary.json"
    record.parent.mkdir()
    for min_steps, anew in ((2, True), (2, False), (1, True)):
        record.write_text(f"resume: ''\ntask: {{min_steps: {min_steps}}}\n")
        ran(tmp_path, "trainer.steps=1", "sft.steps=0", "resume=true", f"task.min_steps={min_steps}")
        held = json.loads(summary.read_text())
        assert (held["eval/success/after"] != 9.0) == anew
        summary.write_text(json.dumps(held | {"eval/success/after": 9.0}))


def test_a_reward_that_was_edited_meanwhile_is_told(tmp_path: Path) -> None:
    """In a process of its own, as the file is read once per process."""
    own, record = tmp_path / "own.py", tmp_path / "run/.hydra/config.yaml"
    source = f"from {Path(__file__).stem} import Tokens\n\n\nclass Mine(Tokens):\n    pass\n"
    record.parent.mkdir(parents=True)
    (record.parent / "hydra.yaml").write_text(f"hydra: {{runtime: {{choices: {{reward: '{own}:Mine'}}}}}}\n")
    record.write_text("seed: 0\nreward: {success_at: 1}\n")
    words = ["sft.steps=0", f"reward={own}:Mine"]
    for steps, comment in enumerate(["", "", "# another\n"], 1):
        own.write_text(source + comment)
        process = ANEW.Process(target=ran, args=(tmp_path / "run", f"trainer.steps={steps}", *words, "resume=true"))
        process.start()
        process.join()
        notes = (tmp_path / "run/notes.txt").read_text()
        assert process.exitcode == 0 and ("with other settings than before: " in notes) == bool(comment)
    digests = [
        f"sha256:{hashlib.sha256((source + comment).encode()).hexdigest()[:12]}" for comment in ("# another\n", "")
    ]
    assert "other settings than before: {}={} (was {})\n".format(own, *digests) in notes
    assert f"is no measure of the new: {own}\n" in notes  # which the reward is part of, unlike an algorithm


def test_a_file_that_only_one_of_them_has_used_is_no_difference() -> None:
    before = {"reward": "/a/own.py:R", "/a/own.py": "sha256:1", "/b/own.py": "sha256:2"}
    now = {"reward": "/c/own.py:R", "/c/own.py": "sha256:1", "/b/own.py": "sha256:3"}
    assert differences(before, now) == ["reward=/c/own.py:R (was /a/own.py:R)", "/b/own.py=sha256:3 (was sha256:2)"]


def test_files_that_lie_elsewhere_are_known_by_the_ends_of_their_paths() -> None:
    before = {"/a/train/rows.jsonl": "sha256:1", "/a/held/rows.jsonl": "sha256:2", "/a/own.py": "sha256:3"}
    moved = {name.replace("/a/", "/b/"): digest for name, digest in before.items()}
    assert differences(before, moved) == []
    other = moved | {"/b/held/rows.jsonl": "sha256:4"}
    assert differences(before, other) == ["/b/held/rows.jsonl=sha256:4 (was sha256:2)"]
    assert differences(before, {"/b/rows.jsonl": "sha256:2", "/b/new.py": "sha256:5"}) == []
    assert differences({"/a/own.py": "sha256:1"}, {"/b/own.py": "sha256:2", "/b/new.py": "sha256:3"}) == [
        "/b/own.py=sha256:2 (was sha256:1)"
    ]


def test_data_that_was_edited_meanwhile_is_told(tmp_path: Path) -> None:
    """Success before is no measure of the new where the held-out rows were edited, and none where others were."""
    for name in ("rows.jsonl", "held_out.jsonl", "shown.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1?", "answer": "1"}\n')
    held_out = str(tmp_path / "held_out.jsonl")
    apart = {"task.path": str(tmp_path / "rows.jsonl"), "task.val_files": f'["{held_out}"]'}

    def now(source: Rows) -> dict[str, str]:
        for split in Split:
            source.stream(split, 0)
        return {**apart, **extension.digests}

    source = Rows(path=apart["task.path"], val_files=[held_out])
    before = {"settings": now(source), "summary": {"eval/success/before": 0.1}}
    for name, measures in (("rows.jsonl", False), ("held_out.jsonl", True)):
        begun = Checkpoint(tmp_path, 1, before, {}, False)
        assert told_of(begun, now(source)) == []
        (tmp_path / name).write_text('{"prompt": "1?", "answer": "2"}\n')
        settings = now(source)
        told = told_of(begun, settings)
        assert told[0].startswith(f"with other settings than before: {tmp_path / name}=sha256:")
        assert told[1:] == [f"{NO_MEASURE}: {tmp_path / name}"] * measures
        before["settings"] = settings


def test_an_evaluation_says_which_files_are_others_than_in_training(tmp_path: Path) -> None:
    double = 'def double(number: int) -> int:\n    """Twice a number."""\n    return 2 * number\n'
    (tmp_path / "own.py").write_text(double)
    words = ("sft.steps=0", "trainer.steps=1", f"environment.tools=[{tmp_path}/own.py:double]")
    ran(tmp_path / "run", *words)
    model = f"model.name={tmp_path}/run/checkpoints/step_000001"
    assert not any("own.py" in note for note in check(compose(parse([*SMALL, *words, model])).experiment, trains=False))
    (tmp_path / "own.py").write_text(double.replace("2 *", "3 *"))
    extension.digest(str(tmp_path / "own.py"))  # as a process of its own would find it
    (told,) = check(compose(parse([*SMALL, *words, model])).experiment, trains=False)
    assert told.startswith(f"other files than the checkpoint was trained with: {tmp_path}/own.py=sha256:")


@pytest.mark.parametrize(("name", "same"), [("Mine", True), ("OldName", True), ("Other", False)])
def test_a_run_goes_on_with_its_own_task_whatever_it_is_called(name: str, same: bool, tmp_path: Path) -> None:
    own = "from mtgrpo.tasks.one_step import OneStep as Mine\nfrom mtgrpo.tasks.wiki_years import WikiYears as Other\n"
    (tmp_path / "own.py").write_text(own)
    source = compose(parse([f"task={tmp_path}/own.py:Mine"])).experiment.task
    tasks = source.stream(Split.train, 0)
    state = {"settings": {"task": f"{tmp_path}/own.py:{name}"}, "stream": {"tasks": tasks.state_dict()}}
    refused = pytest.raises(ConfigError, match=r"own\.py:Other, and would go on with OneStep: type the words")
    with nullcontext() if same else refused:
        checks._refuse_other_data(source, tasks, Checkpoint(tmp_path, 1, state, {}, False))


def test_a_checkpoint_that_names_a_file_has_it_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\n")
    source = preset("calculator").task
    tasks = source.stream(Split.train, 0)
    state = {"settings": {"task": f"{tmp_path}/evil.py:Own"}, "stream": {"tasks": tasks.state_dict()}}
    with pytest.raises(ConfigError, match=r"evil\.py:Own, and would go on with"):
        checks._refuse_other_data(source, tasks, Checkpoint(tmp_path, 1, state, {}, False))


def test_a_resume_that_is_refused_is_not_told_to_be_tried_again(tmp_path: Path) -> None:
    ran(tmp_path, "trainer.steps=1", "sft.steps=0")
    with pytest.raises(ConfigError, match="the data had endless problems when the state was saved and has "):
        ran(tmp_path, "trainer.steps=2", "sft.steps=0", "resume=true", "task=wiki_years")
    assert "To go on" not in (tmp_path / "notes.txt").read_text()


def test_a_warm_start_does_not_go_on_with_other_demonstrations(tmp_path: Path) -> None:
    for name, count in (("some", 4), ("more", 5)):
        said = (
            {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": f"#### {n}"}]}
            for n in range(count)
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    words = [f"sft.demonstrations={tmp_path}/some.jsonl", "sft.steps=2", "trainer.steps=1"]
    asyncio.run(run_sft(compose(parse([*SMALL, *words])).experiment, tmp_path / "run"))

    def checked(*others: str) -> list[str]:
        resume = f"resume={tmp_path}/run/checkpoints/step_000002"
        return check(compose(parse([*SMALL, *words, *others, resume])).experiment)

    more = f"sft.demonstrations={tmp_path}/more.jsonl"
    with pytest.raises(ConfigError, match=r"had 4 rows .* 5 rows now.*: sft\.steps=2 ends it there"):
        checked(more, "sft.steps=3")
    checked(more)
    checked("sft.steps=3")
