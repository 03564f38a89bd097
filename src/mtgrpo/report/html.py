"""A report as one HTML file that needs nothing else: no script, no network, no picture from outside.

What a run wrote is data, a model's words first of all: every piece of text goes through `_text`, and the page's
Content-Security-Policy forbids what could load or run all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtgrpo import __version__
from mtgrpo.record.reading import Row, RunRecord
from mtgrpo.record.text import number, printable, shorten
from mtgrpo.report import content
from mtgrpo.report.charts import COLORS, chart
from mtgrpo.report.content import FIRST, Example, Series

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { --ink: #1d2229; --pale: #66707c; --line: #dde2e8; --card: #f6f8fa; --page: #fff;
  --good: #2b8a3e; --bad: #c92a2a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --pale: #98a2ae; --line: #353c45; --card: #1f242b; --page: #14181d;
    --good: #69db7c; --bad: #ff8787 }
}
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1180px;
  margin: 0 auto; padding: 1rem 1.2rem 4rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem } h3 { font-size: 1rem; margin: 1.4rem 0 .4rem }
.pale, summary { color: var(--pale) } summary { cursor: pointer; padding: .3rem 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600 } .key { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere }
small { display: block; color: var(--pale); white-space: nowrap }
.legend { display: flex; gap: .2rem 1.2rem; flex-wrap: wrap }

.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: 1rem }
figure { margin: 0; padding: .6rem .6rem .2rem; background: var(--card); border-radius: 6px }
figcaption { display: flex; justify-content: space-between; gap: 1rem; font-size: .85rem; overflow-wrap: anywhere }
svg { width: 100%; height: auto; display: block } svg text { font-size: 10px; fill: var(--pale) }
svg .end { text-anchor: end } svg .grid { stroke: var(--line) }
article { border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 6px; margin: 1rem 0;
  padding: .2rem 1rem .8rem }
article.success { border-left-color: var(--good) }
.message { display: grid; grid-template-columns: 6rem minmax(0, 1fr); gap: .8rem; margin-top: .5rem }
.message b { color: var(--pale); font-weight: 500; text-align: right; overflow-wrap: anywhere }
pre { margin: 0; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate }
.assistant pre { background: var(--card); border-radius: 4px; padding: .2rem .5rem }
.thought { color: var(--pale); font-style: italic } .wrong { color: var(--bad) }
@media (max-width: 640px) {
  body { padding: .5rem .7rem 3rem } td, th { padding-right: .5rem } small { font-size: 11px }
  .message { grid-template-columns: 1fr; gap: 0 } .message b { text-align: left } }
"""


def page(runs: Sequence[RunRecord]) -> str:
    """The whole file."""
    title = f"Report: {runs[0].name}" if len(runs) == 1 else f"Report: {len(runs)} runs"
    body = [
        f"<h1>{_text(title)}</h1>",
        *map(_note, content.parts(runs)),
        _results(runs),
        _curves(runs),
        "<h2>Conversations</h2>",
        *(_examples(run, several=len(runs) > 1) for run in runs),
        _configuration(runs),
        "<h2>Time</h2>",
        _table(["", *_names(runs)], [[_text(label), *map(_text, cells)] for label, cells in content.timing(runs)]),
        _versions(runs),
        _note(f"Made by mtgrpo {__version__}."),
    ]
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{_text(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _text(value: object) -> str:
    """As text of the page: nothing in it is markup."""
    return escape(printable(str(value)))


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """The runs with the colors of their curves."""
    dots = [f'<span class="dot" style="background:{COLORS[place % len(COLORS)]}"></span>' for place in range(len(runs))]
    return [f"{dot if len(runs) > 1 else ''}{_text(run.name)}" for dot, run in zip(dots, runs, strict=True)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are already text of the page."""
    if not rows:
        return _note("Nothing was recorded.")
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _results(runs: Sequence[RunRecord]) -> str:
    """Success on held-out tasks before and after, run by run; all that was measured there below."""
    rows = [
        [*([name] if len(runs) > 1 else []), *map(_cell, content.result(found))]
        for name, run in zip(_names(runs), runs, strict=True)
        for found in content.measurements(run)
    ]
    about = [content.ABOUT_INTERVALS, *(f"{run.name}: {said}" for run in runs if (said := content.state(run)))]
    return "".join([_table([*(["run"] if len(runs) > 1 else []), *content.RESULT], rows), *map(_note, about)])


def _cell(text: str) -> str:
    """What stands in brackets, small and on a line of its own."""
    said, bracket, rest = text.partition(" (")
    return f"{_text(said)}<small>{_text(bracket + rest)}</small>" if bracket else _text(text)


def _note(text: str) -> str:
    return f'<p class="pale">{_text(text)}</p>'


def _curves(runs: Sequence[RunRecord]) -> str:
    found = [content.series(run) for run in runs]
    metrics = list(dict.fromkeys(metric for of_run in found for metric in of_run))
    metrics = [metric for metric in FIRST if metric in metrics] + sorted(set(metrics) - set(FIRST))
    constant: list[str] = []
    first: list[str] = []
    others: list[str] = []
    for metric in metrics:
        curves = [of_run.get(metric) for of_run in found]
        values = {value for curve in curves for _, value in curve or []}
        if len(values) == 1 and metric not in FIRST[:3]:
            constant.append(f"{metric} = {number(values.pop())}")
        else:
            (first if metric in FIRST else others).append(_figure(metric, curves))
    legend = (
        f'<p class="legend">{"".join(f"<span>{name}</span>" for name in _names(runs))}</p>' if len(runs) > 1 else ""
    )
    parts = [f'<h2>Curves</h2>{legend}<div class="charts">{"".join(first)}</div>']
    if others:
        more = f'<summary>{len(others)} more</summary><div class="charts">{"".join(others)}</div>'
        parts.append(f"<details>{more}</details>")
    notes = [f"Always the same: {', '.join(constant)}."] if constant else []
    return "".join([*parts, *map(_note, notes + [said for run in runs for said in content.thinned(run)])])


def _figure(metric: str, curves: Sequence[Series | None]) -> str:
    last = ", ".join(number(curve[-1][1]) if curve else "none" for curve in curves)
    return f"<figure><figcaption><b>{_text(metric)}</b><span>{last}</span></figcaption>{chart(metric, curves)}</figure>"


def _configuration(runs: Sequence[RunRecord]) -> str:
    parts = ["<h2>Configuration</h2>"]
    for heading, options in content.configuration(runs):
        rows = [[f'<span class="key">{_text(key)}</span>', *map(_value, values)] for key, values in options]
        table = _table(["option", *_names(runs)], rows)
        folded = heading in ("Set by the recipe", "Defaults")
        summary = f"<summary>{heading}: {len(options)}</summary>"
        parts.append(f"<details>{summary}{table}</details>" if folded else f"<h3>{heading}</h3>{table}")
    return "".join(parts)


def _value(text: str) -> str:
    return f'<span class="key">{_text(shorten(text))}</span>'


def _examples(run: RunRecord, several: bool) -> str:
    source, found = content.examples(run)
    title = f"<h3>{_text(run.name)}</h3>" if several else ""
    if not found:
        return title + _note("None were recorded.")
    return "".join([title, _note(f"From {source}."), *map(_conversation, found)])


def _conversation(example: Example) -> str:
    row = example.row
    verdict = "success" if example.success else "failure"
    head = f"<h3>{verdict}: {_text(row.get('task'))}</h3>{_note(content.facts(row))}"
    *before, last = example.prompt or [{}]
    folded = "".join(map(_message, before))
    if folded:
        folded = f"<details><summary>{len(before)} messages before</summary>{folded}</details>"
    said = "".join(map(_message, [last, *example.said] if last else example.said))
    return f'<article class="{verdict}">{head}{folded}{said}</article>'


def _message(message: Row) -> str:
    role = str(message.get("role"))
    parts = [("thought", message.get("reasoning")), ("", message.get("content"))]
    parts += [("", f"-> {call}") for call in content.calls(message)]
    parts.append(("wrong", message.get("error")))
    said = "".join(f'<pre class="{kind}">{_text(text)}</pre>' for kind, text in parts if text)
    kind = "message assistant" if role == "assistant" else "message"
    return f'<div class="{kind}"><b>{_text(message.get("name") or role)}</b><div>{said}</div></div>'


def _versions(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = [[_text(name), *(_text(run.versions.get(name, "")) for run in runs)] for name in names]
    return "<h2>Versions</h2>" + _table(["", *_names(runs)], rows)
