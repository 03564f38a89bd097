"""Whole runs of minute size: what they leave behind, what they depend on, and how they end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.config.compose import compose, parse, preset
from mtgrpo.config.experiment import Experiment
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.evaluation.statistics import mean_over_tasks
from mtgrpo.model.traits import Limit, Traits
from mtgrpo.policy.objective import Objective
from mtgrpo.policy.trainer import Stage
from mtgrpo.profile import Profiler
from mtgrpo.record.curve import Curve
from mtgrpo.record.reading import read_runs
from mtgrpo.rollout.demonstrations import laid_out, refused_calls
from mtgrpo.rollout.stream import RolloutBatch, Stream
from mtgrpo.stages import trainer
from mtgrpo.stages.budget import no_better
from mtgrpo.stages.checks import check, open_tokenizer
from mtgrpo.stages.evaluate import AllFailedError, run_evaluation
from mtgrpo.stages.run import Run, open_run
from mtgrpo.stages.sft import demonstrations, run_sft, within
from mtgrpo.stages.trainer import run_training, train
from mtgrpo.stages.update import learn
from mtgrpo.tasks import Split
from mtgrpo.types import Finish, Group, Message, Status, Task, ToolCall, Trajectory, Turn
from mtgrpo.weights.saved import read_checkpoint
from test_resume import conversations

CONSTANT = "optimizer.schedule=constant"  # a schedule that falls needs a number of steps
# Half of all tokens end a turn: a fresh model would otherwise hardly ever come to an end.
ENDING = f"sampling.stop_ids={list(range(1024))}".replace(" ", "")
SMALL = [
    "recipe=calculator_from_scratch",  # also where model.name= names a checkpoint
    *("trainer.steps=2", "sft.steps=2", "sft.batch_size=4", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=12", "eval.tasks=2", "eval.samples=2", "eval.every_steps=0", "log=[jsonl]"),
]

OWN = '''
import random
import threading
import time
from dataclasses import dataclass

from mtgrpo.environments import Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.rewards import Reward
from mtgrpo.types import Message, ToolCall

used = []
down = threading.Event()

def dawdle(number: int) -> str:
    """Take a random time."""
    used.append(number)
    time.sleep(random.random() * 0.01)  # from the clock's seed: other times in every run
    if down.is_set():
        raise OSError("the line is dead")
    return str(number)

@dataclass
class Busy(ToolUse):
    """The model's first two messages are taken for calls of `dawdle`, whatever they say."""

    async def start(self, task):
        self.turn = 0
        return await super().start(task)

    async def step(self, message):
        self.turn += 1
        call = ToolCall("dawdle", {"number": len(message.content)})
        return await super().step(Message("assistant", tool_calls=(call,) if self.turn < 3 else ()))

@dataclass
class Length(Reward):
    """Every conversation has a worth of its own."""

    def reward(self, trajectory):
        return float(sum(turn.output[0] % 7 for turn in trajectory.turns))
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def experiment(*words: str) -> Experiment:
    return compose(parse([*SMALL, *words])).experiment


def ran(folder: Path, *words: str) -> Path:
    """A run without its picture, which takes longer than the run."""
    asyncio.run(train(experiment(*words), folder, Curve()))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def played(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())


def digits(values: dict[str, Any]) -> dict[str, Any]:
    """What is not a measurement of the machine."""
    return {name: value for name, value in values.items() if not name.startswith(("perf/", "time/"))}


def everything(folder: Path) -> list[Any]:
    """All that a run computed, and said."""
    return [*(digits(row) for row in rows(folder)), digits(summary(folder)), conversations(folder)]


def busy(own: Path, *words: str) -> list[str]:
    """A run with the tools of the file `own`: every conversation calls one twice."""
    return [
        f"environment={own}:Busy",
        f"environment.tools=['{own}:dawdle',calculator]",
        f"reward={own}:Length",
        ENDING,
        *words,
    ]


# --- what a run leaves behind


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sft.steps=30", "sft.optimizer.warmup_steps=30"], ["the warm start ends while its learning rate rises: sft"]),
        (["sft.steps=31", "sft.optimizer.warmup_steps=30"], []),
        (
            ["sft.steps=0", "sft.demonstrations=said.jsonl"],
            ["sft.demonstrations is set and sft.steps is 0: there is no"],
        ),
        (["sft.steps=0"], []),
    ],
)
def test_a_warm_start_that_is_none_or_too_short_is_noted(words: list[str], told: list[str]) -> None:
    notes = preset("calculator_from_scratch", *words).notes
    assert len(notes) == len(told) and all(map(str.startswith, notes, told))


@pytest.mark.real
@pytest.mark.parametrize(("rate", "told"), [("1e-6", True), ("0.003", False)])
def test_a_warm_start_that_hardly_learns_is_noted(rate: str, told: bool, tmp_path: Path) -> None:
    words = [f"sft.optimizer.lr={rate}", "sft.optimizer.kind=adamw", "sft.optimizer.warmup_steps=0", "trainer.steps=1"]
    ran(tmp_path, *words, "sft.steps=20", "eval.tasks=1")
    notes = (tmp_path / "notes.txt").read_text()
    assert ("the warm start has hardly learned: its loss went from " in notes) == told


@pytest.mark.parametrize(
    ("name", "argument", "refusal"),
    [
        ("calculator", "expression", ""),
        ("Calculator", "expression", "there is no such tool; did you mean calculator? the tools are: calculator"),
        ("calculator", "expresion", "calculator has no argument 'expresion'; its arguments: expression"),
    ],
)
async def test_demonstrations_that_call_no_tool_there_is_are_refused(name: str, argument: str, refusal: str) -> None:
    _, chat = open_tokenizer(preset("calculator"))
    said = (Message("assistant", tool_calls=(ToolCall(name, {argument: "1"}),)), Message("tool", "1", name=name))
    example = await laid_out(Task("t/1", (Message("user", "1"),)), said, preset("calculator").environment, chat)
    why, taken = refused_calls(example, preset("calculator").environment)
    assert taken != bool(refusal)
    assert why.startswith(f"the demonstration of task t/1 calls {name}({argument}): {refusal}" if refusal else "")
    assert bool(why) == bool(refusal)


@pytest.mark.parametrize(
    ("words", "body", "said"),
    [
        ("", "0", "task Mine gives no held-out tasks: its stream of Split.eval is empty"),
        ("task.system_prompt=Brief.", "None", "task.system_prompt has no effect: task Mine does not use it"),
    ],
)
def test_a_source_of_ones_own_must_give_what_is_asked_of_it(words: str, body: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from mtgrpo.tasks import IndexedStream, TaskSource\nfrom mtgrpo.types import Message, Task\n\n\n"
        "class Mine(TaskSource):\n    def stream(self, split, seed, repeat=True):\n"
        f"        return IndexedStream({body}, lambda i: Task(str(i), (Message('user', '1'),), '1'), seed, repeat)\n"
    )
    with pytest.raises(ConfigError, match=said):
        check(experiment(f"task={path}:Mine", "sft.steps=0", *words.split()))


@pytest.mark.real
def test_a_row_of_demonstrations_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path, said = (
        tmp_path / "said.jsonl",
        [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "#### 1"}],
    )
    path.write_text(f"{json.dumps({'messages': said})}\n" * 8 + "{broken\n")
    words = [f"sft.demonstrations={path}", "sft.steps=1", "trainer.steps=1", "eval.tasks=1"]
    fault = f"1 of the 9 rows that were checked cannot be used and are skipped; the first: {path}, line 9"
    assert any(note.startswith(fault) for note in check(experiment(*words)))
    assert fault in (ran(tmp_path / "run", *words) / "notes.txt").read_text()


@pytest.mark.parametrize(("steps", "refused"), [(0, False), (1, True)])
def test_a_task_may_have_demonstrations_that_nobody_imitates(
    steps: int, refused: bool, own: Path, tmp_path: Path
) -> None:
    """Those of the calculator's tasks call a calculator, which is not there."""
    words = busy(own, "eval.tasks=1", "trainer.steps=1", f"sft.steps={steps}", f"environment.tools=['{own}:dawdle']")
    if refused:
        with pytest.raises(ConfigError, match=r"calls calculator\(expression\): there is no such tool; .*dawdle"):
            ran(tmp_path / "run", *words)
    else:
        ran(tmp_path / "run", *words)


def test_a_run_leaves_a_record_a_policy_and_a_summary(tmp_path: Path) -> None:
    words = ("eval.samples=8", "eval.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=0")
    folder = tmp_path / "run"
    asyncio.run(run_training(experiment(*words), folder))
    assert {path.name for path in folder.iterdir()} == {
        *(
            "metrics.jsonl",
            "notes.txt",
            "summary.json",
            "tokens",
            "versions.json",
            "curve.png",
            "trajectories",
            "checkpoints",
            "journal",
        )
    }
    assert [path.name for path in sorted((folder / "trajectories").iterdir())] == [
        "evaluation_after.jsonl",
        "evaluation_before.jsonl",
        "greedy_after.jsonl",
        "greedy_before.jsonl",
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        f"step_00000{step}" for step in range(3)
    ]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    found = summary(folder)
    measured = [f"eval/{name}/{when}" for name in ("success", "greedy", "pass@8") for when in ("before", "after")]
    assert set(found) >= {*measured, "time/sft_s", "time/rl_s", "time/total_s", "train/steps"}
    assert found["train/steps"] == 2
    (run,) = read_runs([folder])
    for when in ("before", "after"):
        outcomes = run.outcomes(f"evaluation_{when}")
        assert mean_over_tasks(list(outcomes.values())).mean == pytest.approx(found[f"eval/success/{when}"])
    assert 0 < found["time/sft_s"] + found["time/rl_s"] < found["time/total_s"]
    stages = [(row["stage"], row["step"]) for row in rows(folder)]
    assert stages == [
        *(("warm start", 1), ("warm start", 2), ("evaluation", 18)),
        *(("reinforcement learning", 1), ("reinforcement learning", 2), ("evaluation", 18)),
    ]
    steps = [row for row in rows(folder) if row["stage"] == "reinforcement learning"]
    assert all({"reward/mean", "perf/tokens_per_s", "time/rollout_s"} <= set(row) for row in steps)
    flat = sum(row["reward/groups_with_variance"] == 0 for row in steps)
    assert found["train/steps_without_variance"] == flat
    assert ["eval/success" in row for row in steps] == [True, False]  # the last step's is the evaluation after
    assert [row["eval/success"] for row in rows(folder) if row["stage"] == "evaluation"] == [
        found["eval/success/before"],
        found["eval/success/after"],
    ]
    assert [line["sample"] for line in played(folder, 1)] == [0, 1, 0, 1]
    assert {line["task"].split("/")[3] for line in played(folder, 1)} == {"train"}
    found = read_checkpoint(folder / "checkpoints" / "step_000002")
    assert (found.step, found.state["stream"]["tasks"]["position"]) == (2, 4)


@pytest.mark.real
def test_the_warm_start_alone_leaves_a_policy_to_go_on_from(tmp_path: Path) -> None:
    asyncio.run(run_sft(experiment(), tmp_path / "sft"))
    (saved,) = (tmp_path / "sft" / "checkpoints").iterdir()
    assert saved.name == "step_000002"
    read_checkpoint(saved)
    after = summary(tmp_path / "sft")
    going_on = summary(ran(tmp_path / "run", "sft.steps=0", f"model.name={saved}"))
    at_once = summary(ran(tmp_path / "at_once"))
    for name in ("eval/success", "eval/greedy", "eval/sampled_tokens", "eval/turns"):
        assert after[f"{name}/after"] == going_on[f"{name}/before"] == at_once[f"{name}/before"]
    assert digits(going_on) == digits(at_once)


@pytest.mark.real
def test_the_end_of_the_warm_start_is_kept_beside_the_newest_checkpoint(tmp_path: Path) -> None:
    ran(tmp_path, "sft.steps=1", "trainer.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000000", "step_000003"]


@pytest.mark.real
def test_a_checkpoint_measures_as_the_run_did(tmp_path: Path, own: Path) -> None:
    words = busy(own, "reward.success_at=10", "eval.tasks=6", "eval.samples=3")
    after = digits(summary(ran(tmp_path / "run", *words)))
    words.append(f"model.name={tmp_path / 'run' / 'checkpoints' / 'step_000002'}")
    asyncio.run(run_evaluation(experiment(*words), tmp_path / "measured"))
    measured = digits(summary(tmp_path / "measured"))
    assert len(measured) > 8
    assert measured == {name: after[f"{name}/after"] for name in measured}
    assert 0 < measured["eval/success"] < 1, "the test is too easy"
    asyncio.run(run_evaluation(experiment(*words, "seed=1"), tmp_path / "again"))
    again = digits(summary(tmp_path / "again"))
    assert again["eval/greedy"] == measured["eval/greedy"]  # nothing is drawn
    assert again["eval/reward"] != measured["eval/reward"]  # other samples for the same tasks
    first, second = (
        row["reward/success"] for row in rows(tmp_path / "run") if row["stage"] == "reinforcement learning"
    )
    assert first > 0
    assert summary(tmp_path / "run")["train/success"] == pytest.approx(0.8 * first + 0.2 * second)


# --- what a run depends on


@pytest.mark.real
def test_the_seed_alone_decides_every_digit(tmp_path: Path, own: Path) -> None:
    """However long the tools take, and however few conversations are open at once."""
    words = busy(own, "rollout.prompts_per_step=4", "rollout.max_concurrent=3")
    first, second = (everything(ran(tmp_path / name, *words)) for name in ("first", "second"))
    assert first == second
    assert first != everything(ran(tmp_path / "other", *words, "seed=1"))
    steps = [row for row in rows(tmp_path / "first") if row["stage"] == "reinforcement learning"]
    assert all(row["rollout/tool_rate"] > 0.5 and row["policy/grad_norm"] > 0 for row in steps)
    assert all(row["policy/mismatch/max_abs_dlogp"] < 5e-4 for row in steps)


def test_what_top_p_and_top_k_cut_off_is_cut_off_in_the_update_too(tmp_path: Path, own: Path) -> None:
    """The update sees the very distribution that was sampled from: the ratios are 1, the entropy that of few tokens."""
    words = busy(own, "sampling.top_k=5", "sampling.top_p=0.9", "sampling.temperature=0.8", "kl.coef=0.01")
    steps = [row for row in rows(ran(tmp_path, *words)) if row["stage"] == "reinforcement learning"]
    assert all(row["policy/grad_norm"] > 0 for row in steps)
    assert all(row["policy/mismatch/max_abs_dlogp"] < 5e-4 for row in steps)
    assert all(0 < row["policy/entropy"] < math.log(5) for row in steps)


@pytest.mark.parametrize("kind", ["normal", "shuffled", "flipped"])
def test_controls_reach_the_update(kind: str, tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantages that are trained on, against those of the rewards."""
    assigned_last: list[torch.Tensor] = []
    credited: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    assign, prepare = WholeTrajectory.assign, Objective.prepare

    def spy_assign(self: WholeTrajectory, *arguments: Any) -> Any:
        assigned = assign(self, *arguments)
        assigned_last[:] = [assigned.advantage.clone()]  # of single groups too, to see which teach
        return assigned

    def spy_prepare(self: Objective, *arguments: Any) -> Any:
        yield from prepare(self, *arguments)
        first = torch.cat([torch.ones(1) > 0, self._batch.trajectory.diff() != 0])
        credited.append(assigned_last[0][first])  # one advantage for each trajectory
        given.append(self._advantage[first])

    monkeypatch.setattr(WholeTrajectory, "assign", spy_assign)
    monkeypatch.setattr(Objective, "prepare", spy_prepare)
    words = busy(own, "rollout.prompts_per_step=4", "sft.steps=0", f"debug.advantages={kind}")
    ran(tmp_path / "run", *words)
    assert len(given) == len(credited) == 2
    for before, after in zip(credited, given, strict=True):
        assert len(before.unique()) > 3
        if kind == "shuffled":
            assert torch.equal(before.sort().values, after.sort().values)
            assert not torch.equal(before, after)
        else:
            assert torch.equal(after, -before if kind == "flipped" else before)
    moved = [not torch.equal(a.sort().indices, b.sort().indices) for a, b in zip(credited, given, strict=True)]
    assert all(moved) == (kind != "normal")


@pytest.mark.real
async def test_demonstrations_do_not_touch_the_environment_that_is_played(own: Path, tmp_path: Path) -> None:
    made = experiment(*busy(own))
    before = dict(vars(made.environment))

    async def one(run: Run) -> int:
        examples = demonstrations(made.task, made.task.stream(Split.train, 0), run.runner, 0, run.sinks.note)
        return len((await anext(examples)).turns)

    async with open_run(made, tmp_path / "run") as run:
        assert await one(run) >= 1
    assert vars(made.environment) == before


# --- every algorithm, credit and correction, from end to end


@pytest.mark.parametrize(
    "words",
    [
        *(f"algorithm={name}" for name in options("algorithm") if name not in ("grpo", "ppo")),
        "algorithm=ppo advantage=gae model.value_head=true",
        "algorithm=ppo advantage=gae advantage.level=token model.value_head=true",
        *(f"advantage={name}" for name in options("advantage") if name not in ("trajectory", "turn")),
        "algorithm=reinforce_pp advantage=return_to_go advantage.level=token "
        "kl.coef=0.1 kl.place=reward kl.estimator=k1",
        "kl.coef=0.1 kl.target=0.01 reference.ema=0.1",
        "kl.coef=0.1 kl.unbiased=true reference.update_every=2",
        "correction.weight=token correction.reject=geometric correction.veto=0.01",
        "rollout.max_staleness=2 correction.old_policy=interpolated correction.weight=token",
        "rollout.max_staleness=1 correction.old_policy=trainer correction.weight=sequence",
        "algorithm.average=constant algorithm.top_entropy=0.3 algorithm.entropy_coef=0.01",
        "filter.zero_variance=true filter.refill=true",
        "trainer.minibatch_trajectories=4 algorithm=gspo algorithm.clip_low=0.1",
    ],
)
def test_every_way_to_learn_runs(words: str, tmp_path: Path, own: Path) -> None:
    given = busy(own, "rollout.prompts_per_step=3", "rollout.group_size=4", "trainer.deterministic=false")
    folder = ran(tmp_path / "run", *given, *words.split())
    steps = [row for row in rows(folder) if row["stage"] == "reinforcement learning"]
    assert len(steps) == 2
    for row in steps:
        assert row["policy/grad_norm"] > 0
        assert all(math.isfinite(value) for name, value in row.items() if isinstance(value, float))


# --- how a run ends


def note(folder: Path) -> str:
    """The line that says why a run stopped."""
    (line,) = (line for line in (folder / "notes.txt").read_text().splitlines() if line.startswith("stopped after"))
    return line


def test_a_run_ends_at_its_number_of_steps(tmp_path: Path) -> None:
    folder = ran(tmp_path / "run", "sft.steps=0", "trainer.total_turns=1000")
    assert note(folder) == "stopped after step 2: trainer.steps=2"
    assert summary(folder)["train/steps"] == 2


def test_epochs_of_endless_problems_are_refused() -> None:
    experiment = compose(parse(["trainer.epochs=3"])).experiment
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        check(experiment)


def test_a_run_ends_after_its_epochs(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"What is {number} + 1?", "answer": number + 1}) + "\n" for number in range(5)]
    tmp_path.joinpath("train.jsonl").write_text("".join(lines))
    tmp_path.joinpath("held_out.jsonl").write_text("".join(lines[:2]))
    files = [f"task.path={tmp_path}/train.jsonl", f"task.val_files=[{tmp_path}/held_out.jsonl]"]
    words = [
        "task=jsonl",
        *files,
        "sft.steps=0",
        "trainer.steps=0",
        "trainer.epochs=2",
        "trainer.total_turns=1000",
        CONSTANT,
    ]
    folder = ran(tmp_path / "run", *words)
    assert note(folder) == "stopped after step 5: trainer.epochs=2"
    tasks = [line["task"] for step in range(1, 6) for line in played(folder, step)]
    assert {task: tasks.count(task) for task in tasks} == {f"train/{number}": 4 for number in range(1, 6)}


def test_a_run_ends_after_its_turns(tmp_path: Path, own: Path) -> None:
    words = busy(own, "environment.max_turns=2", "trainer.steps=0", "trainer.total_turns=15", "sft.steps=0", CONSTANT)
    folder = ran(tmp_path / "run", *words)
    steps = len(list((folder / "trajectories").glob("step_*")))
    turns = [sum(len(line["turns"]) for line in played(folder, step)) for step in range(1, steps + 1)]
    assert note(folder) == f"stopped after step {steps}: trainer.total_turns=15"
    assert sum(turns[:-1]) < 15 <= sum(turns)


def test_a_run_ends_after_its_time(tmp_path: Path) -> None:
    folder = ran(
        tmp_path / "run", "sft.steps=0", "trainer.steps=0", "trainer.wall_time_s=0.5", "trainer.idle_steps=0", CONSTANT
    )
    found = summary(folder)
    assert note(folder) == f"stopped after step {found['train/steps']:.0f}: trainer.wall_time_s=0.5"
    took = [row["time/rollout_s"] + row["time/train_s"] for row in rows(folder) if "time/rollout_s" in row]
    assert sum(took[:-1]) < 0.5 <= found["time/rl_s"] == pytest.approx(sum(took))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.steps=0"], "the run never ends"),
        (["trainer.steps=-1"], "must be >= 0"),
        (["eval.tasks=0"], "eval.tasks must be >= 1, got 0"),
        (["eval.samples=0"], "eval.samples must be >= 1, got 0"),
        (["eval.every_steps=-1"], "eval.every_steps must be >= 0"),
        (["sft.batch_size=0"], "sft.batch_size must be >= 1, got 0"),
        (["sft.steps=-1"], "sft.steps must be >= 0"),
        (["sampling.timeout_s=5"], "sampling.timeout_s=5.0 makes results depend on the speed"),
    ],
)
def test_impossible_lengths_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        experiment(*words)


def test_a_context_that_no_prompt_fits_is_said_before_the_warm_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_context_length=16 leaves no room.*tasks have \d+ tokens"):
        ran(tmp_path, "environment.max_context_length=16")
    assert not any((tmp_path / "checkpoints").glob("*"))


@pytest.mark.real
def test_a_run_with_nothing_to_learn_from_foresees_it_and_ends(tmp_path: Path) -> None:
    words = ("sft.steps=0", "trainer.steps=4")  # an untrained model solves nothing
    ran(tmp_path / "a", *words, "trainer.idle_steps=3")
    notes = (tmp_path / "a" / "notes.txt").read_text()
    assert notes.index("less than one group a step will have rewards that differ") < notes.index("stopped after step 3")
    assert "stopped after step 3: trainer.idle_steps=3: there was nothing to learn from" in notes
    assert summary(tmp_path / "a")["train/steps"] == 3 and "eval/success/after" in summary(tmp_path / "a")
    ran(tmp_path / "b", *words, "trainer.idle_steps=0")
    assert summary(tmp_path / "b")["train/steps"] == 4


def test_a_run_whose_filter_leaves_nothing_to_learn_from_ends(tmp_path: Path) -> None:
    narrow = ("filter.min_success=0.9", "filter.max_success=0.95")  # of groups of 4 none is there
    ran(tmp_path, *narrow, "trainer.steps=4", "trainer.idle_steps=2")
    notes = (tmp_path / "notes.txt").read_text()
    assert "stopped after step 2: trainer.idle_steps=2: there was nothing to learn from" in notes


@pytest.mark.real
def test_any_seed_will_do(tmp_path: Path) -> None:
    for seed in (2 * 10**13, -(10**13)):
        ran(tmp_path / str(seed), f"seed={seed}", "sft.steps=0", "trainer.steps=1", ENDING)
        assert summary(tmp_path / str(seed))["train/steps"] == 1


def test_the_learning_rate_falls_where_steps_had_nothing_to_train_too(tmp_path: Path) -> None:
    late = "from mtgrpo.rewards import Reward\n\nclass Late(Reward):\n    def reward(self, trajectory):\n"
    late += "        *_, split, number = trajectory.task.id.split('/')\n"
    late += "        return trajectory.sampled_tokens if split == 'train' and int(number) >= 4 else 0.0\n"  # of step 3
    (tmp_path / "late.py").write_text(late)
    words = ("sft.steps=0", "trainer.steps=4", "optimizer.schedule=linear", "optimizer.lr=1e-3", ENDING)
    ran(tmp_path / "run", *words, "optimizer.warmup_steps=0", f"reward={tmp_path}/late.py:Late", "rollout.group_size=4")
    steps = [row for row in rows(tmp_path / "run") if row["stage"] == "reinforcement learning"]
    assert [row["policy/updates"] for row in steps] == [0, 0, 1, 1]
    assert [row["policy/lr"] for row in steps[2:]] == pytest.approx([0.5e-3, 0.25e-3])


@pytest.mark.parametrize(
    ("success", "stop", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.2], 2, True),
        ([0.1, 0.2, 0.2, 0.2], 3, False),
        ([0.1, 0.2, 0.1, 0.3], 2, False),
        ([0.5, 0.2, 0.3, 0.5], 3, True),
        ([0.5, 0.2, 0.3, 0.51], 3, False),
        ([0.5, 0.0, 0.0, 0.0], 0, False),
        ([], 1, False),
    ],
)
def test_evaluations_that_are_no_better_end_a_run(success: list[float], stop: int, ends: bool) -> None:
    assert bool(no_better({5 * n: value for n, value in enumerate(success)}, stop)) is ends


def test_a_run_that_gets_no_better_ends_and_keeps_its_best_policy(tmp_path: Path) -> None:
    words = ("sft.steps=0", "trainer.steps=9", "trainer.idle_steps=0", "eval.every_steps=2", "eval.stop=2")
    ran(tmp_path, *words, "checkpoint.keep_last=1", "checkpoint.every_steps=0")  # an untrained model solves nothing
    said = "stopped after step 4: eval.stop=2: held-out success has not been above 0.000 since step 0"
    assert said in (tmp_path / "notes.txt").read_text()
    assert summary(tmp_path)["train/steps"] == 4 and "eval/success/after" in summary(tmp_path)
    with pytest.raises(ConfigError, match=r"eval\.stop=1 ends a run after its best policy"):
        experiment("eval.every_steps=1", "eval.stop=1", "checkpoint.keep_best=0")
    with pytest.raises(ConfigError, match=r"eval\.stop=1.*set eval\.every_steps"):
        experiment("eval.every_steps=0", "eval.stop=1")


# --- when the world fails


def test_without_a_warm_start_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    ran(tmp_path, "sft.steps=0", "trainer.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=1")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_a_world_that_fails_from_the_start_ends_the_run_with_the_reason(tmp_path: Path, own: Path) -> None:
    made = experiment(*busy(own, "sft.steps=0", "environment.backoff_s=0"))
    module = vars(type(made.environment))["step"].__globals__
    module["down"].set()
    with pytest.raises(AllFailedError, match="OSError: the line is dead"):
        asyncio.run(run_training(made, tmp_path / "run"))


def test_an_outage_during_training_trains_nothing_and_passes(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(*busy(own, "sft.steps=0", "trainer.steps=3", "eval.every_steps=1", "environment.backoff_s=0",
                            "rollout.max_failed=1"))  # fmt: skip
    down = vars(type(made.environment))["step"].__globals__["down"]
    batch, evaluate = Stream.batch, trainer.evaluate_during

    async def batch_with_outage(stream: Stream, version: int) -> RolloutBatch:
        if version == 1:
            down.set()
        return await batch(stream, version)

    async def evaluate_in_outage(*arguments: Any, **named: Any) -> Any:
        try:
            return await evaluate(*arguments, **named)
        finally:
            down.clear()

    monkeypatch.setattr(Stream, "batch", batch_with_outage)
    monkeypatch.setattr(trainer, "evaluate_during", evaluate_in_outage)
    curve = Curve()
    found = asyncio.run(train(made, tmp_path / "run", curve))
    steps = [row for row in rows(tmp_path / "run") if row["stage"] == "reinforcement learning"]
    assert [row["rollout/failed"] for row in steps] == [0, 1, 0]
    assert [row["reward/mean"] is None for row in steps] == [False, True, False]
    assert ["policy/updates" in row for row in steps] == [True, False, True]
    assert ["eval/success" in row for row in steps] == [True, False, False]  # the last is the evaluation after
    assert math.isnan(curve.reward[1]) and sorted(curve.success) == [0, 1, 3]
    assert "the line is dead" in (tmp_path / "run" / "notes.txt").read_text()
    assert {line["status"] for line in played(tmp_path / "run", 2)} == {Status.FAILED.value}
    assert found["train/steps"] == 3
    assert curve.draw(tmp_path, 60)


def test_an_outage_that_the_model_is_told_of_is_counted_and_explained(tmp_path: Path, own: Path) -> None:
    words = busy(own, "sft.steps=0", "trainer.steps=1", "environment.backoff_s=0", "environment.on_outage=observe")
    made = experiment(*words)
    vars(type(made.environment))["step"].__globals__["down"].set()
    found = asyncio.run(train(made, tmp_path / "run", Curve()))
    (step,) = [row for row in rows(tmp_path / "run") if row["stage"] == "reinforcement learning"]
    assert (step["rollout/failed"], step["rollout/tool_timeouts"]) == (0, 0)
    assert 0 < step["rollout/tool_outages"] == step["rollout/tool_retries"] / 4
    assert step["policy/grad_norm"] > 0
    assert found["eval/tool_outages/before"] > 0
    line = 1 + OWN[: OWN.index("the line is dead")].count("\n")
    why = f"the tool dawdle failed: OSError: the line is dead ({own}, line {line})"
    told = f"the first because {why}"
    assert told in (tmp_path / "run" / "notes.txt").read_text()
    outages = [cause for line in played(tmp_path / "run", 1) for cause in line.get("outages", [])]
    assert set(outages) == {why} and len(outages) == 4 * step["rollout/tool_outages"]


def test_prompts_that_are_too_long_are_truncated_and_train_nothing(tmp_path: Path) -> None:
    folder = ran(tmp_path / "run", "environment.max_context_length=32", "sft.steps=0")  # few prompts are shorter
    steps = [row for row in rows(folder) if row["stage"] == "reinforcement learning"]
    assert [(row["rollout/truncated"], row["reward/mean"]) for row in steps] == [(1, 0)] * 2
    assert min(row["rollout/turns"] for row in steps) == 0


def test_a_task_without_demonstrations_cannot_be_warm_started(tmp_path: Path) -> None:
    for name in ("train", "held_out"):
        tmp_path.joinpath(f"{name}.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}\n')
    files = [f"task.path={tmp_path}/train.jsonl", f"task.val_files=[{tmp_path}/held_out.jsonl]"]
    with pytest.raises(ConfigError, match=r"Jsonl gave no demonstration for 1000 tasks in a row; set sft\.steps=0"):
        ran(tmp_path / "run", "task=jsonl", *files)


async def test_an_opened_run_is_closed_when_its_stage_breaks(tmp_path: Path) -> None:
    made = experiment()
    with pytest.raises(ZeroDivisionError):
        async with open_run(made, tmp_path / "run") as run:
            raise ZeroDivisionError
    assert not run.sinks._sinks


async def five_batches(run: Run) -> list[list[Group]]:
    stream = Stream(run.runner, run.tasks, run.experiment.rollout)
    return [(await stream.batch(version)).groups for version in range(5)]


@pytest.mark.real
async def test_the_forest_trains_as_padded_rows_do(own: Path, tmp_path: Path) -> None:
    """Five updates on the same recorded conversations: one loss, one gradient norm, whatever the layout."""
    words = [
        f"environment={own}:Busy",
        f"environment.tools=[{own}:dawdle,calculator]",
        f"reward={own}:Length",
        ENDING,
        CONSTANT,
    ]
    words += ["rollout.group_size=4", "optimizer.lr=1e-3", "trainer.updates_per_batch=2", "kl.coef=0.01"]
    words += ["environment.max_turns=4", "sft.steps=0"]
    found: dict[str, list[dict[str, float]]] = {}
    recorded: list[list[Group]] = []
    for attention in ("forest", "sdpa"):
        async with open_run(experiment(*words, f"model.attention={attention}"), tmp_path / attention) as run:
            recorded = recorded or await five_batches(run)
            run.trainer.begin(Stage.reinforcement)
            found[attention] = [await learn(run, Profiler(), groups, step) for step, groups in enumerate(recorded, 1)]
    for forest, padded in zip(found["forest"], found["sdpa"], strict=True):
        assert forest["policy/computed_tokens"] < 0.7 * padded["policy/computed_tokens"]
        for name in ("policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy"):
            assert forest[name] == pytest.approx(padded[name], rel=1e-4, abs=1e-6)
    assert len({metrics["policy/loss"] for metrics in found["forest"]}) == 5


@pytest.mark.real
async def test_a_context_may_be_longer_than_the_budget_but_not_as_a_padded_row(tmp_path: Path) -> None:
    long = ("environment.max_context_length=600", "batch.token_budget=512")
    async with open_run(experiment(*long), tmp_path / "long") as run:
        assert run.runner.limits.context_tokens == 600
    with pytest.raises(ConfigError, match=r"max_context_length=600: .*rows.*batch\.token_budget=512.*to at least 600"):
        await train(experiment(*long, "model.attention=sdpa"), tmp_path / "rows", Curve())
    async with open_run(experiment("batch.token_budget=512"), tmp_path / "short") as run:
        assert run.runner.limits.context_tokens == 512


def test_a_warm_start_imitates_what_the_context_that_was_asked_for_holds(tmp_path: Path) -> None:
    asyncio.run(run_sft(experiment("environment.max_context_length=600", "batch.token_budget=48"), tmp_path))
    assert "left out" not in (tmp_path / "notes.txt").read_text()


def test_demonstrations_that_no_micro_batch_holds_are_left_out() -> None:
    told: list[str] = []

    def example(tokens: int) -> Trajectory:
        turn = Turn([1] * tokens, [2, 3], [0.0, 0.0], [0, 0], Finish.STOP, Message("assistant"))
        return Trajectory(Task("t", ()), turns=[turn])

    async def stream(*sizes: int) -> AsyncIterator[Trajectory]:
        for size in sizes:
            yield example(size)

    async def kept(*sizes: int) -> list[int]:
        return [
            len(e.turns[0].new_context) async for e in within(stream(*sizes), 10, "batch.token_budget=10", told.append)
        ]

    assert asyncio.run(kept(3, 9, 8, 100, 5)) == [3, 8, 5]
    assert told == ["demonstrations longer than batch.token_budget=10 are left out; one has 11 tokens"]
    with pytest.raises(ConfigError, match=r"1000 demonstrations in a row .*token_budget=10, the last has 42"):
        asyncio.run(kept(2, *[40] * 1000))


def test_demonstrations_that_the_model_does_not_compute_exactly_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Limit(32, "beyond 32 it does something else")
    monkeypatch.setattr("mtgrpo.weights.source.traits", lambda model: Traits("", (), True, limit, limit))
    with pytest.raises(ConfigError, match="longer than the 32 tokens that the model computes exactly"):
        asyncio.run(run_sft(experiment(), tmp_path))
