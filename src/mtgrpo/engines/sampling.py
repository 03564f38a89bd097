"""Turn logits into tokens: temperature, top-k, top-p, min-p, and random numbers that depend on a counter alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.types import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_key(*parts: int | str) -> int:
    """A 64-bit key for one stream of random numbers, e.g. of (seed, task, sibling, turn)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each (key, position): SplitMix64 (Steele, Lea, Flood 2014) at that counter."""
    with np.errstate(over="ignore"):
        z = keys + (positions + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, settings: Sequence[Sampling], uniform: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token for each row by inverting the cumulative distribution at `uniform`.

    logits [rows, vocabulary] fp32 or fp64. Returns tokens [rows] int64 and their log-probabilities [rows] of
    the same dtype, under the distribution sampled from; a row with temperature 0 takes the most likely token and
    reports its log-probability at temperature 1.
    """
    temperatures = torch.tensor([s.temperature or 1.0 for s in settings], dtype=logits.dtype, device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    if any(s.top_p < 1 or s.top_k or s.min_p for s in settings):
        logprobs = truncate(logprobs, settings)
    cumulative = logprobs.double().exp().cumsum(-1)  # fp64: a uniform close to 1 would round to 1 in fp32
    point = torch.from_numpy(uniform).to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
    greedy = [s.temperature == 0 for s in settings]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logprobs: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Keep each row's top-k, then its nucleus (top-p), then what reaches min-p of the best; renormalise."""
    values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([s.top_k or logprobs.shape[-1] for s in settings], device=logprobs.device)
    top_p = torch.tensor([s.top_p for s in settings]).to(logprobs)
    min_p = torch.tensor([s.min_p for s in settings]).to(logprobs)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    values = values.masked_fill(rank >= top_k[:, None], -torch.inf).log_softmax(-1)
    probability = values.exp()
    before = probability.cumsum(-1) - probability  # a token is in the nucleus while the mass before it is below top_p
    drop = (before >= top_p[:, None]) | (probability < min_p[:, None] * probability[:, :1])
    kept = values.masked_fill(drop, -torch.inf).log_softmax(-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, order, kept)
