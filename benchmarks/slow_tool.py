"""The calculator on a slow line, for benchmarks: log-normal answers, median 0.2 s, tail to 3 s."""

from __future__ import annotations

import asyncio
import random

from mtgrpo.tools.calculator import Calculator

MEDIAN_S = 0.2
LONGEST_S = 3.0


def delay_s(rng: random.Random) -> float:
    """How long one answer takes."""
    return min(LONGEST_S, MEDIAN_S * rng.lognormvariate(0, 1))


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    await asyncio.sleep(delay_s(random.Random()))
    return Calculator()(expression)
