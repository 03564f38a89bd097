"""The tables in tests/answers: what each grader must say of hundreds of texts, with the reason of each section."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).parent / "answers"
SPELLED = re.compile(r"<U\+([0-9A-F]{4,6})>")


class Section(NamedTuple):
    """Lines of a table that share a reason."""

    reason: str
    settings: dict[str, Any]  # of the reward
    rows: list[tuple[int, list[str]]]  # the number of the line, and its columns


def sections(name: str) -> list[Section]:
    """Those of a table.

    A line `# ...` begins one with its reason, `@ {...}` gives its settings. Columns are parted by tabs; ⏎ is a line
    break, <U+200B> a character that could not be seen.
    """
    made: list[Section] = []
    for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").split("\n"), 1):
        if line.startswith("# "):
            made.append(Section(line[2:], {}, []))
        elif line.startswith("@ "):
            made[-1].settings.update(json.loads(line[2:]))
        elif line:
            made[-1].rows.append((number, [_text(column) for column in line.split("\t")]))
    return made


def table(name: str) -> pytest.MarkDecorator:
    """Runs a test with every section of a table."""
    return pytest.mark.parametrize("section", sections(name), ids=lambda section: section.reason[:40])


def _text(column: str) -> str:
    return SPELLED.sub(lambda found: chr(int(found[1], 16)), column).replace("\u23ce", "\n")
