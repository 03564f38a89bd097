"""Kernels on a CPU: linear layers and norms give the same numbers, forward and backward, as torch's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mtgrpo.model import cpu_kernels
from mtgrpo.model.cpu_kernels import GRID, OneDNNLinear, multiply, onednn, pack, packs, use_cpu_kernels

HERE = onednn(torch.device("cpu"), torch.float32)
needs_onednn = pytest.mark.skipif(not HERE, reason="oneDNN multiplies fp32 matrices on x86 alone")


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40, bias=bias)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(GRID,), (3 * GRID,), (1, 2 * GRID), (2, GRID)])
def test_values_and_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(bias)
    fast = copy.deepcopy(plain)
    use_cpu_kernels(fast)
    assert type(fast) is OneDNNLinear
    x = torch.randn(*shape, 24)
    found: list[list[torch.Tensor]] = []
    for one in (plain, fast):
        inside = x.clone().requires_grad_()
        out = one(inside)
        (out * torch.linspace(-1, 1, 40)).square().sum().backward()
        found.append([out.detach(), inside.grad, *(p.grad for p in one.parameters())])  # type: ignore[list-item]
    for expected, value in zip(*found, strict=True):
        assert value.shape == expected.shape
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_onednn
def test_onednn_is_used_on_the_grid_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of rows, other dtypes and autocast are torch's own business."""
    fast = layer(True)
    use_cpu_kernels(fast)
    calls: list[int] = []
    monkeypatch.setattr(cpu_kernels, "multiply", lambda x, w, b=None: calls.append(len(x)) or multiply(x, w, b))
    fast(torch.randn(GRID, 24))
    fast(torch.randn(GRID + 1, 24))
    fast(torch.randn(0, 24))
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(torch.randn(GRID, 24)).dtype is torch.bfloat16
    fast.double()(torch.randn(GRID, 24).double())
    assert calls == [GRID]


@needs_onednn
def test_what_needs_no_gradient_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen base under adapters."""
    fast = layer(False)
    use_cpu_kernels(fast)
    fast.requires_grad_(False)
    x = torch.randn(GRID, 24, requires_grad=True)
    out = fast(x)
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(cpu_kernels, "multiply", lambda x, w, b=None: calls.append(w.shape) or multiply(x, w, b))
    out.sum().backward()
    assert calls == [(24, 40)]
    assert fast.weight.grad is None


@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_packed_weights_multiply_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert (multiply(x, pack(weight), bias) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_double_precision_is_left_alone() -> None:
    double = layer(True).double()
    use_cpu_kernels(double)
    assert type(double) is nn.Linear


@needs_onednn
@pytest.mark.parametrize(("vendor", "small"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_on_intels_processors_small_matrices_are_not_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, small: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(cpu_kernels, "CPU_INFO", tmp_path / "cpuinfo")
    cpu_kernels._made_by_intel.cache_clear()  # pyright: ignore[reportPrivateUsage]
    assert packs(torch.empty(64, 64)) is small
    assert packs(torch.empty(1024, 512))
    assert not packs(torch.empty(1024, 512, dtype=torch.bfloat16))
    cpu_kernels._made_by_intel.cache_clear()  # pyright: ignore[reportPrivateUsage]


# --- norms ---


def norm(size: int) -> torch.nn.ModuleList:
    generator = torch.Generator().manual_seed(size)
    plain = Qwen3RMSNorm(size)
    plain.weight.data = torch.randn(size, generator=generator)
    return torch.nn.ModuleList([plain])


@pytest.mark.parametrize("shape", [(1, 7, 192), (3, 5, 6, 32), (2, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_norms_have_the_values_and_gradients_of_plain_ones(shape: tuple[int, ...], strided: bool) -> None:
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
