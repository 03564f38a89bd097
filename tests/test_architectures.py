"""Every architecture of transformers, tiny: it computes what its own forward pass computes, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtgrpo.parts.extension import load_file

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
sweep = load_file(PAGE.with_suffix(".py"))
LINES = [
    line.removeprefix("| ").removesuffix(" |").split(" | ") for line in PAGE.read_text().splitlines() if line[:1] == "|"
]
STATED = {name: cells for *cells, names in LINES[2:] for name in names.split(", ")}


def assert_exact(found: Any) -> None:
    assert not found.trainer > 1e-9, found
    assert not found.engine > 1e-9, found


@pytest.mark.parametrize(
    ("name", "layout", "decoding", "trained", "sampled"),
    [
        ("qwen3", "forest", "fused", 150, 150),
        ("deepseek_v3: keys larger than values", "forest", "own modules", 150, 150),
        ("diffllama", "forest", "own modules", 150, 150),
        ("doge", "padded", "", 150, 0),
        ("ministral3", "forest", "own modules", 150, 150),
        ("phi3: longrope", "forest", "own modules", 80, 80),
        ("mistral", "forest", "fused", 150, 72),
        ("qwen2_moe: windows", "forest", "own modules", 72, 72),
    ],
)
def test_some_architectures(name: str, layout: str, decoding: str, trained: int, sampled: int) -> None:
    found = sweep.measure(name)
    assert (found.layout, found.decoding, found.trained, found.sampled) == (layout, decoding, trained, sampled)
    assert_exact(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sweep.names())
def test_the_page_is_true(name: str) -> None:
    """Errors are compared as powers of ten, and may be a hundred times as large elsewhere."""
    found = sweep.measure(name)
    assert_exact(found)
    for before, now in zip(STATED[name], sweep.row(found), strict=True):
        same = now == before or (now.startswith("1e-") and float(now) <= 100 * float(before))
        assert same, f"{name}: {before} is now {now}; run `make architectures`"


def test_the_page_has_every_architecture() -> None:
    assert sorted(STATED) == sweep.names(), "run `make architectures`"
