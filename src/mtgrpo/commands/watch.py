"""`mtgrpo watch RUN`: how a run is doing, live in a terminal, from the end of the files that it writes."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mtgrpo.errors import Arguments
from mtgrpo.log.console import panel
from mtgrpo.record.reading import count, find_runs, parse_row, read_settings
from mtgrpo.record.shapes import METRICS, Json
from mtgrpo.runtime.files import read_last_lines
from mtgrpo.runtime.text import clock, is_number, printable
from mtgrpo.types import LEARNING

_TAIL = 1 << 18  # bytes of metrics.jsonl that are read: of a run with fifty metrics, the last 200 rows
_NOTES = 1 << 12
_EVERY_S = 1.0
_RECENT = 20  # steps that tell the speed
_SILENT = 20  # times as long as a step: then nothing may come any more


@dataclass(frozen=True)
class Progress:
    """Where a run is. Times are in seconds."""

    rows: list[Json]  # the last ones
    stage: str
    step: int
    total: int  # steps of the stage, 0 = not known
    step_s: float  # that a step takes, 0.0 = not known
    silent_s: float  # since the last row
    ended: bool


def main(arguments: Sequence[str]) -> int:
    """Show the run until it ends or Ctrl-C; with --once, or where there is no terminal, print once and end."""
    parser = Arguments("mtgrpo watch", description=__doc__)
    about = "a run's folder; of a sweep's, the run that wrote last; by default the newest here"
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help=about)
    parser.add_argument("--once", action="store_true", help="print how it stands now, and end")
    args = parser.parse_args(arguments)
    folder = max(find_runs(args.run), key=_changed)
    settings = read_settings(folder)
    out = Console(highlight=False, markup=False, emoji=False)
    progress = read_progress(folder, settings)
    if args.once or not out.is_terminal:
        out.print(screen(folder, progress, out))
        return 0
    with suppress(KeyboardInterrupt), Live(screen(folder, progress, out), console=out, auto_refresh=False) as live:
        while not progress.ended:
            time.sleep(_EVERY_S)
            progress = read_progress(folder, settings)
            live.update(screen(folder, progress, out), refresh=True)
    return 0


def read_progress(folder: Path, settings: dict[str, str]) -> Progress:
    """From the end of `metrics.jsonl`. A run has ended when its summary is newer than its metrics."""
    parsed = (parse_row(line, METRICS) for line in read_last_lines(folder / "metrics.jsonl", _TAIL))
    rows = [row for row in parsed if row is not None and "step" in row]
    stage = str(rows[-1].get("stage")) if rows else ""
    of_stage = [row for row in rows if row.get("stage") == stage]
    totals = {"warm start": "sft.steps", LEARNING: "trainer.steps"}
    written = _changed(folder)
    summary = folder / "summary.json"
    return Progress(
        rows=rows,
        stage=stage,
        step=of_stage[-1]["step"] if of_stage else 0,
        total=count(settings.get(totals.get(stage, ""), "")),
        step_s=_step_s((of_stage[1:] or of_stage)[-_RECENT:]),  # the first step has checks of its own
        silent_s=max(0.0, time.time() - written),
        ended=summary.is_file() and summary.stat().st_mtime >= written,
    )


def screen(folder: Path, progress: Progress, out: Console) -> Group:
    """The stage and its bar, the newest metrics with their recent course, the last notes."""
    step = f"step {progress.step:,}" if progress.total or progress.stage == LEARNING else ""
    facts = [progress.stage, step + (f" of {progress.total:,}" if progress.total else ""), _times(progress)]
    lines = [] if progress.rows else ["no metrics yet (metrics.jsonl, which the sink jsonl writes)"]
    notes = [line.decode(errors="replace") for line in read_last_lines(folder / "notes.txt", _NOTES)[-3:]]
    lines += [f"  {printable(note)}" for note in notes]
    shown = panel(folder.name, facts, progress.step, progress.total, progress.rows, out)
    return Group(shown, *(Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines))


def _times(progress: Progress) -> str:
    if progress.ended:
        return "ended"
    left = progress.step_s * (progress.total - progress.step)
    eta = f"{clock(left)} left, " if left > 0 else ""
    silent = f"last row {clock(progress.silent_s)} ago"
    stuck = progress.step_s and progress.silent_s > max(60.0, _SILENT * progress.step_s)
    return f"it may have stopped: {silent}" if stuck else eta + silent


def _step_s(rows: Sequence[Json]) -> float:
    """What a step takes, by its own times: rollout and training, or what the warm start has taken so far."""
    parts = ("time/rollout_s", "time/train_s")
    both = [sum(row[part] for part in parts) for row in rows if all(is_number(row.get(p)) for p in parts)]
    if both:
        return sum(both) / len(both)
    taken = [(row["step"], row["time/sft_s"]) for row in rows if is_number(row.get("time/sft_s"))]
    if len(taken) < 2:
        return 0.0
    (first, began), (last, now) = taken[0], taken[-1]
    return (now - began) / max(1, last - first)


def _changed(folder: Path) -> float:
    """When its metrics were last written, 0.0 for never."""
    metrics = folder / "metrics.jsonl"
    return metrics.stat().st_mtime if metrics.is_file() else 0.0
