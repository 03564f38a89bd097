"""The recipes on real files, through the command line, from the warm start to the last evaluation; a few steps each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mtgrpo
from mtgrpo.model import smollm2
from test_sandbox import require_bubblewrap

pytestmark = pytest.mark.real

SMALL = [
    "sft.steps=20",
    "trainer.steps=2",
    "rollout.prompts_per_step=4",
    "eval.tasks=8",
    "eval.samples=2",
    "eval.every_steps=1",
    "sampling.max_new_tokens=24",
]


RECIPES = ["gsm8k_tiny", "word_problems_tiny", "calculator", "search_qa_tiny", "code_tiny", "reasoning_gym_tiny"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs_to_the_end(recipe: str, tmp_path: Path, data_folder: Path) -> None:
    command = [sys.executable, "-m", "mtgrpo", "train", f"recipe={recipe}", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    if recipe == "code_tiny":
        require_bubblewrap()
    env = {"PATH": os.environ["PATH"] if recipe == "code_tiny" else "", "MTGRPO_DATA": str(data_folder)}
    env["PYTHONPATH"] = str(Path(mtgrpo.__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train/steps"] == 2
    for name in ("success", "greedy", "pass@2"):
        assert 0 <= summary[f"eval/{name}/before"] <= 1
        assert 0 <= summary[f"eval/{name}/after"] <= 1
    played = [json.loads(line) for line in (tmp_path / "run/trajectories/step_000002.jsonl").read_text().splitlines()]
    assert len(played) == 4 * 8
    assert {row["status"] for row in played} <= {"completed", "truncated"}
    if recipe == "code_tiny":  # what a reward is made of is logged by name
        metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert {"reward/environment/mean", "reward/format/mean"} <= set().union(*metrics)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["search_qa_tiny", "ifeval_tiny", "code_tiny", "reasoning_gym_tiny"])
def test_the_whole_recipe_measures_before_and_after(recipe: str, tmp_path: Path, data_folder: Path) -> None:
    if recipe == "code_tiny":
        require_bubblewrap()
    if recipe == "ifeval_tiny" and not smollm2.folder().is_dir():
        pytest.skip("the model is not here: mtgrpo data smollm2")
    command = [sys.executable, "-m", "mtgrpo", "train", f"recipe={recipe}", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MTGRPO_DATA": str(data_folder)})
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(
        0 <= summary[f"eval/{name}/{when}"] <= 1 for name in ("success", "reward") for when in ("before", "after")
    )
    if recipe in ("ifeval_tiny", "reasoning_gym_tiny"):  # the others are far beyond such a model
        assert summary["eval/reward/after"] > 0.1


def test_a_saved_policy_measures_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = [sys.executable, "-m", "mtgrpo", "train", *SMALL, f"hydra.run.dir={run}", "log=[jsonl]"]
    subprocess.run(train, check=True)
    checkpoint = run / "checkpoints" / "step_000002"
    measure = [sys.executable, "-m", "mtgrpo", "eval", f"checkpoint={checkpoint}", f"hydra.run.dir={tmp_path / 'eval'}"]
    subprocess.run(measure, check=True)
    trained = json.loads((run / "summary.json").read_text())
    measured = json.loads((tmp_path / "eval" / "summary.json").read_text())
    for name in ("eval/success", "eval/greedy", "eval/turns", "eval/sampled_tokens"):
        assert measured[name] == trained[f"{name}/after"]
