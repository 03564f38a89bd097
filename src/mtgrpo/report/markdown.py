"""A report in Markdown, for a pull request or a model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mtgrpo import __version__
from mtgrpo.record.reading import Row, RunRecord
from mtgrpo.record.sparkline import sparkline
from mtgrpo.record.text import number, printable, shorten
from mtgrpo.report import content
from mtgrpo.report.content import Example

_SPARKLINE = 32  # characters


def page(runs: Sequence[RunRecord]) -> str:
    """The whole file."""
    names = [run.name for run in runs]
    parts = [f"# Report: {_text(names[0])}" if len(runs) == 1 else f"# Report: {len(runs)} runs"]
    parts += map(_text, content.parts(runs))
    for run in runs:
        results = map(content.result, content.measurements(run))
        parts += [*([f"**{_text(run.name)}**"] if len(runs) > 1 else []), _table(content.RESULT, results)]
    parts.append(content.ABOUT_INTERVALS)
    parts += [f"{_text(run.name)}: {_text(said)}" for run in runs if (said := content.state(run))]
    for run in runs:
        parts += ["## Curves" + (f": {_text(run.name)}" if len(runs) > 1 else ""), _curves(run), *content.thinned(run)]
    for run in runs:
        source, found = content.examples(run)
        heading = f"## Conversations: {run.name}, {source}" if found else f"## Conversations: {run.name}, none recorded"
        parts += [_text(heading), *map(_conversation, found)]
    parts.append("## Configuration")
    for heading, options in content.configuration(runs):
        parts += [f"### {heading}", _table(["option", *names], [[key, *values] for key, values in options])]
    parts += ["## Time", _table(["", *names], [[label, *cells] for label, cells in content.timing(runs)])]
    versions = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = [[name, *(run.versions.get(name, "") for run in runs)] for name in versions]
    parts += ["## Versions", _table(["", *names], rows), f"Made by mtgrpo {__version__}."]
    return "\n\n".join(parts) + "\n"


def _text(value: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would read as markup."""
    line = " ".join("".join(c if c.isprintable() else " " for c in value).split())
    return re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", line)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[_text(shorten(cell)) for cell in row] for row in rows]
    if not lines:
        return "Nothing was recorded."
    return "\n".join(f"| {' | '.join(line)} |" for line in [[*map(_text, head)], ["---"] * len(head), *lines])


def _curves(run: RunRecord) -> str:
    rows: list[list[str]] = []
    constant: list[str] = []
    for metric, points in content.series(run).items():
        values = [value for _, value in points]
        ends = [values[0], values[-1], min(values), max(values)]
        if len(values) > 1 and ends[2] == ends[3]:
            constant.append(f"{metric} = {number(values[0])}")
        else:
            rows.append([metric, sparkline(values, _SPARKLINE), *map(number, ends)])
    said = f"\n\nAlways the same: {_text(', '.join(constant))}." if constant else ""
    return _table(["metric", "", "first", "last", "least", "most"], rows) + said


def _conversation(example: Example) -> str:
    row = example.row
    head = f"{'Success' if example.success else 'Failure'}: {row.get('task')}, {content.facts(row)}"
    said = "\n\n".join(map(_message, [*example.prompt[-1:], *example.said]))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))  # longer than any inside
    return f"**{_text(head)}**\n\n{fence}text\n{said}\n{fence}"


def _message(message: Row) -> str:
    parts = [f"[{message.get('role')}]", message.get("reasoning"), message.get("content")]
    parts += [f"-> {call}" for call in content.calls(message)] + [message.get("error")]
    text = "\n".join(str(part) for part in parts if part)
    return printable(text)
