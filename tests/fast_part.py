"""Cases of which the fast tests take a part, and the slow ones the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast_part(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases for `parametrize`: one of `every` as it is, the others marked slow."""
    return [case if i % every == 0 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]
