"""The embedded default learns, and does not where it must not. Slow: minutes each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Summary = dict[str, float]


def mtgrpo(*words: str, folder: Path) -> Summary:
    command = [sys.executable, "-m", "mtgrpo", *words, f"hydra.run.dir={folder}", "log=[jsonl]"]
    subprocess.run(command, check=True)
    return json.loads((folder / "summary.json").read_text())


def test_grpo_learns_from_the_weights_that_ship(tmp_path: Path) -> None:
    """On a seed that nothing was calibrated on. The start fails, greedily too, though it knows how."""
    summary = mtgrpo("train", "seed=77", folder=tmp_path / "run")
    for name in ("success", "greedy"):
        assert summary[f"eval/{name}/before"] <= 0.35
        assert summary[f"eval/{name}/after"] >= 0.9
    assert summary["eval/pass@8/before"] >= 0.8
    assert summary["eval/tool_rate/after"] > summary["eval/tool_rate/before"] + 0.3


def test_a_warm_start_of_its_own_does_as_well(tmp_path: Path) -> None:
    summary = mtgrpo("train", "recipe=calculator_from_scratch", "seed=77", folder=tmp_path / "run")
    assert 0.10 <= summary["eval/success/before"] <= 0.35
    assert summary["eval/greedy/before"] <= 0.35
    assert summary["eval/success/after"] >= 0.85


def test_shuffled_advantages_do_not_learn(tmp_path: Path) -> None:
    summary = mtgrpo("train", "seed=77", "debug.advantages=shuffled", "trainer.steps=30", folder=tmp_path / "run")
    assert summary["eval/success/after"] - summary["eval/success/before"] <= 0.10


def test_flipped_advantages_unlearn(tmp_path: Path) -> None:
    summary = mtgrpo("train", "seed=77", "debug.advantages=flipped", "trainer.steps=15", folder=tmp_path / "run")
    assert summary["eval/success/after"] < summary["eval/success/before"]
