"""Faster kernels on a CPU: products with weight matrices by oneDNN, and RMS norms in few passes over memory.

torch would leave the products to MKL, which does not use the widest vector instructions of AMD's processors: there
oneDNN is up to twice as fast (measured on one; on one of Intel's they are alike, and MKL is faster where few rows meet
a `SMALL` matrix). Every new number of rows costs it some milliseconds once, so a caller rounds the number up to a
`GRID`; other numbers go to MKL. The norms of transformers, with their backward, pass over memory about twenty times.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.functional import linear, rms_norm

from mtgrpo.model.checkpointing import subclass

GRID = 64  # rows of a training batch
PACKED_ROWS = 64  # for how many rows weights are packed; any number works
SMALL = 2**18  # weights
CPU_INFO = Path("/proc/cpuinfo")


def use_cpu_kernels(model: nn.Module) -> None:
    """Let linear layers and plain RMS norms, x / rms(x) * weight, in float32 on a CPU, run by the kernels here."""
    for module in cast("list[Any]", list(model.modules())):
        kind: type = type(module)
        if kind is nn.Linear and onednn(module.weight.device, module.weight.dtype):
            module.__class__ = OneDNNLinear
        elif kind.__name__.endswith("RMSNorm") and _is_plain_norm(module):
            module.__class__ = subclass("Fused", _FusedNorm, kind)


def onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this kind here."""
    fitting = device.type == "cpu" and dtype == torch.float32 and platform.machine() in ("x86_64", "AMD64")
    return fitting and torch.backends.mkldnn.is_available()


def multiplies_bf16(device: torch.device) -> bool:
    """Whether this is a CPU with instructions for products of bf16, of which torch rounds each result to bf16."""
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]


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


@torch.no_grad()
def _is_plain_norm(norm: nn.Module) -> bool:
    """Whether `norm` computes x / rms(x) * weight; it is run, for some families scale by 1 + weight, or otherwise."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or eps is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    probe, scale = torch.linspace(-2, 3, weight.numel()), torch.linspace(0.5, 2, weight.numel())
    normed: Tensor = functional_call(norm, {"weight": scale}, (probe,))  # a model without weights has norms too
    return torch.allclose(normed, rms_norm(probe, weight.shape, scale, eps), rtol=1e-5, atol=1e-6)


class _FusedNorm(nn.Module):
    """Stands before the class of a norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.float32 or hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, inverse = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        inverse = inverse.reshape(-1, 1)
        grad, normed = grad.reshape(-1, len(weight)), x.reshape(-1, len(weight)) * inverse
        product = grad * normed
        along = torch.mv(product, weight).div_(-len(weight))  # what of the gradient lies along x
        of_x = torch.addcmul(grad * weight, normed, along[:, None]).mul_(inverse).view_as(x)
        return of_x, product.sum(0) if ctx.needs_input_grad[1] else None, None
