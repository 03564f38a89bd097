"""RMS norms on a CPU in few passes over memory; transformers' own, with their backward, take about twenty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

_fused = torch.ops.aten._fused_rms_norm


def use_fused_rms_norm(model: nn.Module) -> None:
    """Let the RMS norms of `model` that are plain ones, x / rms(x) * weight in float32 on a CPU, run in few passes."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = _Norm(module)


@torch.no_grad()
def _is_plain(norm: nn.Module) -> bool:
    """By what it does: some families scale by 1 + weight, or compute in another way."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or eps is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    probe, scale = torch.linspace(-2, 3, weight.numel()), torch.linspace(0.5, 2, weight.numel())
    normed: Tensor = functional_call(norm, {"weight": scale}, (probe,))  # a model without weights has norms too
    return torch.allclose(normed, nn.functional.rms_norm(probe, weight.shape, scale, eps), rtol=1e-5, atol=1e-6)


class _Norm:
    """The forward of one norm."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._plain = norm, type(norm).forward

    def __call__(self, hidden: Tensor) -> Tensor:
        norm = self._norm
        if hidden.dtype != torch.float32 or hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return self._plain(norm, hidden)
        return _RMSNorm.apply(hidden, norm.weight, norm.variance_epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, inverse = _fused(x, weight.shape, weight, eps)
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
