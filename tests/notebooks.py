"""Runs the notebooks of examples/ as they stand; as a program it stores what their cells print (against moto's AWS)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CHANGES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+")  # from one run to another


def run(path: Path) -> list[str]:
    """What each cell of code prints, in the working folder; an exception is raised as it comes."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    for cell in code_cells(json.loads(path.read_text())):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
        printed.append(CHANGES.sub("...", out.getvalue()))
    return printed


def stored(path: Path) -> list[str]:
    """What the notebook says that each cell of code printed."""
    cells = code_cells(json.loads(path.read_text()))
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def store(path: Path) -> None:
    """Write what the cells print now into the notebook."""
    notebook, printed = json.loads(path.read_text()), run(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        cell["execution_count"] = number
        output = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [output] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    os.chdir(tempfile.mkdtemp())
    store(EXAMPLES / sys.argv[1])
    server.stop()
