"""`mtgrpo report RUN [RUN ...]`: what runs were, did and learned, on one page of HTML or Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mtgrpo.errors import ConfigError
from mtgrpo.record.reading import find_runs, read_runs
from mtgrpo.report import html, markdown


def main(arguments: Sequence[str]) -> int:
    """Write the report and say where it is. Raises ConfigError where there is no run, or no file can be written."""
    parser = argparse.ArgumentParser("mtgrpo report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or that of a sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first RUN")
    parser.add_argument("--markdown", action="store_true", help="Markdown in place of HTML, report.md")
    given = parser.parse_args(arguments)
    runs = read_runs(find_runs(given.runs))
    text = markdown.page(runs) if given.markdown else html.page(runs)
    target: Path = given.out or given.runs[0] / ("report.md" if given.markdown else "report.html")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another place with --out FILE") from error
    print(f"the report is in {target}")
    return 0
