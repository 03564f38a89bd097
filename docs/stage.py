"""Lays out in build/ what the site is built from: `make site`.

The pages of docs/ and those at the root of the project, with links that hold on GitHub made to hold in the site: a file
of the source is copied beside the pages, as text; a folder is named and is no link.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):\s]+)\)")


def configuration(root: Path = ROOT) -> dict[str, Any]:
    """mkdocs.yml with the tutorials that there are."""
    settings = yaml.safe_load((root / "mkdocs.yml").read_text())
    nav: list[dict[str, Any]] = []
    for section in settings["nav"]:
        ((title, entries),) = section.items()
        if isinstance(entries, str):
            entries = sorted(path.relative_to(root / "docs").as_posix() for path in (root / "docs").glob(entries))
        nav += [{title: entries}] if entries else []
    return {**settings, "nav": nav}


def pages(settings: dict[str, Any], root: Path = ROOT) -> dict[str, Path]:
    """The pages of the site: place in it -> file."""
    names = [name for section in settings["nav"] for entries in section.values() for name in entries]
    return {name: root / "docs" / name if (root / "docs" / name).exists() else root / name for name in names}


def stage(root: Path = ROOT, target: Path = TARGET) -> None:
    """Write everything anew."""
    settings = configuration(root)
    place = target / "docs"
    shutil.rmtree(place, ignore_errors=True)
    sources = pages(settings, root)
    places = {path.resolve(): name for name, path in sources.items()} | {(root / "README.md").resolve(): "index.md"}

    def copied(path: Path) -> str:
        """Where a file that is no page lies in the site."""
        if path not in places:
            name = path.relative_to(root / "docs" if path.is_relative_to(root / "docs") else root).as_posix()
            places[path] = name if path.suffix in (".png", ".ipynb", ".txt") else f"{name}.txt"
            (place / places[path]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place / places[path])
        return places[path]

    for name, source in sources.items():

        def link(found: re.Match[str], source: Path = source, name: str = name) -> str:
            path, mark, anchor = found[3].partition("#")
            aim = (source.parent / path).resolve()
            if not path or not aim.is_relative_to(root):
                return found[0]
            if aim.is_dir():
                return found[2]
            return f"{found[1]}[{found[2]}]({os.path.relpath(copied(aim), Path(name).parent)}{mark}{anchor})"

        (place / name).parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text().replace("```console", "```bash")  # which is coloured
        if name == "CHANGELOG.md":  # it has every word
            text = f"---\nsearch: {{exclude: true}}\n---\n\n{text}"
        (place / name).write_text(LINK.sub(link, text))
    for name in [*settings["extra_css"], *settings["extra_javascript"]]:
        shutil.copy(root / "docs" / name, place)
    (target / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))


if __name__ == "__main__":
    stage()
