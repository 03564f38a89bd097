"""Groups with advantages for people with an engine of their own, and the profile of a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import mtgrpo
from mtgrpo import cli
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.policy import objective
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.policy.updater import PolicyUpdater
from mtgrpo.profile import PHASES, Profile, Profiler
from mtgrpo.rewards import Given, Reward
from mtgrpo.rewards.composed import Composed
from mtgrpo.stages.api import Scored
from mtgrpo.stages.policy_trainer import update_config
from mtgrpo.types import Completion, Finish, Message, Sample, Sampling, Status, Task, Trajectory
from mtgrpo.weights.checkpoint import ModelSnapshot, write
from scripted import ScriptedEngine
from test_conversation import CALL, chat, make_runner, said, tokenizer

TASKS = [Task(f"own/{number}", (Message("user", "What is 17 * 23?"),), answer="391") for number in range(3)]
WORDS = ["model.name=tiny", "rollout.group_size=4", "batch.token_budget=2048"]


@dataclass
class Called(Reward):
    """Whether the conversation calls a tool."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(bool(trajectory.turns[0].message.tool_calls))


OWN = Path(__file__)


class Own:
    """An engine: every second conversation is right, the others guess; counts how many calls are open at once."""

    def __init__(self, experiment: Experiment) -> None:
        opening = asyncio.run(experiment.environment.start(TASKS[0]))
        self._first = chat().open(opening.messages, opening.tools)
        self.opened = self.now = self.most = 0

    async def __call__(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        first = list(tokens) == self._first
        self.opened += first
        output = said("#### 391" if not first else CALL if self.opened % 2 else "#### 5")
        return Completion(output, [-0.5] * len(output), [0] * len(output), Finish.STOP)


def scored(*words: str, engine: Callable[[Experiment], Sample] = Own) -> list[Scored]:
    experiment = mtgrpo.preset("jsonl", *WORDS, *words)
    played = mtgrpo.rollout_with_advantages(
        TASKS, sample=engine(experiment), tokenizer=tokenizer(), experiment=experiment
    )
    return asyncio.run(played)


def test_every_turn_has_the_advantage_of_its_trajectory() -> None:
    found = scored()
    assert [one.group.task.id for one in found] == [task.id for task in TASKS]
    for one in found:
        assert sorted(t.reward for t in one.group.trajectories) == [0, 0, 1, 1]
        for trajectory, turns in zip(one.group.trajectories, one.advantages, strict=True):
            assert turns == pytest.approx([trajectory.reward - 0.5] * len(trajectory.turns))
            assert len(trajectory.turns) == (2 if trajectory.reward else 1)


@pytest.mark.parametrize(
    "given",
    [
        Completion([], [], [], Finish.STOP),
        Completion([10**9], [-1.0], [0], Finish.STOP),
        Completion([1, 2], [-1.0], [0, 0], Finish.STOP),
        "#### 391",
    ],
)
def test_a_completion_that_no_engine_gives_is_refused(given: Any) -> None:
    async def sample(tokens: Sequence[int], sampling: Sampling) -> Any:
        return given

    with pytest.raises(EngineError, match=r"sample gave .*give a Completion of one token or more, all below \d+.*line"):
        scored("rollout.retries=0", engine=lambda experiment: sample)


def test_the_tokenizer_may_be_the_name_of_its_model() -> None:
    experiment = mtgrpo.preset("jsonl", *WORDS)
    found = asyncio.run(
        mtgrpo.rollout_with_advantages(TASKS, sample=Own(experiment), tokenizer="tiny", experiment=experiment)
    )
    assert len(found) == len(TASKS)


async def test_a_run_from_python_is_refused_before_it_computes(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for experiment, refusal in (
        (
            mtgrpo.preset("calculator_from_scratch", "model.name=./away"),
            "model.name=./away cannot be loaded: there is no such folder",
        ),
        (mtgrpo.preset("calculator_from_scratch"), "is not empty"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            await mtgrpo.train(experiment, tmp_path)


async def test_what_goes_on_from_python_is_checked_against_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text("{}")
    write(tmp_path, 3, ModelSnapshot(load_model(ModelSettings("tiny"), seed=0), {}), {"sft": {"step": 3}}, {}, 0, [])
    with pytest.raises(ConfigError, match="is the folder of a warm start"):
        await mtgrpo.train(mtgrpo.preset("calculator_from_scratch", "resume=true"), tmp_path)


def test_a_turn_may_differ_from_another() -> None:
    """Rewards to go, discounted by half: a step from the end is worth half of the outcome."""
    found = scored("advantage=return_to_go", "advantage.gamma=0.5", "algorithm=reinforce_pp")
    right = [turns for one in found for turns in one.advantages if len(turns) == 2]
    assert all(first < last for first, last in right)


def test_the_bound_on_open_conversations_holds() -> None:
    engines: list[Own] = []

    def engine(experiment: Experiment) -> Sample:
        engines.append(Own(experiment))
        return engines[0]

    scored("rollout.max_concurrent=5", engine=engine)
    assert engines[0].most == 5


def test_it_is_what_the_trainer_computes() -> None:
    """The updater's advantages of the same trajectories, token by token."""
    experiment = mtgrpo.preset("jsonl", *WORDS)
    found = scored()
    groups = [one.group for one in found]
    batch = build_batch([t for group in groups for t in group.trajectories])
    rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
    seen: list[Tensor] = []

    model = load_model(ModelSettings("tiny"), 0)
    policy = Policy(model, Optimizer(model, experiment.optimizer, 1), 2048, temperature=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "apply_control", lambda control, advantage, *_: seen.append(advantage) or advantage)
        at_once(PolicyUpdater(policy, replace(update_config(experiment), exact=False)).training(batch, rewards, 0, 0))
    turns = iter([turn for one in found for per_turn in one.advantages for turn in per_turn])
    expected = [next(turns) for _ in range(len(rewards.per_turn))]
    assert seen[0].tolist() == pytest.approx([expected[turn] for turn in rewards.turn.tolist()])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=ppo", "advantage=gae", "model.value_head=true"], "a critic needs the policy's own numbers"),
        (["kl.coef=0.1", "kl.place=reward", "kl.estimator=k1"], "kl.place=reward needs the policy's own numbers"),
        (["condenser=attention"], "condenser Attention goes by attention: give attend="),
    ],
)
def test_what_needs_the_policy_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scored(*words)


def test_an_engine_that_fails_is_told_of() -> None:
    async def fails(tokens: Sequence[int], sampling: Sampling) -> Completion:
        raise KeyError("no such model")

    with pytest.raises(EngineError, match="every conversation failed, the first because of KeyError: 'no such model'"):
        scored(engine=lambda experiment: fails)


def test_what_training_leaves_out_has_no_advantage() -> None:
    """Conversations that call once more where no turn is left are truncated."""
    rewarded = scored("environment.max_turns=1", "algorithm.truncated=mask", f"reward={OWN}:Called")
    for one in rewarded:
        rewards = [t.reward for t in one.group.trajectories]
        assert sorted(rewards) == [0, 0, 1, 1]
        for trajectory, turns in zip(one.group.trajectories, one.advantages, strict=True):
            assert turns == ([0.0] if trajectory.status is Status.TRUNCATED else [-0.5])


def test_what_the_package_does_not_offer() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rollouts_with'"):
        mtgrpo.rollouts_with  # noqa: B018


# --- the profile


SMALL = [
    "model.name=tiny",
    "sft.steps=0",
    "trainer.steps=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "sampling.max_new_tokens=8",
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
    "eval.tasks=1",
    "eval.samples=1",
]


FIRST = """
from mtgrpo.rewards import Reward

class First(Reward):
    def reward(self, trajectory):
        return float(trajectory.turns[0].output[0] % 7)
"""


def test_attention_is_measured_by_the_local_engine(tmp_path: Path) -> None:
    """In demonstrations, which call tools as a fresh model would not."""
    words = ["recipe=ledger_tiny", "condenser=attention", "condenser.when=every_turn", "sft.batch_size=1"]
    with pytest.raises(SystemExit) as done:
        cli.main(["sft", *SMALL, *words, "sft.steps=1", f"hydra.run.dir={tmp_path}"])
    assert done.value.code == 0


def train(folder: Path, *words: str) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as done:
        cli.main(["train", *SMALL, *words, f"hydra.run.dir={folder}"])
    assert done.value.code == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "reinforcement learning"]


def test_a_profile_says_where_the_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = tmp_path / "own.py"
    reward.write_text(FIRST)
    words = ["profile.enabled=true", "profile.trace_steps=[2]", "condenser=keep_last", f"reward={reward}:First"]
    steps = train(tmp_path / "run", *words)
    for step in steps:
        phases = [step[f"profile/{phase}_s"] for phase in (*PHASES, "other")]
        assert min(phases) > 0 and sum(phases) == pytest.approx(step["time/train_s"])
        assert 0 < step["profile/reward_s"] < 10
        assert step["profile/generation_s_per_conversation"] > 0
    assert 0 < sum(step["profile/sync_s"] for step in steps) < 10
    printed = capsys.readouterr().out
    assert "profile, means over 2 steps:" in printed
    assert "  reward s  " in printed and "condensed" not in printed  # what is 0 throughout is left out
    trace = json.loads((tmp_path / "run" / "traces" / "step_000002.json").read_text())
    assert any("mm" in str(event.get("name")) for event in trace["traceEvents"])
    assert not (tmp_path / "run" / "traces" / "step_000001.json").exists()


def test_a_phase_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    profiler = Profiler(Profile(enabled=True))
    with profiler.measure("packing"):
        now[0] += 1
        for _ in range(2):
            with profiler.measure("check"):
                now[0] += 10
                with profiler.measure("packing"):
                    now[0] += 100
    assert profiler.take() == {**dict.fromkeys(PHASES, 0.0), "packing": 201.0, "check": 20.0}


@dataclass
class Slow(Reward):
    """Takes a second of `now`."""

    def reward(self, trajectory: Trajectory) -> float:
        now[0] += 1
        return 1.0


@dataclass
class Together(Slow):
    """As slow, siblings together; waits meanwhile."""

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[float]:
        await asyncio.sleep(0)
        return [self.reward(trajectory) for trajectory in siblings]


@dataclass
class Asks(Slow):
    """Leaves it to what it overrides."""

    async def rewards(self, siblings: Sequence[Trajectory]) -> Sequence[Given]:
        return await super().rewards(siblings)


now = [0.0]


@pytest.mark.parametrize(
    ("reward", "seconds", "waits"),
    [
        (Slow(), 2, False),
        (Composed(of={"length": None, "format": None}), 4, False),
        (Together(), 2, True),
        (Asks(), 2, True),
    ],
)
async def test_seconds_of_rewards_are_their_own(
    reward: Reward, seconds: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts once, and so does what it waits for; what else the event loop does does not."""
    if isinstance(reward, Composed):
        reward._parts = dict.fromkeys(reward._parts, Slow())
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    async def decode() -> None:
        while True:
            now[0] += 100
            await asyncio.sleep(0)

    decoding = asyncio.create_task(decode())
    runner = replace(make_runner(ScriptedEngine(lambda key, turn: said("hello")), SingleTurn()), reward=reward)
    waited, computed = divmod((await runner.run_group(TASKS[0], 2)).score_s, 100)
    decoding.cancel()
    assert computed == seconds and bool(waited) == waits


def test_parts_of_the_profile_can_be_left_out(tmp_path: Path) -> None:
    steps = train(tmp_path, "profile.enabled=true", "profile.reward=false", "profile.condensation=false")
    names = {name for step in steps for name in step if name.startswith("profile/")}
    assert "profile/forward_s" in names
    assert not any("condens" in name or "reward" in name for name in names)


def test_nothing_is_measured_unless_asked_for(tmp_path: Path) -> None:
    assert not any(name.startswith("profile/") for step in train(tmp_path) for name in step)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trace_steps": [1]}, "`trace_steps=\\[1\\]` has no effect: set `enabled=true`"),
        ({"enabled": True, "trace_steps": [0]}, "steps count from 1, got 0"),
    ],
)
def test_a_profile_of_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile(**settings)
