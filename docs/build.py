"""Writes from the source what repeats it, for readers and for coding agents: `make docs`. A test compares."""

from __future__ import annotations

from pathlib import Path

from written import agents, algorithms, reference
from written.tables import DOCS, ROOT


def pages() -> dict[Path, str]:
    """Every file that is written, or filled in, from the source, but docs/options.txt and llms.txt, by its place."""
    made = {"algorithms.md": algorithms.page(), "extras.md": agents.extras(), "options.md": reference.options_page()}
    made |= {"recipes.md": reference.recipes_page(), "api.md": reference.api_page()}
    made |= {path.name: reference.filled(path.read_text()) for path in DOCS.glob("coming_from_*.md")}
    at_root = {
        "AGENTS.md": agents.agents(),
        "skills/mtgrpo/SKILL.md": agents.skill(),
        "CITATION.cff": agents.citation(),
    }
    return {DOCS / name: text for name, text in made.items()} | {ROOT / name: text for name, text in at_root.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (ROOT / "llms.txt").write_text(agents.llms())  # of the pages as they are now
