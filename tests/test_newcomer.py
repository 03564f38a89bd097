"""The files of `newcomer/`, one of each kind, as somebody would write them on the first day: copied, and run."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import cli
from mtgrpo.parts import extension

FILES = Path(__file__).parent / "newcomer"
SMALL = [
    *("trainer.steps=1", "sft.steps=0", "rollout.prompts_per_step=2", "rollout.group_size=4", "eval.tasks=1"),
    *("model.name=tiny", "sampling.max_new_tokens=8", "eval.samples=2", "environment.max_turns=3", "log=[jsonl]"),
    f"sampling.stop_ids={list(range(1024))}".replace(" ", ""),  # a fresh model would hardly ever end a turn
]
MOST_LINES = {"tool": 3, "reward": 13, "task": 19, "algorithm": 16, "engine": 40, "sink": 21}  # what a new user writes
SHELL = "environment=HERE/environment.py:Shell"
ALL = {
    "tool": ["environment.tools=[HERE/tool.py:divisors]"],
    "tool_with_settings": [
        "environment.tools=[calculator,HERE/tool_with_settings.py:search]",
        "environment.tools.search.book=HERE/book.txt",
        "environment.tools.calculator.max_digits=20",
    ],
    "environment": [SHELL, "reward=environment", "advantage=return_to_go", "algorithm=reinforce_pp"],
    "reward": ["reward=HERE/reward.py:Short", "reward.tokens=10"],
    "rewards": [
        "reward=[numeric,HERE/rewards.py:Tidy,HERE/rewards.py:Judge]",
        *("reward.Tidy.weight=0.5", "reward.Judge.weight=0.25", "reward.Judge.wait_s=0.0"),
    ],
    "task": ["task=HERE/task.py:Squares", "task.largest=9"],
    "condenser": ["condenser=HERE/condenser.py:Half", "condenser.when=every_turn", SHELL],
    "algorithm": ["algorithm=HERE/algorithm.py:Reinforce", "algorithm.centre=0.5"],
    "engine": ["engine=HERE/engine.py:Plain"],
    "sink": ["log=[jsonl,HERE/sink.py:RewardsOnly]", "log.RewardsOnly.path=HERE/rewards.txt"],
    "advantage": ["advantage=HERE/advantage.py:LastTurn", "advantage.share=0.25", SHELL],
}


def test_every_file_is_run_and_short() -> None:
    assert {path.stem for path in FILES.glob("*.py")} == set(ALL)
    lines = {path.stem: len(path.read_text().splitlines()) for path in FILES.glob("*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_LINES.get(name, 40)} == {}


def ran(folder: Path, words: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The metrics of the one step of a run, and its trajectories."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "book.txt").write_text("one\ntwo\n")
    with pytest.raises(SystemExit) as done:
        own = [word.replace("HERE", str(folder)) for word in words]
        cli.main(["train", *SMALL, *own, f"hydra.run.dir={folder}/run"])
    assert done.value.code in (0, None)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if line["stage"] == "reinforcement learning"]
    shown = (folder / "run" / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    return step, [json.loads(line) for line in shown]


@pytest.mark.parametrize("name", sorted(ALL))
def test_it_runs_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step, shown = ran(tmp_path / "own", ALL[name])
    assert len(shown) == 8 and step["rollout/failed"] == 0
    if name == "sink":
        written = (tmp_path / "own" / "rewards.txt").read_text().split()
        assert float(written[-1]) == pytest.approx(step["reward/mean"])
    if name == "rewards":
        for part in ("numeric", "Tidy", "Judge"):
            mean = sum(line["components"][part] for line in shown) / 8
            assert step[f"reward/{part}/mean"] == pytest.approx(mean)
        for line in shown:
            parts = line["components"]
            assert line["reward"] == pytest.approx(parts["numeric"] + 0.5 * parts["Tidy"] + 0.25 * parts["Judge"])
    if name == "environment":
        assert any(any(line["turn_rewards"]) for line in shown if "turn_rewards" in line)
        assert all(line["reward"] == sum(line.get("turn_rewards", [])) for line in shown)


def test_its_classes_are_found_in_another_process(tmp_path: Path) -> None:
    shutil.copy(FILES / "rewards.py", tmp_path)
    judge = extension.load_file(tmp_path / "rewards.py").Judge(wait_s=0.5)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(repr, (judge,)) == repr(judge)
