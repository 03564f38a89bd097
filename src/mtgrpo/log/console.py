"""Progress for the person at the terminal; plain lines where the output is a file or a pipe."""

import math
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rich import console as rich_console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mtgrpo.errors import POLICY_ERROR, REFUSED
from mtgrpo.log import Sink
from mtgrpo.parts import RunContext
from mtgrpo.runtime.text import clock, is_number, printable, sparkline
from mtgrpo.types import COLLECTING, EVALUATION, LEARNING

_SHOWN = {  # metric: its name and how it is written, in order of importance
    "reward/mean": ("reward", "{:.3f}"),
    "reward/success": ("success", "{:.1%}"),
    "sft/loss": ("loss", "{:.4f}"),
    "policy/kl": ("KL", "{:.4f}"),
    "policy/entropy": ("entropy", "{:.3f}"),
    "policy/clip_fraction": ("clipped", "{:.1%}"),
    "perf/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "eval/success": ("held-out", "{:.1%}"),
    "eval/greedy": ("greedy", "{:.1%}"),
}
_SHOWN_LIVE = {  # where there is room
    "policy/grad_norm": ("gradient norm", "{:.3g}"),
    "rollout/turns": ("turns", "{:.1f}"),
    "rollout/sampled_tokens": ("sampled tokens", "{:,.0f}"),
    "rollout/truncated": ("truncated", "{:.1%}"),
    "rollout/failed": ("failed", "{:.1%}"),
}
_ABOUT = {  # stage: what happens there, and why
    "warm start": "imitates demonstrations: without a success there is nothing to reinforce",
    EVALUATION: "on held-out tasks, sampled and by its likeliest tokens",
    LEARNING: "what did better than its siblings on a task becomes likelier",
}
_UNITS = {EVALUATION: "conversation", COLLECTING: "task"}  # what is counted, where it is no step
_COURSE = 200  # rows of metrics whose course is drawn
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
        self._rows.append(metrics)
        self._played = 0
        self._obstacles = _obstacles(metrics)
        self._move(step)
        if 0 < self._total <= step:
            self._end_bar()  # so that what is noted then stands below it
        measured = any(name.startswith("eval/") for name in metrics)
        if not self._interactive and (step >= self._due[measured] or step == self._total):
            self._due[measured] = _next_line(step, self._total)
            self._line([*_pieces(metrics), *self._obstacles])

    def progress(self, done: int) -> None:
        """Move the bar on; a plain line for each tenth of the stage."""
        begins_tenth = 10 * done // self._total > 10 * self._done // self._total
        self._move(done)
        if begins_tenth and done < self._total and not self._interactive:
            self._line([])

    def played(self) -> None:
        """Count it, for a step of a large model takes minutes."""
        self._played += 1

    def note(self, text: str) -> None:
        """Lines that stay, above the bar; a terminal's are broken between words."""
        encoding = self._out.encoding
        line = Text(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        self._out.print(line, soft_wrap=not self._interactive)

    def _line(self, pieces: Sequence[str]) -> None:
        of = f"{self._done:>{len(str(self._total))}}/{self._total}" if self._total else f"{self._done}"
        self.note("  ".join([f"  {self._unit} {of}", *pieces, self._times()]))

    def _move(self, done: int) -> None:
        if done > self._done:
            self._done = done
            self._marks.append((time.monotonic(), done))

    def _end_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, name: str, total: int) -> None:
        self._name, self._total, self._done, self._played = name, total, 0, 0
        self._unit = _UNITS.get(name, "step")
        self._rows = deque[Mapping[str, float]](maxlen=_COURSE)
        self._obstacles: list[str] = []
        self._due = {False: 0, True: 0}  # the step of the next plain line; evaluations have lines of their own
        self._began = time.monotonic()
        # When so many were done, which tells the speed: of steps the newest, without the first, which has checks of its
        # own; of an evaluation all, for conversations end many at once.
        self._marks = deque[tuple[float, int]](maxlen=20) if self._unit == "step" else deque([(self._began, 0)])

    def _panel(self) -> Group:
        count = f"{self._done}/{self._total}" if self._total else f"step {self._done}"
        played = f"{self._played} conversations" if self._played else ""
        shown = panel(self._name, [count, played, self._times()], self._done, self._total, list(self._rows), self._out)
        return Group(shown, *(Text(f"  {obstacle}", no_wrap=True) for obstacle in self._obstacles))

    def _times(self) -> str:
        """How long the stage has taken and, while it runs, what is left."""
        now, left = time.monotonic(), ""
        if self._total > self._done and len(self._marks) > 1:
            (first, first_step), (last, last_step) = self._marks[0], self._marks[-1]
            rest = (last - first) / (last_step - first_step) * (self._total - self._done) - (now - last)
            left = f"  ETA {clock(max(0.0, rest))}"
        return clock(now - self._began) + left


def panel(
    name: str, facts: Sequence[str], done: int, total: int, rows: Sequence[Mapping[str, Any]], out: rich_console.Console
) -> Group:
    """What is live on a screen: a name and `facts`, the bar, the newest value of each metric and its course in `rows`.

    total: of what is `done`, 0 = not known.
    """
    head = Text(printable(name), "bold", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [head.append("  " + "  ".join(filter(None, facts)), "not bold")]
    if total:
        bar = Table.grid()  # ends its line, as a bar alone does not
        bar.add_row(ProgressBar(total, done, width=min(out.width, 100)))
        parts.append(bar)
    table = Table.grid(padding=(0, 2))
    width = min(60, max(0, out.width - 36)) if out.encoding.lower().startswith("utf") else 0
    for metric, (label, form) in (_forms(name for row in rows for name in row) | _SHOWN_LIVE).items():
        values = [row[metric] for row in rows if is_number(row.get(metric))]
        if values:
            newest = Text(form.format(values[-1]), justify="right")
            table.add_row(Text(f"  {printable(label)}"), newest, Text(sparkline(values, width), "cyan"))
    return Group(*parts, *([table] if table.row_count else []))


def _forms(metrics: Iterable[str]) -> dict[str, tuple[str, str]]:
    """What is shown of `metrics`: the name of each and how it is written."""
    further = [metric for metric in metrics if re.fullmatch(r"eval/(pass@(?!1$)\d+|[^/]+/success)", metric)]
    return _SHOWN | {metric: (metric.split("/")[1], "{:.1%}") for metric in further}


def _pieces(metrics: Mapping[str, float]) -> list[str]:
    return [
        f"{label} {form.format(metrics[name])}" for name, (label, form) in _forms(metrics).items() if name in metrics
    ]


def _obstacles(metrics: Mapping[str, float]) -> list[str]:
    """Why little or nothing is learned from a step, or measured by an evaluation, as far as its metrics tell."""
    obstacles: list[str] = []
    if metrics.get("reward/groups_with_variance") == 0:
        obstacles.append("no group's rewards differ: nothing to learn")
    elif metrics.get("rollout/filtered") == 1:
        obstacles.append("no update: the filter left out every group")
    elif "reward/mean" in metrics and "policy/entropy" not in metrics:
        obstacles.append("no update: too few conversations to compare")
    for area in ("rollout", "eval"):
        cut = {name: share for name, share in metrics.items() if name.startswith(f"{area}/truncated/")}
        if metrics.get(f"{area}/truncated", 0) > 0.5:
            limit = max(cut, key=lambda name: cut[name])
            if (area, metrics.get("eval/success")) == ("eval", 0) and not limit.endswith((POLICY_ERROR, REFUSED)):
                continue  # a note says so, with the option
            held_out = "held-out " * (area == "eval" and "reward/mean" in metrics)
            obstacles.append(f"{held_out}{cut[limit]:.0%} cut by {limit.rpartition('/')[2]}, which is no success")
    return obstacles


def _next_line(step: int, total: int) -> int:
    """The step of the next plain line: a round number, or ever longer steps where the end is not known."""
    if not total:
        return max(step + 1, step * 5 // 4)
    power = 10 ** max(0, math.floor(math.log10(total / _LINES)))
    every = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= total / _LINES)
    return (step // every + 1) * every
