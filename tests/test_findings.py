"""What an evaluation says, and what `mtgrpo collect` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.config.compose import preset
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.record.trajectories import fine_tuning, record
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.stages.collect import run_collection
from mtgrpo.stages.evaluate import run_evaluation
from mtgrpo.stages.findings import Findings
from mtgrpo.tasks import Split
from mtgrpo.tasks.conversations import Conversations
from mtgrpo.types import CallRecord, Finish, Group, Message, Status, Task, Trajectory, Turn

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


def test_an_evaluation_finds_the_numbers_of_its_formulas() -> None:
    groups = [
        group(0, "#### 1", ["#### 1", "#### 1", "#### 2", "#### 3"], level=1),
        group(1, "#### 1", ["#### 2", "#### 2", "#### 1", "#### 3"], level=2),
        group(2, "#### 1", ["#### 1", "no number", "no number", "no number"], level=2),
    ]
    groups[2].trajectories.append(trajectory(groups[2].task, "#### 1", status=Status.FAILED))
    found = Findings.of(groups, Numeric(), greedy=2 / 3)
    assert (found.tasks, found.samples) == (3, 4)
    assert found.shares["success"].mean == pytest.approx(4 / 12)
    assert found.shares["pass@2"].mean == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)  # 1 - C(n - c, 2) / C(4, 2)
    assert found.shares["pass@4"].mean == 1.0
    assert found.shares["greedy"].mean == pytest.approx(2 / 3)
    assert found.means["majority vote"] == pytest.approx((1 + 0 + 1) / 3)  # no number is no vote
    assert found.means["best reward of 4"] == 1.0
    assert {name: e.mean for name, e in found.breakdowns["level"].items()} == {"1": 0.5, "2": 0.25}
    assert found.breakdowns["turns"]["1"].mean == pytest.approx(3 / 6)
    assert found.breakdowns["calls of tools"]["1"].mean == pytest.approx(1 / 6)
    assert "  pass@4 " in found.table() and "  2 level " in found.table()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be named: the built-in one, untrained."""
    folder = tmp_path_factory.mktemp("base")
    run_evaluation(preset("calculator", *SMALL), folder / "first", None)
    from mtgrpo.checkpoint import tokenizer_files  # noqa: PLC0415
    from mtgrpo.model.load import load_model, load_tokenizer, save_weights, saved_weights  # noqa: PLC0415
    from mtgrpo.model.settings import ModelSettings  # noqa: PLC0415

    model = load_model(ModelSettings("tiny"), seed=0).cpu()
    (folder / "model").mkdir()
    save_weights(model, folder / "model", saved_weights(model))
    for name, content in tokenizer_files(load_tokenizer("tiny")).items():
        (folder / "model" / name).write_bytes(content)
    return folder


def test_a_model_without_a_checkpoint_is_measured(base: Path, tmp_path: Path) -> None:
    run_evaluation(preset("calculator", *SMALL, f"model.name={base / 'model'}"), tmp_path, None)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (found["tasks"], found["samples"]) == (3, 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads((base / "first" / "summary.json").read_text())  # the same weights
    assert summary["eval/success"] == found["shares"]["success"]["mean"]


def test_an_evaluation_below_the_least_fails_when_all_is_written(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"held-out success is 0\.000, below eval\.fail_under=0\.5"):
        run_evaluation(preset("calculator", *SMALL, "eval.fail_under=0.5"), tmp_path, None)
    assert (tmp_path / "evaluation.json").exists()


def test_what_is_collected_is_what_the_policy_says_and_can_be_learned_from(base: Path, tmp_path: Path) -> None:
    words = ("collect.tasks=5", "collect.samples=2", "rollout.prompts_per_step=2", f"model.name={base / 'model'}")
    run_collection(preset("calculator", *SMALL, *words), tmp_path / "full", None) if (
        tmp_path / "full"
    ).mkdir() is None else 0
    (tmp_path / "plain").mkdir()
    run_collection(preset("calculator", *SMALL, *words, "collect.form=messages"), tmp_path / "plain", None)
    full = [json.loads(line) for line in (tmp_path / "full" / "collected.jsonl").read_text().splitlines()]
    plain = [json.loads(line) for line in (tmp_path / "plain" / "collected.jsonl").read_text().splitlines()]
    assert len(full) == len(plain) == 10
    assert len({row["task"] for row in full}) == 5
    for row, messages in zip(full, plain, strict=True):
        assert [m["content"] for m in messages["messages"]] == [m["content"] for m in row["messages"]]
        assert messages["tools"][0]["function"]["name"] == "calculator"


def test_successes_alone_are_collected(base: Path, tmp_path: Path) -> None:
    words = ("collect.tasks=2", "collect.successes=true", f"model.name={base / 'model'}")
    run_collection(preset("calculator", *SMALL, *words), tmp_path, None)
    assert (tmp_path / "collected.jsonl").read_text() == ""  # an untrained model solves nothing


def test_what_an_environment_opens_with_is_kept() -> None:
    found = trajectory(Task("t", (Message("user", "Play."),)), "up")
    found.opening = (Message("user", "Play."), Message("user", "SFFF"))
    assert [m["content"] for m in record(found)["messages"]] == ["Play.", "SFFF", "up"]
    assert [m["content"] for m in fine_tuning(found, ())["messages"]] == ["Play.", "SFFF", "up"]


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
