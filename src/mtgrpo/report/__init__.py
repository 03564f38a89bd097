"""`mtgrpo report RUN [RUN ...]`: what runs were, did and learned, on one page of HTML or Markdown."""

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mtgrpo import __version__
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.record.reading import RunRecord, calls, facts, find_runs, read_runs
from mtgrpo.report import content
from mtgrpo.report.charts import COLORS, chart
from mtgrpo.runtime.text import number, printable, shorten, sparkline


def main(arguments: Sequence[str]) -> int:
    """Write the report and say where it is. Raises ConfigError where there is no run, or no file can be written."""
    parser = Arguments("mtgrpo report", description=__doc__)
    about = "a run's folder, or that of a sweep; by default the newest run here"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=about)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in RUN, of several runs here")
    parser.add_argument("--markdown", action="store_true", help="Markdown in place of HTML, report.md")
    args = parser.parse_args(arguments)
    name = "report.md" if args.markdown else "report.html"
    runs = find_runs(args.runs)
    places = args.runs or runs
    target: Path = args.out or (places[0] / name if len(places) == 1 else Path(name))
    try:
        if args.out is None:
            target.unlink(missing_ok=True)  # in a folder of somebody else's it may be a link to a file of this user's
        target.write_text(_page(name, read_runs(runs)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another place with --out FILE") from error
    print(f"the report is in {printable(str(target))}")
    return 0


def _page(name: str, runs: Sequence[RunRecord]) -> str:
    """The template `name` filled in. What a run wrote is data: all of it is spelled so that none of it is markup."""

    def finalize(value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        return _markdown_text(str(value)) if name.endswith(".md") else escape(printable(str(value)))

    environment = Environment(
        loader=PackageLoader(__name__, "."),
        autoescape=True,  # so that macros return Markup, which `finalize` leaves as it is
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = f"Report: {runs[0].name}" if len(runs) == 1 else f"Report: {len(runs)} runs"
    filled = {"runs": runs, "several": len(runs) > 1, "title": title, "version": __version__, "colors": COLORS}
    functions = {"calls": calls, "chart": chart, "facts": facts, "number": number, "shorten": shorten}
    functions |= {"sparkline": sparkline, "fenced": _fenced}
    page = environment.get_template(f"{name}.jinja").render(**filled, **functions, content=content)
    return page.strip() + "\n"


def _markdown_text(text: str) -> Markup:
    """On one line, with nothing in it that Markdown or HTML would read as markup."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return Markup(re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", line))


def _fenced(example: content.Example) -> Markup:
    """A conversation as a code block of Markdown, whose fence is longer than any inside."""
    blocks: list[str] = []
    for message in [*example.prompt[-1:], *example.said]:
        parts = [f"[{message.get('role')}]", message.get("reasoning"), message.get("content")]
        parts += [f"-> {call}" for call in calls(message)] + [message.get("error")]
        blocks.append(printable("\n".join(str(part) for part in parts if part)))
    text = "\n\n".join(blocks)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}text\n{text}\n{fence}")
