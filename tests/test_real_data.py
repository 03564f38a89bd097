"""The recipes on real files, through the command line, from the warm start to the last evaluation; a few steps each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("recipe", ["gsm8k_tiny", "word_problems_tiny", "calculator"])
def test_recipe_runs_to_the_end(recipe: str, tmp_path: Path, data_folder: Path) -> None:
    command = [sys.executable, "-m", "mtgrpo", "train", f"recipe={recipe}", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "", "MTGRPO_DATA": str(data_folder)})
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["train/steps"] == 2
    for name in ("success", "greedy", "pass@2"):
        assert 0 <= summary[f"eval/{name}/before"] <= 1
        assert 0 <= summary[f"eval/{name}/after"] <= 1
    played = [json.loads(line) for line in (tmp_path / "run/trajectories/step_000002.jsonl").read_text().splitlines()]
    assert len(played) == 4 * 8
    assert {row["status"] for row in played} <= {"completed", "truncated"}


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
