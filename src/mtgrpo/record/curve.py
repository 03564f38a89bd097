"""The reward curve, in the terminal and as a picture."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell: [column][row from the top]
_BRAILLE = 0x2800
_SPARSE = 16  # a series of at most so many points is drawn with its points


@dataclass
class Curve:
    """How the run learned: the training reward of every step, and held-out success where it was measured."""

    reward: list[float] = field(default_factory=list[float])
    success: dict[int, float] = field(default_factory=dict[int, float])  # step -> eval/success

    def draw(self, folder: Path, width: int, height: int) -> str:
        """Write `curve.png`; returns the curve for a terminal of that size."""
        steps = range(1, len(self.reward) + 1)
        held_out = (list(self.success), list(self.success.values()))
        save_curve(folder / "curve.png", {"training reward": (steps, self.reward), "held-out success": held_out})
        return terminal_curve(self.reward, "training reward", width, height)


def terminal_curve(values: Sequence[float], title: str, width: int, height: int, encoding: str | None = None) -> str:
    """A curve of `values` over steps 1, 2, ... as lines of text, at most `width` columns and `height` rows.

    More values than columns are averaged column by column; NaN and infinity are left out. In braille, or in ASCII
    where `encoding` (None = that of the standard output) has none.
    """
    points = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]
    if not points:
        return f"{title}: no values"
    braille = _encodes("\u28ff│┤└─┬", encoding or sys.stdout.encoding or "ascii")
    dots_x, dots_y = (2, 4) if braille else (1, 1)
    finite = [value for _, value in points]
    ticks = _ticks(min(finite), max(finite), max(2, height // 3))
    labels = _labels(ticks)
    margin = max(len(label) for label in labels)
    columns, rows = max(8, width - margin - 2), max(2, height - 3)
    low, high = ticks[0], ticks[-1]

    def dot_row(value: float) -> int:
        return round((high - value) / (high - low) * (rows * dots_y - 1))

    heights = [dot_row(value) for value in _resampled(points, len(values), columns * dots_x)]
    cells = _cells(heights, columns, rows, dots_x, dots_y)
    shown = dict(zip((dot_row(tick) // dots_y for tick in ticks), labels, strict=True))
    edge, tick_edge = ("│", "┤") if braille else ("|", "+")
    lines = [title[:width]]
    for number, line in enumerate(cells):
        text = "".join(chr(_BRAILLE + bits) if braille else "*" if bits else " " for bits in line)
        text = text.replace("\u2800", " ").rstrip()  # an empty braille cell is not blank in every font
        lines.append(f"{shown.get(number, ''):>{margin}} {tick_edge if number in shown else edge}{text}".rstrip())
    lines.append(" " * (margin + 1) + ("└" + "─" * columns if braille else "+" + "-" * columns))
    last = f"step {len(values)}"
    lines.append(" " * (margin + 2) + "1" + last.rjust(columns - 1))
    return "\n".join(lines)


def save_curve(path: Path, series: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    """Write a PNG of 1600 x 1000 pixels with each series (steps, values) by its name.

    Long series are drawn pale with their moving average over them, short ones with their points and end values.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  takes a second

    figure: Any = Figure(figsize=(8, 5), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, (steps, values)) in enumerate(series.items()):
        points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        xs, ys = [step for step, _ in points], [value for _, value in points]
        color = f"C{number}"
        if len(points) > _SPARSE:
            axes.plot(xs, ys, color=color, alpha=0.3, linewidth=1)
            axes.plot(xs, _smooth(ys), color=color, linewidth=2.2, label=name)
        else:
            axes.plot(xs, ys, color=color, linewidth=1.2, marker="o", markersize=6, label=name)
            for point in {*points[:1], *points[-1:]}:
                axes.annotate(f"{point[1]:.2f}", point, (0, 8), textcoords="offset points", ha="center", color=color)
    axes.set_xlabel("step")
    axes.set_ylabel(" / ".join(series))
    axes.margins(y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if series:
        figure.legend(frameon=False, loc="outside lower center", ncols=len(series))
    figure.savefig(path, format="png")


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that enclose [low, high], about `most` of them and at least two."""
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)) + 1e-100:
        span = abs(high) if abs(high) > 1e-90 else 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * most >= span * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text, with as few decimals as are exact."""
    exact = 1e-6 * (ticks[1] - ticks[0])
    for digits in range(7):
        if all(abs(round(tick, digits) - tick) < exact for tick in ticks) and max(map(abs, ticks)) < 1e6:
            return [f"{tick:.{digits}f}" for tick in ticks]
    return [f"{tick:.4g}" for tick in ticks]


def _resampled(points: Sequence[tuple[int, float]], length: int, columns: int) -> list[float]:
    """One value for each of `columns` over steps 1..`length`: the mean of its points, else interpolated."""
    sums, counts = [0.0] * columns, [0] * columns
    for step, value in points:
        column = round((step - 1) / max(1, length - 1) * (columns - 1))
        sums[column] += value
        counts[column] += 1
    filled = [column for column in range(columns) if counts[column]]
    means = [sums[column] / counts[column] for column in filled]
    values: list[float] = []
    after = 0
    for column in range(columns):
        while after < len(filled) - 1 and filled[after] < column:
            after += 1
        before = max(0, after - 1)
        width = filled[after] - filled[before]
        share = min(1.0, max(0.0, (column - filled[before]) / width)) if width else 1.0
        values.append(means[before] + share * (means[after] - means[before]))
    return values


def _cells(heights: Sequence[int], columns: int, rows: int, dots_x: int, dots_y: int) -> list[list[int]]:
    """The dots of a line through `heights` (dot rows from the top), as bits per character cell."""
    cells = [[0] * columns for _ in range(rows)]
    for x, height in enumerate(heights):
        reach = (heights[x - 1] + height) // 2 if x else height  # halfway to its neighbour, so steep parts stay joined
        reach_next = (heights[x + 1] + height) // 2 if x + 1 < len(heights) else height
        for y in range(min(reach, reach_next, height), max(reach, reach_next, height) + 1):
            cells[y // dots_y][x // dots_x] |= _DOTS[x % dots_x][y % dots_y] if dots_y > 1 else 1
    return cells


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a tenth of the series wide."""
    reach = max(1, len(values) // 20)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
