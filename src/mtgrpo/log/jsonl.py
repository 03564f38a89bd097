"""The record on disk: `metrics.jsonl`, one line per step, and `notes.txt`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mtgrpo.log import Sink
from mtgrpo.strict_json import strict_json


class Jsonl(Sink):
    """Appends one JSON object per step, `{"stage": ..., "step": ..., metrics...}`, and is on disk after every line.

    Numbers have full precision; NaN and infinity are null. Notes go to a file of their own: they may speak of times.
    """

    def __init__(self, folder: Path) -> None:
        self._metrics = (folder / "metrics.jsonl").open("ab")
        self._notes = (folder / "notes.txt").open("ab")
        self._stage = ""

    def stage(self, name: str, total: int) -> None:
        """The stage that the following lines belong to."""
        self._stage = name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line."""
        self._metrics.write(strict_json({"stage": self._stage, "step": step, **metrics}) + b"\n")
        self._metrics.flush()

    def note(self, text: str) -> None:
        """The text and a newline."""
        self._notes.write(text.encode("utf-8", "backslashreplace") + b"\n")
        self._notes.flush()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._notes.close()
