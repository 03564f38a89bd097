"""Triton's kernels compute what fp64 does: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtgrpo.engines.local.kv_cache import BlockTable, KVCache, SharedPrefix
from mtgrpo.engines.local.paged_attention import KernelPlan, Row, attend
from mtgrpo.model.load import compute_in
from mtgrpo.model.settings import DType
from test_decode_kernels import LONGEST, expect

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {DType.float32: 1e-5, DType.float16: 4e-3} | ({DType.bfloat16: 3e-2} if DEVICE == "cuda" else {})


def made(size: int, groups: int, dtype: DType = DType.float32) -> tuple[KVCache, Any]:
    """A KV cache and its planner."""
    from mtgrpo.engines.local.triton_kernels import TritonPlanner  # noqa: PLC0415  where there is Triton

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=groups,
        num_key_value_heads=groups, head_dim=size,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(DEVICE)
    compute_in(model, dtype)
    cache = KVCache(model, 4096, LONGEST)
    return cache, TritonPlanner(cache, model.device, torch_of(dtype))


def one_token_each(cache: KVCache, planner: Any, rows: int) -> Any:
    """The plan of a step of new conversations."""
    tables = [BlockTable() for _ in range(rows)]
    for table in tables:
        cache.own.reserve(table, 1)
    return planner.plan([Row(table, [1]) for table in tables])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "heads", "groups", "most"), [(8, 4, 1, 1), (24, 4, 2, 16), (64, 4, 4, 1), (80, 6, 2, 1), (128, 16, 8, 16)]
)
def test_attention_is_that_of_fp64(
    size: int, heads: int, groups: int, most: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random steps of conversations, some with a common prefix, whole or divided into parts."""
    monkeypatch.setattr("mtgrpo.engines.local.triton_kernels.MOST_PARTS", most)
    rng, generator = random.Random(size), torch.Generator().manual_seed(size)
    cache, planner = made(size, groups, dtype)
    prefix = SharedPrefix(wanted=list(range(300)))
    tables = [BlockTable(prefix=prefix if i % 3 != 1 else None) for i in range(5)]
    steps = [[Row(prefix, prefix.wanted)], [Row(table, [1] * rng.choice([1, 30, 40])) for table in tables]]
    steps += [[Row(table, [1]) for table in rng.sample(tables, 5)] for _ in range(10)]
    empty = torch.zeros(0, groups, size, dtype=torch.float64)
    kept: dict[BlockTable, list[Tensor]] = {table: [empty, empty] for table in (prefix, *tables)}
    worst, parts = 0.0, {0}
    for rows in steps:
        for table, tokens in rows:
            cache.pool(table).reserve(table, len(tokens))
        plan = planner.plan(rows)
        made_ = [torch.randn(len(plan.ids), n, size, generator=generator) for n in (heads, groups, groups)]
        query, key, value = (part.to(cache.own.keys[0]) for part in made_)
        kernels = isinstance(plan, KernelPlan)
        assert kernels == all(len(tokens) == 1 and table is not prefix for table, tokens in rows)
        output = (plan if kernels else partial(attend, cache, plan))(0, query, key, value, size**-0.5)
        parts |= {plan.parts} if kernels else set()
        for (table, tokens), last in zip(rows, plan.last.tolist(), strict=True):
            new = slice(last + 1 - len(tokens), last + 1)
            kept[table] = [
                torch.cat([old, part[new].cpu().double()]) for old, part in zip(kept[table], (key, value), strict=True)
            ]
            before = kept[table.prefix] if table.prefix else [empty, empty]
            keys, values = (torch.cat(both) for both in zip(before, kept[table], strict=True))
            expected = expect(query[new].cpu(), keys, values, size**-0.5)
            worst = max(worst, float((output[new].cpu().double() - expected).abs().max()))
    assert worst < DTYPES[dtype]
    assert (max(parts) > 1) == (most > 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 4096])
def test_norm_and_activation_are_those_of_fp64(width: int, dtype: DType) -> None:
    plan, most = one_token_each(*made(16, 1), 5), DTYPES[dtype]
    x, more, weight = (torch.randn(*shape, device=DEVICE) for shape in ((5, width), (5, width), (width,)))
    more, kind = more.to(torch_of(dtype)), torch_of(dtype)
    total = x.double() + more.double()
    expected = rms_norm(total, (width,), weight.double(), 1e-6)
    for found in (plan.add_norm(x, more, weight, 1e-6, kind), plan.add_norm(x, None, weight, 1e-6, kind)):
        assert found.dtype is kind and ((found - expected).abs() <= most * (1 + expected.abs())).all()
    assert (x - total).abs().max() < 1e-6
    pair = torch.cat([torch.linspace(-80, 80, 5 * width).view(5, width), torch.randn(5, width)], 1).to(DEVICE, kind)
    wanted = silu(pair[:, :width].double()) * pair[:, width:].double()
    assert ((plan.silu_multiply(pair) - wanted).abs() <= most * (1e-3 + wanted.abs())).all()


def torch_of(dtype: DType) -> torch.dtype:
    kind: torch.dtype = getattr(torch, dtype.value)
    return kind


@pytest.mark.parametrize("size", [8, 48, 64])
def test_queries_and_keys_are_normed_and_rotated(size: int) -> None:
    """A first token sees itself alone, so its output is its value; the next sees both."""
    cache, planner = made(size, 2)
    table = BlockTable()
    angles = torch.rand(2, size, device=DEVICE) * 3
    weight = torch.rand(6, size, device=DEVICE) + 0.5
    parts = [torch.randn(2, count, size, device=DEVICE) for count in (4, 2, 2)]
    for token in range(2):
        cache.own.reserve(table, 1)
        plan, here = planner.plan([Row(table, [1])]), slice(token, token + 1)
        packed = torch.cat([part[here] for part in parts], 1).split([4, 2, 2], 1)  # as one product gives them
        found = plan.attend(0, packed, 0.2, (angles[here].cos(), angles[here].sin()), weight, 1e-5)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(part.double(), (size,), None, 1e-5) * weight
        other = torch.cat([-normed[..., size // 2 :], normed[..., : size // 2]], -1)
        return (normed * angles.cos()[:, None] + other * angles.sin()[:, None]).cpu()

    expected = expect(turned(parts[0], weight[:4]), turned(parts[1], weight[4:]), parts[2].double().cpu(), 0.2)
    assert (found.cpu() - expected[1:]).abs().max() < 1e-5
