"""What an evaluation says, and what `mtgrpo collect` writes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.config.compose import preset
from mtgrpo.config.recipe import recipes
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.evaluation.findings import EvaluationGroups, Findings, control, table, what_was_learned
from mtgrpo.evaluation.statistics import wilson
from mtgrpo.integrations.reasoning_gym import ReasoningGym
from mtgrpo.record.writing import fine_tuning_row, open_rows, trajectory_row
from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import EM
from mtgrpo.rewards.f1 import F1
from mtgrpo.rewards.math_verify import MathVerify
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.stages import evaluate
from mtgrpo.stages.checks import check, task_sets
from mtgrpo.stages.evaluate import AllFailedError, run_collection, run_evaluation
from mtgrpo.tasks import Split
from mtgrpo.tasks.conversations import Conversations
from mtgrpo.types import CallRecord, Finish, Group, Message, Status, Task, ToolCall, ToolSpec, Trajectory, Turn
from test_resume import without_times

ENDING = f"sampling.stop_ids={list(range(1024))}".replace(" ", "")  # half of all tokens end a turn
SMALL = ("eval.tasks=3", "eval.samples=2", "sampling.max_new_tokens=12", "log=[jsonl]", "sft.steps=0")


def trajectory(task: Task, text: str, turns: int = 1, status: Status = Status.COMPLETED) -> Trajectory:
    said = Turn([1], [2], [0.0], [0], Finish.STOP, Message("assistant", text))
    return Trajectory(
        task,
        turns=[said] * turns,
        status=status,
        reward=float(text == task.answer),
        calls=[CallRecord("search")] * (turns - 1),
    )


def group(number: int, answer: str, texts: list[str], **more: Any) -> Group:
    task = Task(f"t/{number}", (Message("user", "?"),), answer, more)
    return Group(task, [trajectory(task, text, 1 + nth % 2) for nth, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (EM(), ["Paris", "Paris.", "the paris", "Rome", "Rome"]),
        (F1(tag="answer"), [f"{n}: <answer>{city}</answer>" for n, city in enumerate(["Paris"] * 3 + ["Rome"] * 2)]),
        (MathVerify(), ["a \\boxed{5}", "b \\boxed{5.0}", "c \\boxed{5}", "d \\boxed{7}", "e \\boxed{7}"]),
        (ReasoningGym(), [f"{n}\n#### {answer}" for n, answer in enumerate("55577")]),
    ],
)
def test_what_is_said_around_an_answer_is_no_other_vote(reward: Reward, said: list[str]) -> None:
    groups = [group(0, "", said)]
    for trajectory, worth in zip(groups[0].trajectories, [1.0, 1.0, 1.0, 0.0, 0.0], strict=True):
        trajectory.reward = worth
    assert Findings.of(EvaluationGroups(groups, groups), reward).means["majority vote"] == 1.0


def test_an_evaluation_finds_the_numbers_of_its_formulas() -> None:
    groups = [
        group(0, "#### 1", ["#### 1", "#### 1", "#### 2", "#### 3"], level=1),
        group(1, "#### 1", ["#### 2", "#### 2", "#### 1", "#### 3"], level=2),
        group(2, "#### 1", ["#### 1", "no number", "no number", "no number"], level=2),
    ]
    groups[2].trajectories.append(trajectory(groups[2].task, "#### 1", status=Status.FAILED))
    greedy = [group(0, "#### 1", ["#### 1"]), group(1, "#### 1", ["#### 2"])]  # of the third task it failed
    found = Findings.of(EvaluationGroups(groups, greedy), Numeric())
    assert (found.tasks, found.samples) == (3, 4)
    assert found.shares["success"].mean == pytest.approx(4 / 12)
    assert found.shares["pass@2"].mean == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)  # 1 - C(n - c, 2) / C(4, 2)
    assert found.shares["pass@4"].mean == 1.0
    assert found.shares["greedy"] == wilson(0.5, 2)
    assert found.means["majority vote"] == pytest.approx((1 + 0 + 1) / 3)  # no number is no vote
    assert found.means["best reward of 4"] == 1.0
    assert {name: e.mean for name, e in found.breakdowns["level"].items()} == {"1": 0.5, "2": 0.25}
    assert found.breakdowns["turns"]["1"].mean == pytest.approx(3 / 6)
    assert found.breakdowns["tool"]["search"].mean == pytest.approx(1 / 6)
    assert found.breakdowns["tool"]["none"].mean == pytest.approx(3 / 6)
    shown = table({"": found, "easy": found}, None)
    for said in ("success (avg@4)", "pass@4", "best reward of 4", "majority vote"):
        assert shown.count(f"\n  {said} ") == 2
    for said in ("turns 1", "tool none", "level 2"):
        assert shown.count(f"\n  {said} ") == 1
    assert "\neasy: 3 held-out tasks x 4 samples\n" in shown


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ((1.0, 0.9, 1.0), "mostly sharpening: one try now finds what took 4 tries before (sampled +0.600, pass@4 +"),
        ((1.0, 0.6, 1.0), "learned what 4 tries did not find before (sampled +0.300, pass@4 +0.200)"),
        ((1.0, 0.34, 1.0), "only greedy answers gained"),
        ((0.0, 0.1, 0.2), "no gain worth a word"),
    ],
)
def test_a_run_ends_with_what_was_learned(after: tuple[float, ...], said: str) -> None:
    names = ("greedy", "success", "pass@4")
    summary = {f"eval/{name}/after": value for name, value in zip(names, after, strict=True)}
    summary |= {"eval/greedy/before": 0.0, "eval/success/before": 0.3, "eval/pass@4/before": 0.8, "eval/tasks": 256}
    line, verdict, *worse = what_was_learned(summary, 4, lr=3e-4).splitlines()
    assert line == (
        f"held-out success: greedy 0.000 -> {after[0]:.3f}, sampled 0.300 -> {after[1]:.3f}, "
        f"pass@4 0.800 -> {after[2]:.3f}"
    )
    assert verdict.startswith(said)
    fell = (
        "worse than before training: sampled -0.200, pass@4 -0.600 (`mtgrpo show --failures`); "
        "try optimizer.lr=0.0001 (a third) or more rollout.prompts_per_step"
    )
    assert worse == ([fell] if after[2] < 0.8 else [])


@pytest.mark.parametrize(
    ("tasks", "gains", "said"),
    [
        (100, (0.0, 0.08, 0.0), "success rose; 100 held-out tasks cannot tell whether 4 tries found it before"),
        (100, (0.0, 0.3, 0.02), "success rose; 100 held-out tasks cannot tell"),  # .15 - 1.4 / sqrt(100) = .01
        (100, (0.0, 0.3, 0.0), "mostly sharpening: one try now finds what took 4 tries before (sampled +0.300"),
        (75, (0.0, 0.08, 0.08), "no more than chance gives with 75 held-out tasks"),
        (1, (0.0, 0.06, 0.0), "no more than chance gives with 1 held-out task"),
        (9, (0.5, 0.0, 0.0), "only greedy answers gained"),  # 1.4 / sqrt(9) = .47
        (
            9,
            (0.5, 0.15, 0.0),
            "greedy answers gained; sampled +0.150 is no more than chance gives with 9 held-out tasks",
        ),
        (8, (0.45, 0.0, 0.0), "no more than chance gives with 8 held-out tasks"),
        (8, (0.04, 0.04, 0.4), "no gain worth a word"),
        (64, (0.0, 0.3, 0.15), "success rose; 64 held-out tasks cannot tell whether 4 tries found it before (sampled "),
        (128, (0.0, 0.3, 0.16), "learned what 4 tries did not find before (sampled +0.300, pass@4 +0.160)"),
        (8, (-0.3, -0.2, -0.3), "no gain worth a word"),
        (8, (-0.5, -0.26, -0.3), "no gain worth a word\nworse than before training: greedy -0.500, sampled -0.260 ("),
        (10_000, (-0.045, -0.045, -0.055), "no gain worth a word\nworse than before training: pass@4 -0.055 (`mtgrpo "),
    ],
)
def test_a_verdict_is_not_said_of_chance(tasks: int, gains: tuple[float, ...], said: str) -> None:
    names = ("greedy", "success", "pass@4")
    summary = {f"eval/{name}/{when}": 0.5 for name in names for when in ("before", "after")} | {"eval/tasks": tasks}
    summary |= {f"eval/{name}/after": 0.5 + gain for name, gain in zip(names, gains, strict=True)}
    verdict = what_was_learned(summary, 4, lr=3e-4).partition("\n")[2]
    assert verdict.startswith(said) and ("worse" in verdict) == ("worse" in said)


def test_where_every_task_was_found_before_any_gain_is_sharpening() -> None:
    summary = {f"eval/{name}/{when}": 1.0 for name in ("greedy", "pass@4") for when in ("before", "after")}
    summary |= {"eval/tasks": 8, "eval/success/before": 0.5, "eval/success/after": 0.9}
    assert "\nmostly sharpening: " in what_was_learned(summary, 4, lr=3e-4)


def test_where_greedy_answers_were_as_good_before_nothing_new_was_learned() -> None:
    names = ("greedy", "success", "pass@4")
    summary = dict(zip((f"eval/{name}/before" for name in names), (0.9, 0.2, 0.45), strict=True)) | {"eval/tasks": 200}
    summary |= dict(zip((f"eval/{name}/after" for name in names), (1.0, 0.9, 1.0), strict=True))
    said = "\nmostly sharpening: sampled answers came nearer to greedy ones, which were as good before (sampled +0.700"
    assert said in what_was_learned(summary, 4, lr=3e-4)
    assert "\nlearned what 4 tries did not find before" in what_was_learned(
        summary | {"eval/greedy/before": 0.8}, 4, 1.0
    )


def test_one_sample_of_a_task_cannot_tell_sharpening_from_learning() -> None:
    summary = {f"eval/{name}/{when}": 0.0 for name in ("greedy", "success", "pass@1") for when in ("before", "after")}
    summary["eval/tasks"] = 8
    assert what_was_learned(summary | {"eval/success/after": 0.5}, 1, lr=1e-6) == (
        "held-out success: greedy 0.000 -> 0.000, sampled 0.000 -> 0.500"
    )


def test_further_sets_of_tasks_get_a_line_each() -> None:
    summary = {f"eval/{name}/{when}": 0.0 for name in ("greedy", "success") for when in ("before", "after")}
    sets = {"eval/easy/success/before": 0.25, "eval/easy/success/after": 0.75, "eval/new/success/after": 0.5}
    said = what_was_learned(summary | {"eval/tasks": 8, "eval/easy/greedy/after": 1.0} | sets, 1, lr=1e-6)
    assert said.splitlines()[2:] == ["easy: sampled 0.250 -> 0.750"]  # of `new` there is nothing from before


def test_what_was_measured_with_other_samples_before_is_left_out() -> None:
    summary = {f"eval/{name}/{when}": 0.0 for name in ("greedy", "success") for when in ("before", "after")}
    summary |= {"eval/pass@2/before": 0.0, "eval/pass@8/after": 0.5, "eval/tasks": 8}
    assert what_was_learned(summary | {"eval/success/after": 0.5}, 8, lr=1e-6) == (
        "held-out success: greedy 0.000 -> 0.000, sampled 0.000 -> 0.500"
    )


@pytest.mark.parametrize(
    ("trained", "steps", "tasks", "says"),
    [(0.75, 5, 32, True), (0.65, 5, 200, False), (0.75, 4, 32, False), (0.75, 5, 31, False)],
)
def test_training_success_far_above_held_out_success_is_said(
    trained: float, steps: int, tasks: int, says: bool
) -> None:
    summary = {f"eval/{name}/{when}": 0.5 for name in ("greedy", "success", "pass@4") for when in ("before", "after")}
    summary |= {"train/success": trained, "train/steps": steps, "eval/tasks": tasks}
    said = what_was_learned(summary, 4, lr=1e-6)
    assert ("memorised, at least in part: training success is 0.750, 0.250 above held-out success" in said) is says


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be named: the built-in one, untrained."""
    folder = tmp_path_factory.mktemp("base")
    asyncio.run(run_evaluation(preset("calculator_from_scratch", *SMALL), folder / "first"))
    from mtgrpo.model.load import load_model, save_weights, saved_weights  # noqa: PLC0415
    from mtgrpo.model.settings import ModelSettings  # noqa: PLC0415
    from mtgrpo.model.tokenizer import load_tokenizer  # noqa: PLC0415
    from mtgrpo.weights.checkpoint import tokenizer_files  # noqa: PLC0415

    model = load_model(ModelSettings("tiny"), seed=0).cpu()
    (folder / "model").mkdir()
    save_weights(model, folder / "model", saved_weights(model))
    for name, content in tokenizer_files(load_tokenizer("tiny")).items():
        (folder / "model" / name).write_bytes(content)
    return folder


def test_a_model_without_a_checkpoint_is_measured(base: Path, tmp_path: Path) -> None:
    asyncio.run(run_evaluation(preset("calculator", *SMALL, f"model.name={base / 'model'}"), tmp_path))
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (found["tasks"], found["samples"]) == (3, 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads((base / "first" / "summary.json").read_text())  # the same weights
    assert summary["eval/success"] == found["shares"]["success"]["mean"]


def test_a_set_takes_over_the_prompt_of_a_run_that_has_one() -> None:
    def prompts(*words: str) -> tuple[str, str]:
        experiment = preset("jsonl", "task.path=rows.jsonl", "eval.sets={easy: {task: gsm8k}}", *words)
        return experiment.task.system_prompt, task_sets(experiment)["easy"].system_prompt

    assert prompts("task.system_prompt=Say it.") == ("Say it.", "Say it.")
    own, of_set = prompts("task.system_prompt=''")
    assert own == "" and "####" in of_set  # jsonl has none to give: its rows may hold theirs


def test_several_sets_and_a_control_without_tools_are_measured_in_one_evaluation(base: Path, tmp_path: Path) -> None:
    rows = ({"prompt": f"{n} + {n}?", "answer": 2 * n} for n in range(5))
    (tmp_path / "easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calculator = "{min_steps: 1, max_steps: 1}"
    sets = f"eval.sets={{easy: {{task: jsonl, val_files: ['{tmp_path}/easy.jsonl']}}, calculator: {calculator}}}"
    words = (*SMALL, f"model.name={base / 'model'}", "eval.no_tools=true", sets)
    asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    alone = json.loads((base / "first" / "summary.json").read_text())
    assert {name: summary[name] for name in alone} == alone  # the run's own tasks, as if they were alone
    for name in ("no_tools", "easy", "calculator"):
        assert 0 <= summary[f"eval/{name}/success"] <= summary[f"eval/{name}/pass@2"] <= 1
        assert 0 <= summary[f"eval/{name}/greedy"] <= 1
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {name: each["tasks"] for name, each in found["sets"].items()} == {"no_tools": 3, "easy": 3, "calculator": 3}
    assert found["tools_against_none"]["p_value"] == 1.0  # an untrained model solves nothing either way
    kept = sorted(path.stem for path in (tmp_path / "run" / "trajectories").iterdir())
    names = ("evaluation_after", "greedy_after")
    assert kept == [file + of for file in names for of in ("", "_calculator", "_easy", "_no_tools")]
    lines = (tmp_path / "run/trajectories/evaluation_after_easy.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["0", "0", "2", "2", "4", "4"]


def test_a_set_that_cannot_be_measured_leaves_the_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = evaluate._groups

    async def away(runner: Any, scope: str, name: str, *rest: Any) -> list[Group]:
        if name == "hard":
            raise AllFailedError("every conversation failed")
        return await measure(runner, scope, name, *rest)

    monkeypatch.setattr(evaluate, "_groups", away)
    words = (*SMALL, f"model.name={base / 'model'}", "eval.sets={hard: {task: calculator}}")
    asyncio.run(run_evaluation(preset("calculator", *words), tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "eval/success" in summary and "eval/hard/success" not in summary
    assert "evaluation of hard: not measured: every conversation failed" in (tmp_path / "notes.txt").read_text()


def test_tools_are_compared_with_none_task_by_task() -> None:
    with_tools = [group(n, "1", ["1", "1"]) for n in range(8)]
    without = [group(n, "1", ["0", "0"]) for n in range(8)]
    found = control({"": EvaluationGroups(with_tools, []), "no_tools": EvaluationGroups(without, [])}, 1.0)
    assert found is not None and found.difference.mean == 1.0 and found.p_value == 2 / 2**8
    assert str(found).startswith("+100.0 points (") and str(found).endswith(", p = 0.0078")
    assert control({"": EvaluationGroups(with_tools, [])}, 1.0) is None
    with_tools[:3] = [group(9, "1", texts) for texts in (["1", "1"], ["1", "1"], ["0", "0"])]  # of the same id
    without[3].trajectories = []  # all failed
    found = control({"": EvaluationGroups(with_tools, []), "no_tools": EvaluationGroups(without, [])}, 1.0)
    assert found is not None and found.difference.mean == pytest.approx(6 / 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.no_tools=true", "environment.tools=[]"], "eval.no_tools=true: the environment has no tools"),
        (["eval.sets=[nowhere]"], "there is no task named 'nowhere'"),
        (["eval.sets={a/b: {task: jsonl}}"], "'a/b' cannot be the name of a set"),
        (["eval.sets={no_tools: {task: jsonl}}"], "'no_tools' cannot be the name of a set"),
        (["eval.sets={mine: {task: jsonl, pth: x}}"], "the task set mine has no setting 'pth'"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(preset("calculator", *SMALL, *words))


@pytest.mark.parametrize("recipe", sorted(set(recipes()) - {"lora"}))  # which is put behind another
def test_every_recipe_with_tools_has_a_control_without(recipe: str) -> None:
    environment = preset(recipe).environment
    if isinstance(environment, ToolUse) and environment.tools:
        bare = preset(recipe, "eval.no_tools=true").environment
        assert isinstance(bare, ToolUse) and bare.without_tools().tool_specs == ()
    else:
        with pytest.raises(ConfigError, match="no tools that could be left out"):
            preset(recipe, "eval.no_tools=true")


COUNTING = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.types import Message, ToolCall


@dataclass
class Counting(ToolUse):
    \"\"\"Two turns for everybody. Writes down who begins, and asks the process to end where the file `stop` says.\"\"\"

    async def start(self, task):
        self.turn = 0
        with (Path(__file__).parent / "begun").open("a") as begun:
            begun.write(task.id + "\\n")
        return await super().start(task)

    async def step(self, message):
        self.turn += 1
        stop = Path(__file__).parent / "stop"
        if stop.exists() and len((Path(__file__).parent / "begun").read_text().split()) == int(stop.read_text()):
            stop.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        calls = (ToolCall("calculator", {"expression": "1 + 1"}),) if self.turn < 2 else ()
        return await super().step(Message("assistant", tool_calls=calls))
"""


def test_an_evaluation_that_was_ended_goes_on_with_what_it_has(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(COUNTING)
    words = (*SMALL, f"model.name={base / 'model'}", f"environment={own}:Counting", "rollout.max_concurrent=1", ENDING)
    asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "at_once"))
    whole = (tmp_path / "begun").read_text().split()
    assert len(whole) == 3 * 2 + 3
    (tmp_path / "begun").unlink()
    (tmp_path / "stop").write_text("6")  # the last sampled conversation, in its first turn
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))
    assert not (tmp_path / "run" / "evaluation.json").exists()
    (tmp_path / "begun").unlink()
    asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))
    begun = (tmp_path / "begun").read_text().split()
    assert begun == [whole[4], whole[5], *whole[6:]]  # of the third task both samples: one is played to its end again
    ended, gone_on = (tmp_path / name / "trajectories" / "evaluation_after.jsonl" for name in ("at_once", "run"))
    first, second = (
        [without_times(json.loads(line)) for line in path.read_text().splitlines()] for path in (ended, gone_on)
    )
    assert first[:5] == second[:5]  # token for token; what the last says after its first turn is drawn anew
    assert "2 groups are taken back, 2 conversations had begun" in (tmp_path / "run" / "notes.txt").read_text()
    with pytest.raises(ConfigError, match=r"has an evaluation with other settings, take another folder: eval\.tasks"):
        record = tmp_path / "run" / "journal.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "eval.tasks": "9"}))
        asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))
    for strange in ("[]", "9", "{", '{"seed": []}'):
        record.write_text(strange)
        with pytest.raises(ConfigError, match=r"journal\.json does not say with which settings"):
            asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))


def test_tasks_of_one_id_are_told_apart(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "same", "prompt": "12 + 3", "answer": "15"}\n' * 3)
    words = (
        *SMALL,
        f"model.name={base / 'model'}",
        "task=jsonl",
        f"task.val_files=[{rows}]",
        f"task.path={rows}.jsonl",
    )
    rows.with_suffix(".jsonl.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    asyncio.run(run_evaluation(preset("calculator", *words), tmp_path / "run"))
    file = tmp_path / "run" / "trajectories" / "evaluation_after.jsonl"
    said = {json.dumps(json.loads(line)["messages"]) for line in file.read_text().splitlines()}
    assert len(said) == 6  # each sampled with random numbers of its own
    before = (tmp_path / "run" / "evaluation.json").read_bytes()
    asyncio.run(
        run_evaluation(preset("calculator", *words), tmp_path / "run")
    )  # all is taken back, each where it belongs
    assert (tmp_path / "run" / "evaluation.json").read_bytes() == before
    assert {json.dumps(json.loads(line)["messages"]) for line in file.read_text().splitlines()} == said


def test_an_evaluation_below_the_least_fails_when_all_is_written(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"held-out success is 0\.000, below eval\.fail_under=0\.5"):
        asyncio.run(run_evaluation(preset("calculator_from_scratch", *SMALL, "eval.fail_under=0.5"), tmp_path))
    assert (tmp_path / "evaluation.json").exists()


def test_what_is_collected_is_what_the_policy_says_and_can_be_learned_from(base: Path, tmp_path: Path) -> None:
    words = ("collect.tasks=5", "collect.samples=2", "rollout.prompts_per_step=2", f"model.name={base / 'model'}")
    asyncio.run(run_collection(preset("calculator", *SMALL, *words), tmp_path / "full"))
    asyncio.run(run_collection(preset("calculator", *SMALL, *words, "collect.form=messages"), tmp_path / "plain"))
    full = [json.loads(line) for line in (tmp_path / "full" / "collected.jsonl").read_text().splitlines()]
    plain = [json.loads(line) for line in (tmp_path / "plain" / "collected.jsonl").read_text().splitlines()]
    assert len(full) == len(plain) == 10
    assert len({row["task"] for row in full}) == 5
    collected = Conversations(path=str(tmp_path / "full" / "collected.jsonl"))
    for task in collected.stream(Split.train, 0, repeat=False):
        assert {"start", "steps", "values"} <= task.metadata.keys()  # which tools and rewards may read
    for row, messages in zip(full, plain, strict=True):
        assert [m["content"] for m in messages["messages"]] == [m["content"] for m in row["messages"]]
        assert messages["tools"][0]["function"]["name"] == "calculator"


@pytest.mark.parametrize("form", ["trajectories", "messages"])
def test_a_table_holds_what_the_lines_hold(form: str, base: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    words = ("collect.tasks=4", "rollout.prompts_per_step=2", f"model.name={base / 'model'}", f"collect.form={form}")
    asyncio.run(run_collection(preset("calculator", *SMALL, *words), tmp_path))
    asyncio.run(run_collection(preset("calculator", *SMALL, *words, "collect.file=said.parquet"), tmp_path))
    table = parquet.ParquetFile(tmp_path / "said.parquet")
    assert table.num_row_groups == 2  # as it was written: two tasks at a time
    rows = [json.loads(line) for line in (tmp_path / "collected.jsonl").read_text().splitlines()]
    for row, cells in zip(rows, table.read().to_pylist(), strict=True):
        for name, value in row.items():
            if name in ("tools", "metadata"):
                assert json.loads(cells[name]) == value
            elif name in ("messages", "turns", "calls"):
                for whole, cell in zip(value, cells[name], strict=True):
                    assert {key: cell[key] for key in whole if key != "tool_calls"} == {
                        key: whole[key] for key in whole if key != "tool_calls"
                    }
            else:
                assert cells[name] == value


def test_calls_and_lone_surrogates_are_in_the_table_too(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    said = trajectory(Task("t", (Message("user", "?"),)), "lone \ud83d")
    call = ToolCall("search", {"query": "é", "most": [1, None]})
    said.turns = [dataclasses.replace(said.turns[0], message=Message("assistant", "lone \ud83d", tool_calls=(call,)))]
    said.components = {"numeric": 0.5}
    with open_rows(tmp_path / "a.parquet", fine_tuning=False) as write:
        write([trajectory_row(said)])
        write([])
    (row,) = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["messages"][1]["content"] == "lone \\ud83d" and json.loads(row["components"]) == {"numeric": 0.5}
    assert row["messages"][1]["tool_calls"][0]["name"] == "search"
    assert json.loads(row["messages"][1]["tool_calls"][0]["arguments"]) == call.arguments
    with open_rows(tmp_path / "b.parquet", fine_tuning=True) as write:
        write([fine_tuning_row(dataclasses.replace(said, tools=(ToolSpec("search", "finds", {"type": "object"}),)))])
    (row,) = parquet.read_table(tmp_path / "b.parquet").to_pylist()
    assert row["messages"][1]["tool_calls"][0]["function"]["name"] == "search"
    assert json.loads(row["tools"])[0]["function"]["name"] == "search"


def test_tasks_of_one_id_are_collected_with_random_numbers_of_their_own(base: Path, tmp_path: Path) -> None:
    (tmp_path / "twice.jsonl").write_text(2 * '{"id": "a", "prompt": "Go on.", "answer": "1"}\n')
    (tmp_path / "other.jsonl").write_text('{"id": "b", "prompt": "Begin.", "answer": "1"}\n')
    words = ("task=jsonl", f"task.train_files=['{tmp_path}/twice.jsonl']", f"task.val_files=['{tmp_path}/other.jsonl']")
    asyncio.run(run_collection(preset("calculator", *SMALL, *words, f"model.name={base / 'model'}"), tmp_path))
    said = [json.loads(line)["messages"] for line in (tmp_path / "collected.jsonl").read_text().splitlines()]
    assert len(said) == 2 and said[0] != said[1]


def test_a_model_is_told_by_its_files_alone(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1")
    (tmp_path / "run").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert evaluate._files(tmp_path).keys() == {"weights"}


@pytest.mark.parametrize(
    ("at_once", "most", "failing", "ended"),
    [
        (2, 2, range(4, 8), "tasks 3 to 4 failed, by no 4"),
        (1, 2, range(4, 8), "tasks 3 to 4 failed, by no 6"),
        (1, 20, range(4, 8), ""),
        (2, 20, range(4), "tasks 1 to 2 failed, by no 0"),
        (1, 20, range(2), "task 1 failed, by no 0"),
    ],
)
async def test_an_engine_that_breaks_ends_a_collection_and_what_failed_is_told(
    at_once: int, most: int, failing: range, ended: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, played = RolloutRunner._attempt, itertools.count()

    async def breaking(runner: RolloutRunner, task: Task, *which: int) -> Trajectory:
        if (number := next(played)) in (1, *failing):
            return Trajectory(task, status=Status.FAILED, reason=f"no {number}")
        return await real(runner, task, *which)

    monkeypatch.setattr(RolloutRunner, "_attempt", breaking)
    monkeypatch.setattr(evaluate, "_MOST_FAILED", most)
    words = ("collect.tasks=6", "collect.samples=2", f"rollout.prompts_per_step={at_once}", "rollout.retries=0")
    experiment = preset("calculator", *SMALL, *words, f"model.name={base / 'model'}")
    with pytest.raises(AllFailedError, match=f"every conversation of {ended}") if ended else nullcontext():
        await run_collection(experiment, tmp_path)
    written = 3 if 4 in failing else 0
    assert len((tmp_path / "collected.jsonl").read_text().splitlines()) == (written if ended else 7)
    first = f"of {2 * at_once} conversations failed, the first because of no {0 if 0 in failing else 1}"
    assert first in (tmp_path / "notes.txt").read_text()


def test_successes_alone_are_collected(base: Path, tmp_path: Path) -> None:
    words = ("collect.tasks=2", "collect.successes=true", f"model.name={base / 'model'}")
    asyncio.run(run_collection(preset("calculator", *SMALL, *words), tmp_path))
    assert (tmp_path / "collected.jsonl").read_text() == ""  # an untrained model solves nothing


def test_what_an_environment_opens_with_is_kept() -> None:
    found = trajectory(Task("t", (Message("user", "Play."),)), "up")
    found.opening = (Message("user", "Play."), Message("user", "SFFF"))
    assert [m["content"] for m in trajectory_row(found)["messages"]] == ["Play.", "SFFF", "up"]
    assert [m["content"] for m in fine_tuning_row(found)["messages"]] == ["Play.", "SFFF", "up"]


ROW = {
    "messages": [
        {"role": "system", "content": "Compute."},
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'}}
            ],
        },
        {"role": "tool", "name": "calculator", "content": "5"},
        {"role": "assistant", "content": "#### 5", "reasoning_content": "easy"},
    ]
}


def test_conversations_are_tasks_with_their_demonstration(tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    source = Conversations(path=str(file), eval_fraction=0.0)
    task = next(iter(source.stream(Split.train, 0)))
    assert [m.role for m in task.messages] == ["system", "user"]
    said = source.demonstration(task, 0)
    assert [m.role for m in said] == ["assistant", "tool", "assistant"]
    assert said[0].tool_calls[0].arguments == {"expression": "2 + 3"} and said[2].reasoning == "easy"
    experiment = preset("calculator", f"sft.demonstrations={file}")
    experiment.check_warm_start()
    assert type(experiment.demonstrated) is Conversations


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}], "text"]
)
def test_a_conversation_without_a_demonstration_is_refused(messages: Any, tmp_path: Path) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(ConfigError, match=r"said\.jsonl, line 1: (needs a message before|no list of messages)"):
        Conversations(path=str(file), eval_fraction=0.0).stream(Split.train, 0)
