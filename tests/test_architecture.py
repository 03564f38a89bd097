"""Rules of the code base that no other tool checks; the import rules are in pyproject.toml, kept by import-linter."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import mtgrpo
from conftest import VARIATIONS
from mtgrpo.commands.experiments import STAGES

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = sorted((PROJECT / "src").rglob("*.py"))
MOST_LINES_PER_FILE = 400
MOST_LINES_PER_FUNCTION = 60
MOST_LINES = 41_667
MOST_LINES_OF_INTEGRATIONS = 3_500
TWICE = {  # class names that two modules have, for users write them in both places; none is added
    "Calculator",
    "Environment",
    "FunctionCalls",
    "GuessNumber",
    "Jsonl",
}
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|work|opt/(?:wheels|pypi))/\w")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def _definitions(node: ast.AST) -> Iterator[Definition]:
    return (child for child in ast.walk(node) if isinstance(child, Definition))


def test_there_are_sources() -> None:
    assert len(SOURCES) > 5


def test_files_are_short() -> None:
    lines = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_PER_FILE} == {}


def test_functions_are_short() -> None:
    lines = {
        f"{_name(path)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in SOURCES
        for node in _definitions(ast.parse(path.read_text()))
        if not isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in lines.items() if count > MOST_LINES_PER_FUNCTION} == {}


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_whole_is_bounded() -> None:
    assert _lines(SOURCES) <= MOST_LINES
    assert _lines((PROJECT / "src/mtgrpo/integrations").rglob("*.py")) <= MOST_LINES_OF_INTEGRATIONS


def test_no_class_name_is_taken_twice() -> None:
    classes = [re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE) for path in SOURCES]
    taken = Counter(name for of_file in classes for name in of_file)
    assert {name for name, count in taken.items() if count > 1} <= TWICE


def test_no_internals_of_hydra_are_used() -> None:
    assert [path for path in SOURCES if re.search(r"\b(hydra|omegaconf)\._", path.read_text())] == []


def test_no_module_is_a_drawer_for_everything() -> None:
    parts = {part for path in SOURCES for part in path.with_suffix("").parts[len(PROJECT.parts) :]}
    assert parts.isdisjoint({"utils", "util", "helpers", "helper", "common", "misc"})


def test_everything_public_has_a_docstring() -> None:
    missing: list[str] = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            missing.append(_name(path))
        for node in tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_") and ast.get_docstring(node) is None:
                missing.append(f"{_name(path)}:{node.lineno} {node.name}")
    assert missing == []


def test_the_map_names_every_part() -> None:
    package = PROJECT / "src/mtgrpo"
    first_column = re.findall(r"^\| (.*?) \|", (PROJECT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)(?:\.py|/)`", " ".join(first_column)))
    parts = {path.name for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert named == {part.removesuffix(".py") for part in parts} - {"__init__", "__main__"} | {"hydra_plugins"}


def test_importing_the_package_is_light() -> None:
    heavy = "{'torch', 'ray', 'transformers', 'hydra'}"
    code = f"import sys, mtgrpo; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_no_file_names_a_place_on_one_machine() -> None:
    if not (PROJECT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    found: list[str] = []
    for name in filter(None, listing.stdout.split("\0")):
        path = PROJECT / name
        if path.is_file():
            lines = path.read_text(errors="replace").splitlines()
            found += [f"{name}:{number}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert found == []


def test_what_commands_and_names_stand_for_is_there() -> None:
    for place in (*STAGES.values(), *(f"{module}.{name}" for name, module in mtgrpo._OFFERED.items())):
        module, _, name = place.rpartition(".")
        assert callable(getattr(importlib.import_module(f"mtgrpo.{module}"), name)), place


def test_variations_are_tests_in_order() -> None:
    lines = VARIATIONS.read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (PROJECT / path).read_text(), line
