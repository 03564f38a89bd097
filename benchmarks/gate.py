"""Holds a training run between its steps, or what else is measured, so that sides can be measured in turns.

    mtgrpo train 'log=[jsonl,benchmarks/gate.py:Gate]'

Before every step the run waits for a line on stdin; after it, a line of JSON goes to stdout: the step's metrics, with
`seconds` from the release to the end, logging and the record on disk included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from record import resident

from mtgrpo.log import Sink

MARK = "gate: "  # begins every line of the protocol


def wait(found: Mapping[str, float]) -> float:
    """Print the results, wait for a line; returns the time. The end of stdin ends the process."""
    print(MARK + json.dumps(found), flush=True)
    if not sys.stdin.readline():
        sys.exit()
    return time.perf_counter()


def serve(measured: Callable[..., Mapping[str, Any]]) -> None:
    """Answer each line of stdin, a list of arguments, with what `measured` finds."""
    print(MARK + json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(measured(*json.loads(line))), flush=True)


class Gate(Sink):
    """The sink that waits, once reinforcement learning has begun."""

    _held = False
    _began = 0.0

    def stage(self, name: str, total: int) -> None:
        """Wait for the first step, if it is the stage that is measured."""
        self._held = name == "reinforcement learning"
        if self._held:
            self._began = wait({"resident_bytes": resident("VmRSS"), "threads": torch.get_num_threads()})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Wait for the next step."""
        if not self._held:
            return
        seconds = time.perf_counter() - self._began
        self._began = wait({"seconds": seconds, "peak_bytes": resident("VmHWM"), **metrics})

    def note(self, text: str) -> None:
        """Nothing."""
