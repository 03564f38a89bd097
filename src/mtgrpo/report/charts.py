"""A metric of one or several runs as a picture in SVG, without a script."""

import math
from collections.abc import Sequence
from html import escape

from mtgrpo.record.curve import SPARSE, smoothed
from mtgrpo.report.content import Series
from mtgrpo.runtime.text import number, printable

COLORS = ("#1f77b4", "#d9480f", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#846358", "#5f3dc4")
_WIDTH, _HEIGHT = 360, 190  # of the picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 8, 8, 20  # of the frame
_COLUMNS = 160  # more points than these share a column


def chart(metric: str, curves: Sequence[Series | None]) -> str:
    """The curves of one metric, one for each run in its color; a pale line spans what a column holds."""
    points = [point for curve in curves for point in curve or []]
    low, high = _enclosing([value for _, value in points])
    first, last = min(step for step, _ in points), max(step for step, _ in points)

    def x(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{escape(printable(metric))}</title>']
    for value in (low, (low + high) / 2, high):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 4}" y="{y(value) + 3.5:.1f}">{number(value)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{number(first)}</text>')
    if last > first:
        parts.append(f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">step {number(last)}</text>')
    for place, curve in enumerate(curves):
        color = COLORS[place % len(COLORS)]
        columns = _columns(curve or [], first, last)
        steps, means = [step for step, *_ in columns], [mean for _, _, mean, _ in columns]
        if len(columns) > SPARSE:
            spans = [(x(step), y(value)) for step, least, _, most in columns for value in (least, most)]
            parts.append(_line(spans, color, 'stroke-opacity=".3" stroke-width="1"'))
            smooth = zip(map(x, steps), map(y, smoothed(means)), strict=True)
            parts.append(_line(list(smooth), color, 'stroke-width="2"'))
            continue
        parts.append(_line(list(zip(map(x, steps), map(y, means), strict=True)), color, 'stroke-width="1.2"'))
        for step, mean in zip(steps, means, strict=True):
            title = f"<title>step {number(step)}: {number(mean)}</title>"
            parts.append(f'<circle cx="{x(step):.1f}" cy="{y(mean):.1f}" r="3" fill="{color}">{title}</circle>')
    return "".join([*parts, "</svg>"])


def _line(points: Sequence[tuple[float, float]], color: str, style: str) -> str:
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-linejoin="round" {style}/>'


def _columns(curve: Series, first: float, last: float) -> list[tuple[float, float, float, float]]:
    """Mean step, least, mean and greatest value of the points of each column that has any."""
    width = (last - first) / _COLUMNS or 1.0
    by_column: dict[int, Series] = {}
    for step, value in curve:
        by_column.setdefault(int((step - first) / width), []).append((step, value))
    columns: list[tuple[float, float, float, float]] = []
    for points in by_column.values():
        values = [value for _, value in points]
        step = sum(step for step, _ in points) / len(points)
        columns.append((step, min(values), sum(values) / len(values), max(values)))
    return columns


def _enclosing(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around all of `values`, whose middle is round too."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return (low - 1, high + 1) if not low else (low - abs(low) / 2, high + abs(high) / 2)
    power = 10.0 ** math.floor(math.log10(high - low))
    for half in (factor * power for factor in (0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10)):
        start = math.floor(low / half + 1e-9) * half
        if start + 2 * half >= high - 1e-9 * half:
            return start, start + 2 * half
    raise AssertionError(f"no step encloses {low} to {high}")
