"""The kernels compiled for this CPU compute what fp64 does, for every size of head, number of threads and processor."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtgrpo.engines.local import decode_kernels
from mtgrpo.engines.local.decode_kernels import CompiledPlanner, NoKernelsError, load_kernels
from mtgrpo.engines.local.kv_cache import BlockTable, KVCache, SharedPrefix
from mtgrpo.engines.local.paged_attention import Row
from mtgrpo.engines.local.sampling import sample
from mtgrpo.types import Sampling

SIZES = (8, 24, 32, 48, 80, 128, 256)
OLDER = ("haswell", "x86-64") if platform.machine() == "x86_64" else ()  # AVX2, and SSE2 alone
LONGEST = 400


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_cache(size: int, groups: int) -> KVCache:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=groups,
        num_key_value_heads=groups, head_dim=size,
    )  # fmt: skip
    return KVCache(Qwen3ForCausalLM(config), 4096, LONGEST)


def expect(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of a sequence in fp64: [tokens, heads, size] each, keys of fewer heads."""
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    hidden = torch.ones(len(query), len(keys), dtype=torch.bool).triu(len(keys) - len(query) + 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def play(library: CDLL, heads: int, groups: int, size: int, seed: int = 0) -> float:
    """Random steps of conversations, some with a common prefix; the greatest distance from fp64."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = make_cache(size, groups)
    planner = CompiledPlanner(library, cache)
    prefix = SharedPrefix(wanted=list(range(rng.choice([40, 256, 300]))))
    tables = [BlockTable(prefix=prefix if i % 3 else None) for i in range(7)]
    steps = [[Row(prefix, prefix.wanted)]]
    steps += [[Row(table, [1] * rng.choice([1, 1, 5, 40])) for table in rng.sample(tables, 7)] for _ in range(4)]
    steps += [[Row(table, [1]) for table in tables[:4]]] * 4  # which advance
    empty = torch.zeros(0, groups, size, dtype=torch.float64)
    kept: dict[BlockTable, tuple[Tensor, Tensor]] = {table: (empty, empty) for table in (prefix, *tables)}
    worst = 0.0
    for rows in steps:
        for table, tokens in rows:
            cache.pool(table).reserve(table, len(tokens))
        plan = planner.plan(rows)
        parts = [torch.randn(len(plan.ids), count, size, generator=generator) for count in (heads, groups, groups)]
        output = plan(0, *parts, size**-0.5)
        for (table, tokens), last in zip(rows, plan.last.tolist(), strict=True):
            new = slice(last + 1 - len(tokens), last + 1)
            kept[table] = tuple(
                torch.cat([old, part[new].double()]) for old, part in zip(kept[table], parts[1:], strict=True)
            )  # type: ignore[assignment]
            before = kept[table.prefix] if table.prefix else (empty, empty)
            keys, values = (torch.cat(both) for both in zip(before, kept[table], strict=True))
            worst = max(worst, float((output[new] - expect(parts[0][new], keys, values, size**-0.5)).abs().max()))
    return worst


@pytest.mark.parametrize(("size", "heads", "groups"), [(size, 4, (1, 2, 4)[i % 3]) for i, size in enumerate(SIZES)])
def test_attention_is_that_of_fp64(size: int, heads: int, groups: int, threads: None) -> None:
    assert play(load_kernels(size), heads, groups, size, seed=size) < 1e-5


@pytest.mark.parametrize("processor", OLDER)
@pytest.mark.parametrize("size", [24, 64])
def test_older_processors_compute_the_same(size: int, processor: str) -> None:
    assert play(load_kernels(size, processor), 6, 2, size) < 1e-5


def make_plan(size: int = 32) -> Any:
    cache = make_cache(size, 2)
    table = BlockTable()
    cache.own.reserve(table, 16)
    return CompiledPlanner(load_kernels(size), cache).plan([Row(table, [1] * 16)])


@pytest.mark.parametrize("width", [8, 100, 4096])
def test_norm_and_activation_are_those_of_fp64(width: int, threads: None) -> None:
    plan, (x, more, weight) = make_plan(), (torch.randn(16, width), torch.randn(16, width), torch.rand(width) + 0.5)
    total = x.double() + more.double()
    expected = torch.nn.functional.rms_norm(total, (width,), weight.double(), 1e-6)
    assert (plan.add_norm(x, more, weight, 1e-6, torch.float32) - expected).abs().max() < 5e-6
    assert (x - total).abs().max() < 1e-6
    assert (plan.add_norm(x, None, weight, 1e-6, torch.float32) - expected).abs().max() < 5e-6
    pair = torch.cat([torch.linspace(-110, 110, 16 * width).view(16, width), torch.ones(16, width)], 1)
    silu = torch.nn.functional.silu(pair[:, :width].double())
    assert ((plan.silu_multiply(pair) - silu).abs() <= 4e-7 * silu.abs() + 1e-34).all()


def test_queries_and_keys_are_normed_and_rotated() -> None:
    plan, size = make_plan(), 32
    parts = [torch.randn(16, count, size) for count in (4, 2, 2)]
    angles = torch.rand(16, size)
    weight, rotation = torch.rand(6, size) + 0.5, (angles.cos(), angles.sin())
    found = plan.attend(0, parts, 0.2, rotation, weight, 1e-5)

    def turned(part: Tensor, weight: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(part.double(), (size,), None, 1e-5) * weight
        other = torch.cat([-normed[..., size // 2 :], normed[..., : size // 2]], -1)
        return normed * rotation[0][:, None] + other * rotation[1][:, None]

    expected = expect(turned(parts[0], weight[:4]), turned(parts[1], weight[4:]), parts[2].double(), 0.2)
    assert (found - expected).abs().max() < 1e-5


def test_the_token_is_the_one_that_torch_finds(threads: None) -> None:
    logits = 4 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    logits[:20, 5:] = -torch.inf
    uniform = np.random.default_rng(0).random(200)
    uniform[:4] = 0.0, 1 - 2.0**-53, 0.5, 0.5
    settings = [Sampling(temperature=t) for t in (0.0, 0.3, 1.0, 2.5)] * 50
    expected = sample(logits.double(), settings, uniform)
    found = sample(logits.clone(), settings, uniform, load_kernels(32))
    assert found.tokens == expected.tokens
    assert found.kept == expected.kept
    assert np.abs(np.array(found.logprobs) - np.array(expected.logprobs)).max() < 1e-5


def test_logits_that_are_no_numbers_give_a_token_all_the_same() -> None:
    """What is wrong is found where log-probabilities are looked at."""
    found = sample(
        torch.full((2, 70), torch.nan), [Sampling(), Sampling(temperature=0)], np.ones(2) / 2, load_kernels(32)
    )
    assert all(0 <= token < 70 for token in found.tokens)
    assert np.isnan(found.logprobs).all()


@pytest.mark.parametrize(
    ("size", "compiler", "reason", "cache"),
    [
        (20, "c++", "heads of 20 numbers", ""),
        (16, "no-such-compiler -v", "compiler 'no-such-compiler'", ""),
        (16, "false", "false failed", ""),
        (16, "c++", "could not be made: Could not determine home directory", "~nobody-of-this-name/cache"),
    ],
)
def test_why_there_are_no_kernels_is_said(
    size: int, compiler: str, reason: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_kernels, "CACHE", cache or str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NoKernelsError, match=reason):
        load_kernels.__wrapped__(size)
    assert not list(tmp_path.iterdir())


def test_what_is_compiled_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "CACHE", str(tmp_path))
    load_kernels.__wrapped__(16)
    (library,) = tmp_path.iterdir()
    made = library.stat().st_mtime_ns
    load_kernels.__wrapped__(16)
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == [made]


def test_threads_are_those_of_torch() -> None:
    """Another OpenMP library would start threads beside them."""
    load_kernels(32)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith("libgomp")}) == 1
