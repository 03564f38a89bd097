"""Rollouts ahead of the trainer: nothing too old, nothing thrown away, nobody starved; failures and interruptions."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.condensers.none import Whole
from mtgrpo.config.compose import compose, parse
from mtgrpo.engines import Key
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.engines.local.kv_cache import KVCache
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError, EngineError, RunError
from mtgrpo.model import tiny
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.step import Policy
from mtgrpo.record.curve import Curve
from mtgrpo.rewards import Reward
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import RolloutSettings
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.stages import trainer
from mtgrpo.stages.metrics import describe_staleness
from mtgrpo.stages.run import Run
from mtgrpo.stages.trainer import train
from mtgrpo.tasks import IndexedStream
from mtgrpo.types import Completion, Group, Limits, Message, Sampling, Status, Task, Trajectory
from mtgrpo.weights.source import ModelWeights
from scripted import ScriptedEngine

T = TypeVar("T")
CHI_SQUARE_49 = 74.9  # 99th percentile with 49 degrees of freedom
SMALL = [
    *("sft.steps=0", "rollout.prompts_per_step=2", "rollout.group_size=2", "sampling.max_new_tokens=12"),
    *("model.name=tiny", "eval.tasks=2", "eval.samples=2", "eval.every_steps=0", "log=[jsonl]"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        own = cast(Any, self)
        if not own._ready and own._scheduled:
            self._now = max(self._now, own._scheduled[0].when())
        own.__class__.__mro__[1]._run_once(self)


def in_jumping_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


# --- the stream, with groups that only take time


class Napper:
    """In the place of a runner: a group of task t takes `seconds[t]`."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.open = 0
        self.most = 0

    def at(self, scope: str) -> Napper:
        return self

    async def run_group(self, task: Task, size: int, extra: int) -> Group:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.seconds[int(task.id)])
            return Group(task, [Trajectory(task)])
        finally:
            self.open -= 1


def napping(seconds: Sequence[float], batch: int, staleness: int, ahead: float = 2.0) -> tuple[Stream, Napper]:
    napper = Napper(seconds)
    tasks = IndexedStream(len(seconds), lambda index: Task(str(index), ()), seed=0)
    settings = RolloutSettings(prompts_per_step=batch, max_staleness=staleness, ahead=ahead)
    return Stream(cast(RolloutRunner, napper), tasks, settings), napper


async def trained(stream: Stream, steps: int, training_s: float = 1.0) -> list[RolloutBatch]:
    batches: list[RolloutBatch] = []
    for version in range(steps):
        batches.append(await stream.batch(version))
        await asyncio.sleep(training_s)
    await stream.close()
    return batches


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=30), st.integers(1, 5), st.integers(0, 4), st.floats(1.01, 4))
@settings(max_examples=60, deadline=None)
def test_staleness_bound(seconds: list[float], batch: int, staleness: int, ahead: float) -> None:
    stream, napper = napping(seconds, batch, staleness, ahead)
    batches = in_jumping_time(trained(stream, 12))
    for version, played in enumerate(batches):
        assert len(played.groups) == batch
        assert all(0 <= version - admitted <= staleness for admitted in played.admitted)
        assert describe_staleness(played, version)["rollout/staleness_max"] == version - min(played.admitted)
        assert played.admitted == sorted(played.admitted)
    assert napper.most <= (staleness + 1) * batch  # no more is ever open than may be trained in time
    assert napper.open == 0


@given(st.lists(st.floats(0.01, 50), min_size=8, max_size=8), st.integers(1, 4), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_every_admitted_group_is_trained_once_and_in_time(seconds: list[float], batch: int, staleness: int) -> None:
    stream, _ = napping(seconds, batch, staleness)
    batches = in_jumping_time(trained(stream, 16))
    handed_out = Counter(group.task.id for played in batches for group in played.groups)
    tasks = IndexedStream(8, lambda index: Task(str(index), ()), seed=0)
    admitted = [next(tasks).id for _ in range((16 + staleness) * batch)]
    assert handed_out <= Counter(admitted)
    assert handed_out >= Counter(admitted[: (16 - staleness) * batch])  # all that was due
    if not staleness:
        assert [group.task.id for played in batches for group in played.groups] == admitted


def chi_square(counts: Iterable[int]) -> float:
    """Of the hypothesis that all are equally frequent."""
    values = list(counts)
    expected = statistics.mean(values)
    return sum((value - expected) ** 2 / expected for value in values)


SLOW = [20.0 if task < 5 else 1.0 for task in range(50)]  # a tenth of the tasks takes twenty times as long


def test_no_task_starved() -> None:
    stream, _ = napping(SLOW, 10, 2)
    batches = in_jumping_time(trained(stream, 200))
    counts = Counter(int(group.task.id) for played in batches for group in played.groups)
    assert chi_square(counts[task] for task in range(50)) < CHI_SQUARE_49
    assert min(counts[task] for task in range(5)) >= 38  # of 40


def test_discarding_rule_is_biased() -> None:
    """What others do: play as much as there is room for, train what comes first, throw away what is too old."""
    tasks = IndexedStream(50, lambda index: Task(str(index), ()), seed=0)
    counts, now, version, batch, staleness = Counter[int](), 0.0, 0, 10, 2
    playing: list[tuple[float, int, int]] = []  # (finished at, task, version when it was started)
    ready: list[int] = []
    while version < 200:
        while len(playing) < (staleness + 1) * batch:
            task = int(next(tasks).id)
            heapq.heappush(
                playing, (now + SLOW[task] * random.Random(f"{now}/{task}").uniform(0.9, 1.1), task, version)
            )
        now, task, started = heapq.heappop(playing)
        if version - started <= staleness:
            ready.append(task)
        if len(ready) >= batch:
            counts.update(ready[:batch])
            ready, version = ready[batch:], version + 1
    assert chi_square(counts[task] for task in range(50)) > CHI_SQUARE_49
    assert max(counts[task] for task in range(5)) < 0.5 * statistics.mean(counts[task] for task in range(5, 50))


def test_a_pass_over_the_tasks_ends_with_its_slowest() -> None:
    """The last task of the pass takes longest; the run must not end before it is trained."""

    async def run() -> list[str]:
        tasks = IndexedStream(8, lambda index: Task(str(index), ()), seed=0)
        last = [next(tasks).id for _ in range(8)][-1]
        stream, _ = napping([100.0 if str(task) == last else 1.0 for task in range(8)], 4, 3)
        trained: list[str] = []
        for version in range(10):
            trained += [group.task.id for group in (await stream.batch(version)).groups]
            if stream.epoch:
                break
        await stream.close()
        assert last in trained
        return trained

    assert len(set(in_jumping_time(run()))) == 8


def test_the_trainer_does_not_wait_for_a_slow_task_that_is_not_due() -> None:
    async def clock(staleness: int) -> float:
        stream, _ = napping([20.0 if task == 0 else 1.0 for task in range(40)], 4, staleness)
        await trained(stream, 10)
        return asyncio.get_running_loop().time()

    waiting, beside = in_jumping_time(clock(0)), in_jumping_time(clock(4))
    assert waiting >= 10 + 10 + 18
    assert beside <= waiting - 12


def test_a_stream_of_tasks_that_ends_is_refused() -> None:
    tasks = IndexedStream(3, lambda index: Task(str(index), ()), seed=0, repeat=False)
    stream = Stream(cast(Any, Napper([0.0] * 3)), tasks, RolloutSettings(prompts_per_step=2))

    async def batches() -> None:
        await stream.batch(0)
        await stream.batch(1)

    with pytest.raises(ConfigError, match="the stream of training tasks has ended"):
        in_jumping_time(batches())


def test_what_goes_wrong_in_a_group_is_raised_at_once() -> None:
    class Broken(Napper):
        async def run_group(self, task: Task, size: int, extra: int) -> Group:
            if task.id == "1":
                raise ConfigError("the reward is not finite")
            return await super().run_group(task, size, extra)

    async def run() -> float:
        stream, _ = napping([100.0, 100.0], 2, 0)
        stream._runner = cast(RolloutRunner, Broken([100.0, 100.0]))
        with pytest.raises(ConfigError, match="not finite"):
            await stream.batch(0)
        await stream.close()
        return asyncio.get_running_loop().time()

    assert in_jumping_time(run()) < 100


# --- conversations


@dataclass
class Errand(Environment):
    """One tool call, which takes a time of its own for each conversation, then the end."""

    hangs: int = 0  # so many conversations wait for ever

    async def start(self, task: Task) -> Opening:
        self.turn = 0
        return Opening((Message("user", task.id),))

    async def step(self, message: Message) -> Reply:
        self.turn += 1
        if self.turn == 2:
            return Reply(done=True)
        number = started()
        if number < self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(nap_s(number))
        return Reply((Message("tool", "here you are"),))


counts: Counter[str] = Counter()


def started() -> int:
    """How many tools were called before this one."""
    counts.update(["calls"])
    return counts["calls"] - 1


def nap_s(number: int) -> float:
    """Log-normal, median 0.2 s, tail to 3 s."""
    return min(3.0, 0.2 * random.Random(number).lognormvariate(0, 1))


@dataclass
class Spoken(Reward):
    def reward(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.turns))


def runner(engine: Any, environment: Environment, **changed: Any) -> RolloutRunner:
    counts.clear()
    named: dict[str, Any] = {
        "environment": environment,
        "chat": open_chat(tiny.load_tokenizer(), ChatSettings()),
        "reward": Spoken(),
        "sampling": Sampling(max_new_tokens=20),
        "limits": Limits(4096, 4096, 4096),
        "condenser": Whole(),
        "retries": 0,
        "timeout_s": 0.0,
        "open_conversation": lambda scope, task, sample_index: engine.conversation(Key(5, scope, task, sample_index)),
        "attend": None,
        "slots": asyncio.Semaphore(1000),
    }
    return RolloutRunner(**named | changed)


def speaker(fails: Any = lambda key, turn: False) -> ScriptedEngine:
    stop = tiny.load_tokenizer().eos_token_id

    def script(key: Key, turn: int) -> list[int]:
        if fails(key, turn):
            raise EngineError("the card fell off the bus")
        return [100 + turn, stop]

    return ScriptedEngine(script)


def test_tools_overlap() -> None:
    """64 conversations end with the slowest of them, not one after the other nor turn by turn."""

    async def run() -> tuple[Group, float]:
        group = await runner(speaker(), Errand()).run_group(Task("t", ()), 64)
        return group, asyncio.get_running_loop().time()

    group, took = in_jumping_time(run())
    assert took == pytest.approx(max(nap_s(number) for number in range(64)))
    assert all(trajectory.status is Status.COMPLETED for trajectory in group.trajectories)


def test_a_hung_tool_is_found_by_its_deadline_and_retried() -> None:
    async def run() -> Group:
        return await runner(speaker(), Errand(hangs=3), timeout_s=60.0, retries=1).run_group(Task("t", ()), 8)

    group = in_jumping_time(run())
    assert [t.status for t in group.trajectories] == [Status.COMPLETED] * 8
    assert sum(t.attempts == 2 for t in group.trajectories) == 3


def test_what_hangs_for_good_has_failed_and_says_why() -> None:
    async def run() -> Group:
        return await runner(speaker(), Errand(hangs=100), timeout_s=60.0, retries=1).run_group(Task("t", ()), 3)

    for trajectory in in_jumping_time(run()).trajectories:
        assert (trajectory.status, trajectory.reward, trajectory.attempts) == (Status.FAILED, 0.0, 2)
        assert trajectory.reason == "TimeoutError: it took longer than rollout.timeout_s=60.0"


def test_an_engine_that_breaks_now_and_then_costs_conversations_not_the_run() -> None:
    engine = speaker(lambda key, turn: key.sample_index == 1 and key.scope.endswith("attempt0"))

    async def run(engine: ScriptedEngine, retries: int) -> list[Group]:
        tasks = IndexedStream(None, lambda index: Task(str(index), ()), seed=0)
        stream = Stream(
            runner(engine, Errand(), retries=retries), tasks, RolloutSettings(group_size=3, prompts_per_step=2)
        )
        return (await stream.batch(0)).groups

    retried = in_jumping_time(run(engine, 1))
    assert [[t.attempts for t in g.trajectories] for g in retried] == [[1, 2, 1]] * 2
    left_out = in_jumping_time(run(engine, 0))
    assert [[t.status is Status.FAILED for t in g.trajectories] for g in left_out] == [[False, True, False]] * 2
    with pytest.raises(RunError, match=r"6 of the 6 .*\.max_failed=0\.5 allows; 6 .* EngineError: the card fell off"):
        in_jumping_time(run(speaker(lambda key, turn: True), 1))


def test_extra_siblings_train_the_quick_ones() -> None:
    """Which is why they are off by default: what takes long is trained less often than it is sampled."""

    @dataclass
    class Uneven(Errand):
        async def step(self, message: Message) -> Reply:
            self.turn += 1
            if self.turn == 1:
                await asyncio.sleep(10.0 if started() % 4 == 0 else 1.0)
                return Reply((Message("tool", "here you are"),))
            return Reply(done=True)

    async def run(extra: int) -> tuple[list[Group], float]:
        tasks = IndexedStream(None, lambda index: Task(str(index), ()), seed=0)
        settings = RolloutSettings(group_size=6, prompts_per_step=4, extra_samples=extra)
        stream = Stream(runner(speaker(), Uneven()), tasks, settings)
        return (await stream.batch(0)).groups, asyncio.get_running_loop().time()

    (groups, took), (quick, took_less) = in_jumping_time(run(0)), in_jumping_time(run(2))
    assert [len(group.trajectories) for group in groups] == [len(group.trajectories) for group in quick] == [6] * 4
    assert took == pytest.approx(10)
    assert took_less == pytest.approx(1)  # nobody who was slow is among them: a quarter of all is, in what is sampled
    assert sorted({t.sample_index for group in quick for t in group.trajectories})[-1] >= 6


# --- training beside rollouts


OWN = '''
from mtgrpo.rewards import Reward

class First(Reward):
    """Conversations differ."""

    def reward(self, trajectory):
        return float(trajectory.turns[0].output[0] % 7)
'''


def run_small(folder: Path, *words: str) -> list[dict[str, Any]]:
    own = folder.parent / "own.py"
    own.write_text(OWN)
    asyncio.run(train(compose(parse([*SMALL, f"reward={own}:First", *words])).experiment, folder, Curve()))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == "reinforcement learning"]


def test_training_goes_on_beside_rollouts_within_the_bound(tmp_path: Path) -> None:
    rows = run_small(tmp_path / "run", "rollout.max_staleness=2", "trainer.steps=8", "kl.coef=0.01")
    assert len(rows) == 8
    assert all(row["rollout/staleness_max"] <= 2 for row in rows)
    assert all(0 <= row["rollout/token_staleness"] <= row["rollout/staleness_max"] for row in rows)
    assert rows[-1]["rollout/staleness_max"] >= 1
    shares = [row[f"perf/{name}_share"] for row in rows for name in ("queue", "decode", "tool")]
    assert sum(shares) == pytest.approx(len(rows))


PATIENT = '''
import asyncio
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.environments.single_turn import SingleTurn


@dataclass
class Patient(SingleTurn):
    """During training a held-out task waits until the fifth step has ended."""

    metrics: str = ""

    async def start(self, task):
        self.held_out = "/eval/" in task.id
        return await super().start(task)

    def steps(self):
        path = Path(self.metrics)
        return path.read_text().count("reinforcement") if path.exists() else 0

    async def step(self, message):
        async with asyncio.timeout(20):
            while self.held_out and 1 <= self.steps() < 5:
                await asyncio.sleep(0.01)
        return await super().step(message)
'''


def test_an_evaluation_does_not_hold_up_training_whose_rollouts_run_ahead(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(PATIENT)
    words = [f"environment={tmp_path}/patient.py:Patient", f"environment.metrics={tmp_path}/run/metrics.jsonl"]
    words += ["rollout.max_staleness=1", "rollout.max_concurrent=16", "rollout.retries=0"]
    rows = run_small(tmp_path / "run", *words, "trainer.steps=10", "eval.every_steps=2", "eval.tasks=4")
    first = next(row for row in rows if "eval/success" in row)
    assert first["step"] >= 5  # it began after the second
    assert 2 <= first["eval/staleness"] <= first["step"] - 2
    assert first["eval/failed"] == 0
    assert not any("eval/version" in row for row in rows)


def test_evaluations_beside_training_follow_one_another_and_the_best_policy_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = itertools.count()

    async def measured(run: Run) -> dict[str, float]:
        if (number := next(made)) == 0:  # of the first step: ends after others have been saved
            while not (tmp_path / "run" / "checkpoints" / "step_000004").exists():
                await asyncio.sleep(0.01)
        return {"eval/success": 1.0 if number == 0 else 0.0, "eval/version": 1.0}

    monkeypatch.setattr(trainer, "evaluate_during", measured)
    words = ["rollout.max_staleness=1", "trainer.steps=10", "eval.every_steps=1", "checkpoint.every_steps=1"]
    rows = run_small(tmp_path / "run", *words, "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    steps = [row["step"] for row in rows if "eval/success" in row]
    assert steps[0] >= 4 and steps == list(range(steps[0], steps[0] + len(steps))) and len(steps) >= 2
    kept = [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert kept == ["step_000001", "step_000010"]


@pytest.mark.parametrize("words", [[], ["kl.coef=0.01", "algorithm=gspo", "trainer.updates_per_batch=2"]])
def test_the_engine_has_its_turn_between_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """And after the last update of a batch never samples from the new weights in the name of the old."""
    events: list[str] = []
    engine_step, score, optimizer_step = LocalEngine._step, Policy.score, Optimizer.step
    seen: list[tuple[int, int]] = []  # in each step of the engine: the version it knows, and rollout batches learnt

    def sampled(self: LocalEngine) -> None:
        events.append("engine")
        seen.append((self.version, events.count("update") // per_batch))
        engine_step(self)

    def scored(self: Policy, *arguments: Any, **named: Any) -> Any:
        events.append("micro-batch")
        return score(self, *arguments, **named)

    def updated(self: Optimizer) -> float:
        events.append("update")
        return optimizer_step(self)

    per_batch = 2 if words else 1
    monkeypatch.setattr(LocalEngine, "_step", sampled)
    monkeypatch.setattr(Policy, "score", scored)
    monkeypatch.setattr(Optimizer, "step", updated)
    several = ["rollout.prompts_per_step=12", "rollout.group_size=3", "batch.token_budget=128"]  # micro-batches
    several.append("rollout.ahead=2")  # some groups have just begun when others are trained
    run_small(tmp_path / "run", "rollout.max_staleness=2", "trainer.steps=6", *several, *words)
    assert ["micro-batch", "engine", "micro-batch"] in [events[i : i + 3] for i in range(len(events))]
    assert {version for version, _ in seen} >= {0, 1, 2, 3}
    assert all(version == learnt for version, learnt in seen)


ELSEWHERE = """
from dataclasses import dataclass

from mtgrpo.engines import Engine
from scripted import ScriptedEngine

STARTED = []


@dataclass
class Elsewhere(Engine):
    def start(self, source, deterministic, longest_context, folder):
        stop = source.model.generation_config.eos_token_id[0]
        STARTED.append(ScriptedEngine(lambda key, turn: [100 + key.sample_index, stop]))
        return STARTED[-1]
"""


@pytest.mark.parametrize("staleness", [0, 1])
def test_training_beside_an_engine_with_weights_of_its_own_leaves_the_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    threads: set[str] = set()
    ticks = [0]
    during: list[int] = []  # ticks of the event loop while a micro-batch was computed
    score = Policy.score

    def slow(self: Policy, *arguments: Any, **named: Any) -> Any:
        threads.add(threading.current_thread().name)
        before = ticks[0]
        time.sleep(0.05)
        during.append(ticks[0] - before)
        return score(self, *arguments, **named)

    async def tick() -> None:
        while True:
            ticks[0] += 1
            await asyncio.sleep(0.002)

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        await train(made, tmp_path / "run", Curve())
        ticking.cancel()

    own = tmp_path / "own.py"
    own.write_text(OWN + ELSEWHERE)
    words = [*SMALL, f"reward={own}:First", f"engine={own}:Elsewhere", f"rollout.max_staleness={staleness}"]
    made = compose(parse([*words, "trainer.steps=2", "sft.steps=1"])).experiment
    monkeypatch.setattr(Policy, "score", slow)
    asyncio.run(run())
    assert len(during) >= 3 and min(during) > 3
    assert threading.current_thread().name not in threads
    (engine,) = sys.modules[type(made.engine).__module__].STARTED
    in_step = ["sleep", "load_weights {}", "wake"] if staleness == 0 else ["load_weights {}"]
    expected = [call.format(step) for step in (1, 2) for call in in_step]
    begun = ["load_weights 0", "load_weights 0"]  # at the start, and after the warm start
    assert [call for call in engine.calls if call != "close"] == [*begun, *expected]


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_engine_that_breaks_in_the_middle_costs_time_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    forward, calls = LocalEngine._sample, iter(range(10**9))

    def breaks(self: LocalEngine, *arguments: Any) -> None:
        if next(calls) % 40 == 30:
            raise OSError("the card fell off the bus")
        forward(self, *arguments)

    monkeypatch.setattr(LocalEngine, "_sample", breaks)
    words = ["trainer.steps=8", "rollout.prompts_per_step=4", "rollout.group_size=3", "trainer.deterministic=false"]
    rows = run_small(tmp_path / "run", f"rollout.max_staleness={staleness}", *words)
    assert len(rows) == 8
    assert sum(row["rollout/retried"] for row in rows) > 0
    for row in rows:  # what failed twice is left out, with its cause
        assert row["rollout/failed"] == pytest.approx(row.get("rollout/failed/EngineError", 0))


def test_stale_data_is_weighed_against_the_policy_that_sampled_it(tmp_path: Path) -> None:
    words = ["rollout.max_staleness=1", "trainer.steps=5", "optimizer.lr=0.01", "optimizer.schedule=constant"]
    rows = run_small(tmp_path / "run", *words)
    assert max(row["policy/mismatch/max_abs_dlogp"] for row in rows[1:]) > 1e-2  # the policy has moved since
    assert rows[0]["policy/mismatch/max_abs_dlogp"] < 1e-3
    assert rows[0]["policy/clip_fraction"] == 0 < max(row["policy/clip_fraction"] for row in rows[1:])


@pytest.mark.parametrize(
    "words",
    [
        ["rollout.max_staleness=1"],
        ["rollout.timeout_s=5"],
        ["rollout.score_timeout_s=5"],
        ["rollout.extra_samples=1"],
        ["sampling.timeout_s=5"],
    ],
)
def test_what_depends_on_speed_is_not_deterministic(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"makes results depend on the speed of the machine .*deterministic=false"):
        compose(parse([*words, "trainer.deterministic=true"]))
    assert compose(parse([*words, "trainer.deterministic=false"])).experiment.deterministic is False
    assert compose(parse([])).experiment.deterministic is True
    assert compose(parse(["rollout.max_staleness=1"])).experiment.deterministic is False


@pytest.mark.parametrize("keep", [False, True])
def test_what_an_update_does_to_what_is_stored(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed anew, or kept by who has it and not shared with others."""
    model = tiny.build_model(tiny.SHAPES["tiny"], 0).eval()
    engine = LocalEngine(ModelWeights(model), False, KVCache(model, 4096, 1024), 1024, keep)
    computed: list[int] = []
    forward = type(engine._forward).__call__

    def counted(self: Any, ids: Any, positions: Any, attend: Any) -> Any:
        computed.append(len(ids))
        return forward(self, ids, positions, attend)

    monkeypatch.setattr(type(engine._forward), "__call__", counted)
    prompt, sampling = list(range(100, 200)), Sampling(max_new_tokens=4)

    async def run() -> tuple[int, int, list[Completion]]:
        async with engine.conversation(Key(0, "a", "t", 0)) as first, engine.conversation(Key(0, "b", "t", 0)) as late:
            said = await first(prompt, sampling)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            await engine.load_weights(ModelWeights(model, 1))
            computed.clear()
            again = await first([*prompt, *said.tokens, 7, 8], sampling)
            of_first = sum(computed)
            computed.clear()
            other = await late(prompt, sampling)
            return of_first, sum(computed), [said, again, other]

    of_first, of_late, completions = asyncio.run(run())
    other = completions[-1]
    assert (of_first < 60) is keep
    assert (of_late > 99) is keep  # what another has computed with the new weights is shared, what is older is not
    plain = model(torch.tensor([[*prompt, *other.tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert other.logprobs == pytest.approx(
        plain.gather(-1, torch.tensor(other.tokens)[:, None])[:, 0].tolist(), abs=1e-4
    )
    assert [set(completion.versions) for completion in completions] == [{0}, {1}, {1}]


# What a shell starts in the background ignores Ctrl-C, and so would all that these tests start.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mtgrpo.cli import main
main()
"""


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_interrupted_run_saves_what_it_has(tmp_path: Path, staleness: int) -> None:
    folder = tmp_path / "run"
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = [*SMALL, f"rollout.max_staleness={staleness}", "trainer.steps=100000", f"hydra.run.dir={folder}"]
    words.append(f"reward={own}:First")
    with (tmp_path / "err").open("w") as errors:
        process = subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE, "train", *words], stderr=errors)
    metrics = folder / "metrics.jsonl"
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"reinforcement") < 3:
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    steps = metrics.read_bytes().count(b"reinforcement")
    saved = max((folder / "checkpoints").iterdir())
    assert saved.name == f"step_{steps:06d}"
    state = json.loads((saved / "state.json").read_text())
    updates = [json.loads(line).get("policy/updates", 0) for line in metrics.read_text().splitlines()]
    assert state["training"]["optimizer"]["steps"] == sum(updates) > 0
    assert len(list((folder / "trajectories").glob("step_*.jsonl"))) == steps
    assert f"interrupted; saved in {saved}. To go on" in (folder / "notes.txt").read_text()
    untrained = folder / "trajectories" / "untrained.jsonl"
    assert not untrained.exists() or untrained.stat().st_size  # groups that had finished, if any had
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("group_size", 0), ("ahead", math.nan), ("ahead", 1), ("max_failed", math.nan), ("max_failed", 2)],
        *[("timeout_s", math.nan), ("score_timeout_s", -1), ("max_staleness", -1)],
    ],
)
def test_rollout_settings_out_of_bounds_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be .* got {wrong}"):
        RolloutSettings(**{name: wrong})
