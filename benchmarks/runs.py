"""Runs of the command `mtgrpo` that are kept: made once, and read."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def finish_run(words: Sequence[str], folder: Path, threads: int = 0) -> dict[str, Any]:
    """Run `mtgrpo` with `words`, unless `folder` has a finished run; its summary.

    threads: for several runs at once; 0 = as many as the command chooses.
    """
    folder = folder.resolve()
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        count = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        command = [sys.executable, "-m", "mtgrpo", *words, "log=[jsonl]", f"hydra.run.dir={folder}"]
        subprocess.run(command, check=True, env=os.environ | count)
    return json.loads((folder / "summary.json").read_text())


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each training step of a finished run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == "reinforcement learning"]


def last_checkpoint(folder: Path) -> Path:
    """Of a finished run."""
    return max((folder.resolve() / "checkpoints").glob("step_*"))


@contextmanager
def claimed(file: Path) -> Generator[bool]:
    """Whether no other process that lives has claimed what `file` stands for; it is this one's until the end."""
    with file.open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with the process, however that ends
        except BlockingIOError:
            yield False
        else:
            yield True
