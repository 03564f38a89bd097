"""The record on disk: `metrics.jsonl`, one line per step, and `notes.txt`."""

import copy
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, Self, cast

from mtgrpo.log import Sink
from mtgrpo.parts import RunContext
from mtgrpo.runtime.files import strict_json
from mtgrpo.runtime.text import printable


@dataclass
class Jsonl(Sink):
    """Appends one JSON object per step, `{"stage": ..., "step": ..., metrics...}`, and is on disk after every line.

    Numbers have full precision; NaN and infinity are null. Notes go to a file of their own: they may speak of times.
    """

    required: ClassVar[bool] = True
    _metrics = _notes = cast("BinaryIO", None)  # while it is open
    _stage = ""

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With both files open."""
        running = copy.copy(self)
        with (
            (context.folder / "metrics.jsonl").open("ab") as metrics,
            (context.folder / "notes.txt").open("ab") as notes,
        ):
            running._metrics, running._notes = metrics, notes
            yield running

    def stage(self, name: str, total: int) -> None:
        """The stage that the following lines belong to."""
        self._stage = name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line."""
        self._metrics.write(strict_json({"stage": self._stage, "step": step, **metrics}) + b"\n")
        self._metrics.flush()

    def note(self, text: str) -> None:
        """The text and a newline."""
        self._notes.write(printable(text).encode("utf-8", "backslashreplace") + b"\n")
        self._notes.flush()
