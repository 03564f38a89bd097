"""What a received record reaches: every setting says so itself, and nothing is reached without trust."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

import mtgrpo
from mtgrpo import cli
from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.trust import undeclared
from mtgrpo.engines import Engine
from mtgrpo.parts import Code, Data, Part, Parts, Reach, Text, Where
from mtgrpo.tools import Tool

HOSTILE = Path(__file__).with_name("hostile_records.py")


def settings_classes() -> set[type]:
    """Every dataclass of the package that holds settings: the experiment's, all parts, and what these hold."""
    for module in pkgutil.walk_packages(mtgrpo.__path__, "mtgrpo."):
        if not module.name.endswith(("__main__", "sandbox_init", "program", "triton_kernels")):
            importlib.import_module(module.name)
    waiting, found = [Experiment, Part, Engine, *groups().values()], set[type]()
    while waiting:
        cls = waiting.pop()
        if cls in found or not cls.__module__.startswith("mtgrpo.") or "extension" in cls.__module__:
            continue
        found.add(cls)
        waiting += type.__subclasses__(cls)
        if dataclasses.is_dataclass(cls) and not cls.__name__.startswith("_"):
            waiting += held(*typing.get_type_hints(cls).values())
    return {cls for cls in found if dataclasses.is_dataclass(cls) and not cls.__name__.startswith("_")}


def held(*hints: Any) -> Iterator[type]:
    for hint in hints:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield hint
        yield from held(*typing.get_args(hint))


def without_word(cls: type) -> list[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    own = [field.name for field in dataclasses.fields(cls) if not dataclasses.is_dataclass(hints[field.name])]
    return [f"{cls.__name__}.{name}" for name in own if undeclared(hints[name])]


def test_every_setting_says_what_it_reaches() -> None:
    classes = settings_classes()
    assert {"Experiment", "Judge", "Sandbox", "Mcp", "Server", "WandB", "Columns", "LoRA"} <= {
        c.__name__ for c in classes
    }
    assert len(classes) > 100
    assert [said for cls in classes for said in without_word(cls)] == []


@dataclasses.dataclass
class Forgetful:
    number: int | None
    path: str
    paths: list[str]
    anything: Any
    named: dict[str, str]
    text: Text
    texts: list[Text] | None
    code: dict[str, Code]
    data: Data
    parts: Annotated[list[Any], Parts("task")]
    where: Annotated[str, Where(Reach.file, "file:")]


def test_a_setting_that_says_nothing_is_found() -> None:
    assert without_word(Forgetful) == [f"Forgetful.{name}" for name in ("path", "paths", "anything", "named")]


def test_parts_name_kinds_that_there_are() -> None:
    marks = [
        mark
        for cls in settings_classes()
        for hint in typing.get_type_hints(cls, include_extras=True).values()
        for mark in getattr(hint, "__metadata__", ())
    ]
    kinds = {mark.kind for mark in marks if isinstance(mark, Parts)}
    assert kinds == {"tool", "task", "reward"} and kinds - {"tool"} <= set(groups()) and issubclass(Tool, Part)


def test_every_test_that_the_page_names_is_there() -> None:
    tests = Path(__file__).resolve().parent.parent
    named = set(re.findall(r"`(test_\w+)`", (tests.parent / "SECURITY.md").read_text()))
    there = {name for path in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 20 and named <= there


@pytest.fixture(scope="module")
def run_of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run, small and with a checkpoint."""
    folder = tmp_path_factory.mktemp("received") / "run"
    words = ["sft.steps=1", "sft.batch_size=2", "eval.tasks=2", "eval.samples=1", "sampling.max_new_tokens=4"]
    cli.run_command(["sft", *words, f"hydra.run.dir={folder}"])
    return folder


@functools.cache
def watched(folder: Path, every: int, *trust: str) -> dict[str, Any]:
    """What a process that reads the run's record reached, with one of `every` attacks."""
    words = [sys.executable, str(HOSTILE), str(folder), str(every), *trust]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder.with_name("settings"))}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_received_record_reaches_nothing_whatever_it_sets(run_of_others: Path) -> None:
    found = watched(run_of_others, 60)
    tries = sum(entry["tries"] for entry in found["attacks"].values())
    assert tries > 50 and found["refused"] > tries / 2
    assert [reached for entry in found["attacks"].values() for reached in entry["reached"]] == []


@pytest.mark.real
@pytest.mark.timeout(900)
def test_what_watches_sees_what_a_trusted_record_reaches(run_of_others: Path) -> None:
    found = watched(run_of_others, 500, "trust_code=true")
    said = json.dumps(found["attacks"])
    assert found["refused"] == 0
    assert "importable/evil.py" in said and "secret.jsonl" in said and "its code ran" in said
