"""The calculator on a bad line, for benchmarks: a share `rate` of all attempts at a call fails."""

from __future__ import annotations

import random

from mtgrpo.tools.calculator import Calculator

rate = 0.0
random_numbers = random.Random(0)


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    if random_numbers.random() < rate:
        raise ConnectionError("the line is dead")
    return Calculator()(expression)
