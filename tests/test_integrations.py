"""Things of others: found by name, imported by nothing, and not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Run
from mtgrpo.config.experiment import groups
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.log import Sink
from mtgrpo.parts import extension
from mtgrpo.rewards import Reward
from mtgrpo.tasks import TaskSource
from mtgrpo.tools.search import SearchIndex

FAMILY = '''
"""A task source of a test."""
from dataclasses import dataclass
from mtgrpo.tasks.word_problems import WordProblems
@dataclass
class {name}(WordProblems):
    """Word problems again."""
'''


def test_each_kind_finds_its_own() -> None:
    offered = {group: set(options(group)) for group in groups()}
    assert {"verifiers", "reasoning_gym", "ifeval", "bfcl", "humaneval", "triviaqa", "gsm8k"} <= offered["task"]
    assert {"reasoning_gym", "ifeval"} <= offered["reward"] and "bfcl" not in offered["reward"]
    assert {"gymnasium", "textarena", "skyrl_gym"} <= offered["environment"]
    assert "verifiers" in offered["agent"]
    assert offered["engine"] == {"auto", "local", "server"}
    assert set(extension.options("mtgrpo.log", Sink)) == {
        *("console", "jsonl", "mlflow", "tensorboard", "trackio", "wandb"),
    }
    assert set(extension.options("mtgrpo.tools", SearchIndex)) == {"bm25s", "lucene"}


def test_two_options_of_one_kind_are_called_as_their_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "family"
    folder.mkdir()
    for name in ("sums", "products"):
        (folder / f"{name}.py").write_text(FAMILY.format(name=name.capitalize()))
    package = extension.importlib.import_module(extension.INTEGRATIONS)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package.__spec__, "submodule_search_locations", package.__path__)
    extension._integrations.cache_clear()
    try:
        found = extension.options("mtgrpo.tasks", TaskSource)
        assert {"sums", "products"} <= set(found) and "family" not in found
        assert extension.find("mtgrpo.tasks", "sums", TaskSource) is found["sums"]
        (folder / "products.py").unlink()
        extension._integrations.cache_clear()
        assert "family" in extension.options("mtgrpo.tasks", TaskSource)
    finally:
        extension._integrations.cache_clear()


def test_what_is_chosen_in_a_setting_is_found_by_name_too(run: Run) -> None:
    wrong = "environment.tools={search: {corpus: nowhere.jsonl, backend: lucent}}"
    code, _, errors = run("train", "recipe=search_qa_tiny", wrong, "--dry-run")
    assert code == 2 and "no search backend named 'lucent'; did you mean lucene? known: bm25s, lucene" in errors
    for words, known in (
        (("engine=server", "engine.kind=sglong", "engine.url=[http://localhost]"), "sglang"),
        (("recipe=code_tiny", "environment.sandbox.kind=fushion"), "fusion"),
    ):
        code, _, errors = run("train", *words, "--dry-run")
        assert code == 2 and f"did you mean {known}?" in errors, errors


def test_without_the_folder_the_default_trains(tmp_path: Path) -> None:
    words = ["train", "trainer.steps=2", "sft.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2"]
    words += ["eval.tasks=2", "eval.samples=1", "checkpoint.every_steps=0", f"hydra.run.dir={tmp_path / 'run'}"]
    code = f"import sys; sys.modules['{extension.INTEGRATIONS}'] = None; from mtgrpo.cli import main; main({words!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "run" / "checkpoints").glob("step_*2"))


def test_a_name_that_nobody_offers_is_refused_without_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extension.INTEGRATIONS, None)  # pyright: ignore[reportArgumentType]
    extension._integrations.cache_clear()
    try:
        with pytest.raises(ConfigError, match="there is no reward named 'ifeval'"):
            extension.find_class("mtgrpo.rewards", "ifeval", Reward)
    finally:
        extension._integrations.cache_clear()
