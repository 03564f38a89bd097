"""The one place where log-ratios become ratios: clamped first, as in verl.

In fp32 exp(89) is infinite, and 0 times infinity, the gradient where a clip holds, is NaN.
"""

from __future__ import annotations

from mtgrpo.algorithms import Tensor

LARGEST = 20.0  # nats: exp(20) is 5e8


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) for any tensor; beyond -LARGEST and LARGEST it is constant and has no gradient."""
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Where `ratio_of` clamps; bool, without gradient."""
    return log_ratio.detach().abs() > LARGEST
