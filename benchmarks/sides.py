"""A side of a benchmark in a process of its own, so that sides can be measured in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gate import MARK

HERE = Path(__file__).resolve().parent
Step = dict[str, float]  # what was measured of one


class Side:
    """A process that waits between steps as gate.py does."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, **variables: str) -> None:
        """Start `python COMMAND` with these variables of the environment; its log is in `folder`."""
        self._log = folder / f"{name}.log"
        search = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "PYTHONPATH": search, **variables},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.loaded = self._answer()

    def step(self) -> Step:
        """One step."""
        assert self._process.stdin
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Step:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the process ended:\n{self._log.read_text()[-3000:]}")
