"""Faults planted in engine and trainer: each is refused, ends the run or is said and gone round within two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fast_part import fast_part
from learning_plants import CHANGES, CONTROLS, FAULTS, SAID, USUAL, alarm, is_found, losses, told_of
from plants import Patch, in_trainer, run, shifted_rows


@pytest.mark.parametrize("name", fast_part(FAULTS, 3))
def test_a_planted_fault_is_caught(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    told = told_of(name, tmp_path, monkeypatch)
    assert is_found(name, told), told


def test_the_table_of_faults_is_what_is_tested() -> None:
    found_by: dict[str, list[str]] = {}
    for name in FAULTS:
        found_by.setdefault(SAID.get(name, USUAL), []).append(name)
    rows = [f"| {said} | {len(names)}: {names[0]} |" for said, names in found_by.items()]
    page = (Path(__file__).parent.parent / "docs" / "self_checks.md").read_text()
    assert page.partition("| what the run says | faults |\n| --- | --- |\n")[2].splitlines() == rows


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    with pytest.MonkeyPatch.context() as patch:
        return losses(tmp_path_factory.mktemp("untouched"), patch, "pass")


@pytest.mark.parametrize("name", fast_part(CHANGES, 3))
def test_what_a_reward_does_to_its_trajectory_reaches_no_batch(
    name: str, untouched: list[tuple[float, float]], tmp_path: Path, monkeypatch: Patch
) -> None:
    assert losses(tmp_path, monkeypatch, CHANGES[name]) == untouched and len(untouched) == 2


def test_the_page_names_what_rewards_may_do() -> None:
    page = (Path(__file__).parent.parent / "docs" / "self_checks.md").read_text()
    assert all(f"- {name}\n" in page for name in CHANGES)


@pytest.mark.parametrize("words", fast_part(CONTROLS, 4))
def test_no_sound_run_is_refused(words: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert alarm(tmp_path, monkeypatch, words) == ""


def test_without_a_fault_nothing_is_said(tmp_path: Path, monkeypatch: Patch) -> None:
    told = run(tmp_path, monkeypatch)
    assert not any("rounding" in text for text in told)
    assert any("fused decoding" in text for text in told)


def test_padded_rows_are_compared_too(tmp_path: Path, monkeypatch: Patch) -> None:
    in_trainer(shifted_rows)(monkeypatch)
    with pytest.raises(RuntimeError, match="such contexts cannot be trained"):
        run(tmp_path, monkeypatch, "model.attention=sdpa")
