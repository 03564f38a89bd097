"""Products with weight matrices on a CPU, by oneDNN, which torch would leave to MKL.

MKL does not use the widest vector instructions of AMD's processors: there oneDNN is up to twice as fast (measured on
one; on one of Intel's they are alike, and MKL is faster where few rows meet a `SMALL` matrix). Every new number of
rows costs it some milliseconds once, so a caller rounds the number up to a `GRID`; other numbers go to MKL.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

GRID = 64  # rows of a training batch
PACKED_ROWS = 64  # for how many rows weights are packed; any number works
SMALL = 2**18  # weights
CPU_INFO = Path("/proc/cpuinfo")


def onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this kind here."""
    fitting = device.type == "cpu" and dtype == torch.float32 and platform.machine() in ("x86_64", "AMD64")
    return fitting and torch.backends.mkldnn.is_available()


def packs(weight: Tensor) -> bool:
    """Whether few rows are multiplied with `weight` fastest once it is packed."""
    return onednn(weight.device, weight.dtype) and (weight.numel() >= SMALL or not _made_by_intel())


@cache
def _made_by_intel() -> bool:
    return CPU_INFO.exists() and "GenuineIntel" in CPU_INFO.read_text()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in] of any strides, or packed -> [rows, out]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A copy of `weight` in the layout that suits few rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of `model` multiply by oneDNN where it can."""
    for module in model.modules():
        if type(module) is nn.Linear and onednn(module.weight.device, module.weight.dtype):
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """A linear layer whose forward and backward products are oneDNN's when the number of rows lies on the grid."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., rows, in] -> [..., rows, out]."""
        rows = input.numel() // self.in_features
        plain = input.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or rows % GRID
        plain = plain or torch.compiler.is_compiling()  # which chooses for itself
        if plain or not rows:
            return linear(input, self.weight, self.bias)
        return _Multiply.apply(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight.t()) if of_x else None,
            multiply(grad.t(), x.t()) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
