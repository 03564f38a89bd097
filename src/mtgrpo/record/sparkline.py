"""A curve on one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """`values`, finite, in at most `width` characters, each the mean of its share; "" for none."""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    shares = [values[start:end] for start, end in pairwise(edges)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else math.inf
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
