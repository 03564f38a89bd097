"""Runs tutorials/*.py and the notebooks of examples/, and keeps what they print.

    scripts/notebooks.py tutorials/101_see_it_learn.py ...   # writes docs/tutorials/NAME.md, .ipynb and pictures
    scripts/notebooks.py --words tutorials/102_read_a_run.py ... # the same with what the notebook says was printed
    scripts/notebooks.py examples/understand_grpo.ipynb ...  # stores what its cells print in it

A tutorial is Python in the percent format of jupytext: `# %% [markdown]` begins text, `# %%` a cell of code.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PAGES = PROJECT / "docs" / "tutorials"
CHANGES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+")  # from one run to another
PROGRESS = re.compile(r"^  conversation +\d+/\d+ .*ETA.*\n", re.MULTILINE)  # which a terminal overwrites
IMPORT = re.compile(r"^from cells import .*\n*", re.MULTILINE)
HEAD = """\
Commands are for the terminal: after the [installation](../install.md) type `. .venv/bin/activate` in the project's
folder, then go to an empty one. Python is for one `python` in that folder, where an empty line ends a block. What
stands below the name of a file goes into that file. All of it is also a [Jupyter notebook]({name}.ipynb)."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json"}


@dataclass
class Cell:
    """Text, or code and what it printed and drew."""

    source: str
    is_text: bool = False
    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)

    @property
    def code(self) -> str:
        """What a reader runs; "" of text and of what only a tutorial imports."""
        return "" if self.is_text else IMPORT.sub("", self.source).rstrip()

    def call(self) -> list[str]:
        """The name and the arguments of a cell that is one call of `sh` or `file`, else nothing."""
        if self.is_text:
            return []
        match ast.parse(self.source).body:
            case [ast.Expr(ast.Call(ast.Name("sh" | "file" as name), arguments))]:
                return [name, *(ast.literal_eval(argument) for argument in arguments)]
        return []


def read(path: Path) -> list[Cell]:
    """The cells of a tutorial or of a notebook."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return [Cell("".join(cell["source"]), cell["cell_type"] == "markdown") for cell in cells]
    parts = re.split(r"^# %%(.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return [
        Cell(re.sub(r"^# ?", "", text.strip("\n"), flags=re.MULTILINE) if kind else text.strip("\n"), bool(kind))
        for kind, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def type_command(line: str) -> str:
    """What a command prints; CalledProcessError where it fails."""
    done = subprocess.run(line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, line, done.stdout)
    return done.stdout


def run(path: Path, shell: Callable[[str], str] = type_command) -> list[Cell]:
    """Run it in the working folder, as Jupyter would: a cell may await, and figures are shown where it ends.

    Cells then hold what they printed. What a cell raises is raised as it comes.
    """
    cells = read(path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for cell in cells:
            with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # which show() says
                match cell.call():
                    case ["sh", line]:
                        out.write(shell(line))
                    case ["file", name, text]:
                        Path(name).write_text(text.lstrip("\n"))
                    case _ if cell.code:
                        code = compile(cell.code, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                        waits = bool(code.co_flags & inspect.CO_COROUTINE)
                        runner.run(eval(code, names)) if waits else exec(code, names)
            printed = CHANGES.sub("...", PROGRESS.sub("", out.getvalue()))
            cell.printed = printed.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
            cell.pictures = list(take_figures())
    return cells


def take_figures() -> Iterable[bytes]:
    """The open figures of matplotlib as PNG; they are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    from matplotlib import pyplot  # noqa: PLC0415  most need no pictures

    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, dpi=80, bbox_inches="tight", metadata={"Software": None})
        yield buffer.getvalue()
    pyplot.close("all")


def digest(path: Path) -> str:
    """That of a tutorial, as its page names it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def as_page(cells: Iterable[Cell], path: Path) -> tuple[str, dict[str, bytes]]:
    """Markdown, and its pictures by name."""
    parts = [f"<!-- written by scripts/notebooks.py from tutorials/{path.name} {digest(path)} -->"]
    pictures: dict[str, bytes] = {}
    for cell in cells:
        match cell.call():
            case ["sh", line]:
                parts.append(f'```console title="Terminal"\n{line}\n```')
            case ["file", name, text]:
                parts.append(f"`{name}`:\n\n```{LANGUAGES.get(Path(name).suffix, 'text')}\n{text.lstrip()}```")
            case _ if cell.is_text:
                parts += cell.source.split("\n\n")
            case _:
                parts += [f'```python title="Python"\n{cell.code}\n```'] if cell.code else []
        parts += [f"```text\n{cell.printed}```"] if cell.printed else []
        for picture in cell.pictures:
            name = f"{path.stem}_{len(pictures) + 1}.png"
            pictures[name] = picture
            parts.append(f"![what the cell above draws]({name})")
    parts.insert(3, HEAD.format(name=path.stem))  # behind the title and what the reader wants
    return "\n\n".join(parts) + "\n", pictures


def as_notebook(cells: Iterable[Cell]) -> str:
    """JSON of a notebook with its outputs."""
    written: list[dict[str, Any]] = []
    count = 0
    for cell in cells:
        match cell.call():
            case ["sh", line]:
                source = f"!{line}"
            case ["file", name, text]:
                source = f"%%writefile {name}\n{text.lstrip()}".rstrip()
            case _:
                source = cell.source if cell.is_text else cell.code
        kept: dict[str, Any] = {"metadata": {}, "source": source.splitlines(keepends=True)}
        if not cell.is_text and source:
            count += 1
            text = {"output_type": "stream", "name": "stdout", "text": cell.printed.splitlines(keepends=True)}
            kept |= {"cell_type": "code", "execution_count": count, "outputs": [text] if cell.printed else []}
            for picture in cell.pictures:
                data = {"image/png": base64.b64encode(picture).decode()}
                kept["outputs"].append({"output_type": "display_data", "metadata": {}, "data": data})
        elif source:
            kept["cell_type"] = "markdown"
        written += [{**kept, "id": f"cell-{len(written)}"}] if source else []
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def stored(path: Path) -> list[Cell]:
    """The cells of a notebook, with what it says that they printed and drew."""
    cells = read(path)
    for cell, kept in zip(cells, json.loads(path.read_text())["cells"], strict=True):
        outputs: list[dict[str, Any]] = kept.get("outputs", [])
        cell.printed = "".join(line for output in outputs for line in output.get("text", []))
        drawn = [output["data"]["image/png"] for output in outputs if "data" in output]
        cell.pictures = [base64.b64decode("".join(picture)) for picture in drawn]
    return cells


def recalled(path: Path) -> list[Cell]:
    """The cells of a tutorial, with what its notebook says that they printed and drew."""
    cells = read(path)
    old = [cell for cell in stored(PAGES / f"{path.stem}.ipynb") if not cell.is_text]
    for cell, before in zip([cell for cell in cells if cell.code], old, strict=True):
        cell.printed, cell.pictures = before.printed, before.pictures
    return cells


@contextlib.contextmanager
def pretend_aws() -> Iterator[None]:
    """moto's AWS, for the notebook that asks AWS."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  that notebook alone needs it

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    yield
    server.stop()


def ran(path: Path) -> list[Cell]:
    """Run it in a new folder."""
    aws = pretend_aws() if path.stem.startswith("launch") else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), aws:
        return run(path)


def export(path: Path, cells: list[Cell]) -> None:
    """Write the page and the notebook of a tutorial, or store the outputs where it is a notebook itself."""
    if path.suffix == ".ipynb":
        path.write_text(as_notebook(cells))
        return
    PAGES.mkdir(exist_ok=True)
    page, pictures = as_page(cells, path)
    for old in PAGES.glob(f"{path.stem}_*.png"):
        old.unlink()
    for name, picture in pictures.items():
        (PAGES / name).write_bytes(picture)
    (PAGES / f"{path.stem}.md").write_text(page)
    (PAGES / f"{path.stem}.ipynb").write_text(as_notebook(cells))


if __name__ == "__main__":
    os.environ |= {"MPLBACKEND": "agg", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words_alone = sys.argv[1:2] == ["--words"]
    for argument in [Path(word).resolve() for word in sys.argv[1 + words_alone :]]:
        print(argument.name, flush=True)
        if words_alone and argument.suffix == ".ipynb":
            sys.exit("--words is for tutorials: a notebook has its words in itself")
        export(argument, recalled(argument) if words_alone else ran(argument))
