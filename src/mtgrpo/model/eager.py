"""What torch.compile is not to trace: kernels whose tiles and pieces are laid out in Python, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def eagerly(function: Callable[..., T], *arguments: object) -> T:
    """The result of `function`, which runs as it is written also where the caller is being compiled."""
    if torch.compiler.is_compiling():
        function = cast(Callable[..., T], torch.compiler.disable(function))  # only here: it imports the compiler
    return function(*arguments)
