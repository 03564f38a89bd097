"""A side of a benchmark in a process of its own, so that sides can be measured in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate import MARK

HERE = Path(__file__).resolve().parent
RIVAL = str(HERE / "rival.py")
Step = dict[str, Any]  # what was measured of one


class Side:
    """A process that waits between steps as gate.py does.

    Ours begins as the command does: it is that, or a script that imports `record` before torch. Those of others
    begin with rival.py.
    """

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

    def step(self, *arguments: Any) -> Step:
        """One step, with the arguments that `gate.serve` takes."""
        assert self._process.stdin
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Side:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self.close()

    def _answer(self) -> Step:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the process ended:\n{self._log.read_text()[-3000:]}")
