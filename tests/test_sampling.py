"""From logits to tokens: distributions, truncation, counter-based randomness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.engines import stream_key
from mtgrpo.engines.local.sampling import sample, truncate, uniforms
from mtgrpo.types import Sampling


def test_uniforms_equal_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as published with the reference implementation.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    keys = np.full(5, 1234567, dtype=np.uint64)
    found = uniforms(keys, np.arange(5, dtype=np.uint64))
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_uniforms_are_uniform_over_keys_and_positions() -> None:
    keys = np.array([stream_key(0, "t", sample_index) for sample_index in range(200)], dtype=np.uint64)
    grid = np.stack([uniforms(keys, np.full(200, position, dtype=np.uint64)) for position in range(100)])
    counts, _ = np.histogram(grid, bins=50, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 85.4  # 0.1 % point of 49 degrees of freedom
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03


def test_tokens_follow_the_distribution_at_each_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12).expand(20_000, 12) * 2
    for temperature in (0.5, 1.0, 2.0):
        uniform = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64))
        sampled = sample(logits, [Sampling(temperature=temperature)] * 20_000, uniform)
        expected = (logits[0] / temperature).softmax(-1)
        tokens = torch.tensor(sampled.tokens)
        found = torch.bincount(tokens, minlength=12) / 20_000
        assert (found - expected).abs().max() < 0.015
        assert torch.allclose(torch.tensor(sampled.logprobs), expected.log()[tokens], atol=1e-5)
        assert sampled.kept == [None] * 20_000


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform(vocabulary: int, seed: int) -> None:
    """Whatever the size of the vocabulary, and also at both ends of the unit interval."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocabulary, generator=generator, dtype=torch.float64) * 10
    uniform = np.array([0.0, 0.2, 0.5, 0.9, 0.999999, np.nextafter(1, 0)])
    found = sample(logits, [Sampling()] * 6, uniform).tokens
    probability = logits.softmax(-1).numpy()
    for row, token, at in zip(probability, found, uniform, strict=True):
        assert row[token] > 0
        assert row[:token].sum() <= at + 1e-12
        assert row[: token + 1].sum() > at - 1e-12


def test_what_is_kept_is_told_of_rows_that_are_cut_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 3)
    sampled = sample(logits, [Sampling(top_k=2), Sampling(), Sampling(top_p=0.1)], np.array([0.99, 0.99, 0.99]))
    kept = [None if tokens is None else list(tokens) for tokens in sampled.kept]
    assert kept == [[1, 3], None, [1]]
    assert sampled.tokens == [3, 3, 1]
    assert sampled.logprobs[2] == 0
    assert sampled.logprobs[0] == pytest.approx(logits[0, [1, 3]].log_softmax(-1)[1].item())


def reference_truncate(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """One row, token by token."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = order[:top_k] if top_k else order
    total = sum(probabilities[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += probabilities[i] / total
    best = probabilities[order[0]] / total
    kept = [i for i in nucleus if probabilities[i] / total >= min_p * best]
    total = sum(probabilities[i] for i in kept)
    return [probabilities[i] / total if i in kept else 0.0 for i in range(len(probabilities))]


@given(
    st.lists(st.floats(-3, 3), min_size=2, max_size=12, unique=True),
    st.integers(0, 5),
    st.sampled_from([0.31, 0.57, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_truncation_equals_a_slow_reference(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    logprobs = torch.tensor([row], dtype=torch.float64).log_softmax(-1)
    found = truncate(logprobs, [Sampling(top_k=top_k, top_p=top_p, min_p=min_p)]).exp()[0].tolist()
    assert found == pytest.approx(reference_truncate(logprobs.exp()[0].tolist(), top_k, top_p, min_p), abs=1e-9)


def test_a_greedy_row_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    sampled = sample(logits, [Sampling(temperature=0), Sampling()], np.array([0.999, 0.999]))
    assert sampled.tokens == [1, 2]
    assert sampled.logprobs[0] == pytest.approx(logits.log_softmax(-1)[0, 1].item())
