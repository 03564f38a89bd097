"""The reward curve, in the terminal and as a picture."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtgrpo.runtime.text import number, sparkline

SPARSE = 16  # a series of at most so many points is drawn with its points


@dataclass
class Curve:
    """How the run learned: the training reward of every step, and held-out success where it was measured."""

    reward: list[float] = field(default_factory=list[float])
    success: dict[int, float] = field(default_factory=dict[int, float])  # step -> eval/success

    def draw(self, folder: Path, width: int) -> str:
        """Write `curve.png`; returns the training reward on a line, for a terminal of `width` columns, 60 or more."""
        steps = range(1, len(self.reward) + 1)
        held_out = (list(self.success), list(self.success.values()))
        save_curve(folder / "curve.png", {"training reward": (steps, self.reward), "held-out success": held_out})
        values = [reward for reward in self.reward if math.isfinite(reward)]
        ends = f"{number(values[0])} -> {number(values[-1])}" if values else "no values"
        bars = sparkline(values, width - 40) if (sys.stdout.encoding or "").lower().startswith("utf") else ""
        return f"training reward {bars} {ends}"


def save_curve(path: Path, series: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    """Write a PNG of 1600 x 1000 pixels with each series (steps, values) by its name.

    Long series are drawn pale with their moving average over them, short ones with their points and end values.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  takes a second

    figure: Any = Figure(figsize=(8, 5), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    for place, (name, (steps, values)) in enumerate(series.items()):
        points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        xs, ys = [step for step, _ in points], [value for _, value in points]
        color = f"C{place}"
        if len(points) > SPARSE:
            axes.plot(xs, ys, color=color, alpha=0.3, linewidth=1)
            axes.plot(xs, smoothed(ys), color=color, linewidth=2.2, label=name)
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


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a tenth of the series wide."""
    reach = max(1, len(values) // 20)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
