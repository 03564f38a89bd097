"""Norms in few passes are transformers' norms."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mtgrpo.model.cpu_kernels import use_cpu_kernels


def norm(size: int) -> torch.nn.ModuleList:
    generator = torch.Generator().manual_seed(size)
    plain = Qwen3RMSNorm(size)
    plain.weight.data = torch.randn(size, generator=generator)
    return torch.nn.ModuleList([plain])


@pytest.mark.parametrize("shape", [(1, 7, 192), (3, 5, 6, 32), (2, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_values_and_gradients_are_those_of_the_plain_norm(shape: tuple[int, ...], strided: bool) -> None:
    plain = norm(shape[-1])
    lean = copy.deepcopy(plain)
    use_cpu_kernels(lean)
    assert type(lean[0]) is not Qwen3RMSNorm
    lean = copy.deepcopy(lean)  # a copy has its own weights
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, *shape, generator=generator)
    if strided:
        x, grad = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, grad))
    found: list[list[torch.Tensor]] = []
    for module in (plain[0], lean[0]):
        given = x.clone().requires_grad_()
        output = module(given)
        found.append([output, *torch.autograd.grad(output, (given, module.weight), grad)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert lean[0].weight is not plain[0].weight


def test_other_norms_and_other_precisions_are_left_alone() -> None:
    gemma, double = torch.nn.ModuleList([GemmaRMSNorm(8)]), norm(8).double()
    use_cpu_kernels(torch.nn.ModuleList([gemma, double]))
    assert type(gemma[0]) is GemmaRMSNorm and type(double[0]) is Qwen3RMSNorm
    lean = norm(8)
    use_cpu_kernels(lean)
    half = torch.ones(2, 8, dtype=torch.bfloat16)
    assert lean[0](half).dtype == norm(8)[0](half).dtype
