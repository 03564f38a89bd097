"""Progress for the person at the terminal; plain lines where the output is a file or a pipe."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

from rich import console as rich_console
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mtgrpo.log import Sink
from mtgrpo.parts import RunContext
from mtgrpo.runtime.text import clock, printable
from mtgrpo.types import EVALUATION, LEARNING

_SHOWN = {  # metric: how it is written, in order of importance
    "reward/mean": "reward {:.3f}",
    "reward/success": "success {:.1%}",
    "sft/loss": "loss {:.4f}",
    "policy/kl": "KL {:.4f}",
    "policy/entropy": "entropy {:.3f}",
    "policy/clip_fraction": "clipped {:.1%}",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "eval/success": "held-out {:.1%}",
    "eval/greedy": "greedy {:.1%}",
}
_ABOUT = {  # stage: what happens there, and why
    "warm start": "imitates demonstrations: without a success there is nothing to reinforce",
    EVALUATION: "on tasks that it never trains on, sampled and by its likeliest tokens",
    LEARNING: "what did better than its siblings on a task becomes likelier",
}
_LINES = 20  # at most about so many lines per stage where lines are plain


@dataclass
class Console(Sink):
    """A progress bar with the newest values; ten to twenty plain lines per stage where there is no terminal."""

    required: ClassVar[bool] = True  # a terminal that is closed ends the run, as elsewhere

    def __post_init__(self) -> None:
        self._out = rich_console.Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._interactive = self._out.is_interactive and self._out.file.isatty()
        self._live: Live | None = None
        self._begin("", 0)

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """In the end the last state of the bar stays on the screen."""
        running = type(self)()
        try:
            yield running
        finally:
            running._end_bar()

    def stage(self, name: str, total: int) -> None:
        """End the bar of the stage before and begin one."""
        self._end_bar()
        self._begin(name, total)
        if self._interactive and name in _ABOUT:
            self.note(f"{name}: {_ABOUT[name]}")
        if self._interactive:
            self._live = Live(get_renderable=self._panel, console=self._out, refresh_per_second=4)
            self._live.start()
        else:
            title = f"{name} ({total} {self._unit}s)" if total > 1 else name
            self.note(f"{title}: {_ABOUT[name]}" if name in _ABOUT else title)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the newest value of each metric."""
        self._latest = {**self._latest, **metrics}
        self._obstacles = _obstacles(metrics)
        self.progress(step)
        if 0 < self._total <= step:
            self._end_bar()  # so that what is noted then stands below it
        measured = any(name.startswith("eval/") for name in metrics)
        if not self._interactive and (step >= self._due[measured] or step == self._total):
            self._due[measured] = _next_line(step, self._total)
            of = f"{step:>{len(str(self._total))}}/{self._total}" if self._total else f"{step}"
            self.note("  ".join([f"  {self._unit} {of}", *_pieces(metrics), *self._obstacles, self._times()]))

    def progress(self, done: int) -> None:
        """Move the bar on."""
        if done > self._done:
            if not self._done:
                self._marks = deque([(self._marks[0][0], done - 1)], self._marks.maxlen)  # resumed: not from 0
            self._done = done
            self._marks.append((time.monotonic(), done))

    def note(self, text: str) -> None:
        """Lines that stay, above the bar; a terminal's are broken between words."""
        encoding = self._out.encoding
        said = Text(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        self._out.print(said, soft_wrap=not self._interactive)

    def _end_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._unit = "group" if name == EVALUATION else "step"  # of what is counted: the samples of a task are a group
        self._latest: dict[str, float] = {}
        self._obstacles: list[str] = []
        self._due = {False: 0, True: 0}  # the step of the next plain line; evaluations have lines of their own
        self._marks = deque([(time.monotonic(), 0)], 20)  # when which step was done: the newest ones tell the speed
        self._began = self._marks[0][0]

    def _panel(self) -> Group:
        """The bar, and below it the newest values on as many lines as they need."""
        width = self._out.width
        count = f"{self._done}/{self._total}" if self._total else f"step {self._done}"
        bar = ProgressBar(self._total or None, self._done, width=max(8, min(40, width - len(self._name) - 30)))
        head = Table.grid(padding=(0, 1))
        head.add_row(Text(printable(self._name), "bold", no_wrap=True), bar, Text(count), Text(self._times(), "dim"))
        lines = [""]
        for piece in [*_pieces(self._latest), *self._obstacles]:
            if len(lines[-1]) + len(piece) + 2 > width:
                lines.append("")
            lines[-1] += "  " + piece
        return Group(head, *(Text(printable(line), no_wrap=True) for line in lines if line))

    def _times(self) -> str:
        """How long the stage has taken and, while it runs, what is left."""
        now = time.monotonic()
        (first, first_step), (last, last_step) = self._marks[0], self._marks[-1]
        left = ""
        if self._total > self._done and last_step > first_step:
            rest = (last - first) / (last_step - first_step) * (self._total - self._done) - (now - last)
            left = f"  ETA {clock(max(0.0, rest))}"
        return clock(now - self._began) + left


def _pieces(metrics: Mapping[str, float]) -> list[str]:
    pieces = [form.format(metrics[name]) for name, form in _SHOWN.items() if name in metrics]
    further = [name for name in metrics if re.fullmatch(r"eval/(pass@(?!1$)\d+|[^/]+/success)", name)]
    return pieces + [f"{name.split('/')[1]} {metrics[name]:.1%}" for name in further]


def _obstacles(metrics: Mapping[str, float]) -> list[str]:
    """Why little or nothing is learned from a step, or measured by an evaluation, as far as its metrics tell."""
    found: list[str] = []
    if metrics.get("reward/groups_with_variance") == 0:
        found.append("no group's rewards differ: nothing to learn")
    elif "reward/mean" in metrics and "policy/entropy" not in metrics:
        found.append("no update: too few conversations to compare")
    for area in ("rollout", "eval"):
        cut = {name: share for name, share in metrics.items() if name.startswith(f"{area}/truncated/")}
        if metrics.get(f"{area}/truncated", 0) > 0.5:
            limit = max(cut, key=lambda name: cut[name])
            found.append(f"{cut[limit]:.0%} cut by {limit.rpartition('/')[2]}, which is no success")
    return found


def _next_line(step: int, total: int) -> int:
    """The step of the next plain line: a round number, or ever longer steps where the end is not known."""
    if not total:
        return max(step + 1, step * 5 // 4)
    power = 10 ** max(0, math.floor(math.log10(total / _LINES)))
    every = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= total / _LINES)
    return (step // every + 1) * every
