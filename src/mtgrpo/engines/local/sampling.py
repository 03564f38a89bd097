"""Turn logits into tokens: temperature, top-k, top-p, min-p, and random numbers that depend on a counter alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mtgrpo.engines.local.decode_kernels import sample_whole
from mtgrpo.types import Sampling

BLOCK = 64  # tokens of the vocabulary whose probabilities are summed first
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampled:
    """One token of each row."""

    tokens: list[int]
    logprobs: list[float]  # under the distribution sampled from
    kept: list[array[int] | None]  # the tokens that top-k, top-p or min-p kept, ascending; None = all


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) for each (key, position): SplitMix64 (Steele, Lea, Flood 2014) at that counter."""
    with np.errstate(over="ignore"):
        z = keys + (positions + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor, settings: Sequence[Sampling], uniform: NDArray[np.float64], library: CDLL | None = None
) -> Sampled:
    """One token for each row by inverting the cumulative distribution at `uniform`.

    logits [rows, vocabulary] fp32 or fp64. A row with temperature 0 takes the most likely token and reports its
    log-probability at temperature 1. library: kernels compiled for this CPU, which overwrite the logits.
    """
    if library is not None and not any(s.cuts for s in settings):
        tokens, logprobs = sample_whole(library, logits, [s.temperature for s in settings], uniform)
        return Sampled(tokens, logprobs, [None] * len(settings))
    if any(s.temperature not in (0, 1) for s in settings):
        temperatures = [s.temperature or 1.0 for s in settings]
        logits = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    cut = [i for i, s in enumerate(settings) if s.cuts]
    kept: list[array[int] | None] = [None] * len(settings)
    probability = truncate(logits.log_softmax(-1), settings).exp() if cut else logits.softmax(-1)
    for i, left in zip(cut, _kept(probability[cut]), strict=True) if cut else ():
        kept[i] = left
    chosen = _invert(probability, torch.from_numpy(uniform).to(logits.device))
    greedy = [s.temperature == 0 for s in settings]
    if any(greedy):
        chosen = torch.where(torch.tensor(greedy, device=logits.device), probability.argmax(-1), chosen)
    return Sampled(chosen.tolist(), probability.gather(-1, chosen[:, None])[:, 0].log().tolist(), kept)


def _invert(probability: Tensor, uniform: Tensor) -> Tensor:
    """The first token of each row at which the cumulative probability exceeds `uniform` [rows] of the whole.

    Blocks are summed in fp64 (in fp32 a uniform close to 1 would round to 1) and only the one that is hit is searched.
    """
    rows, vocabulary = probability.shape
    if vocabulary % BLOCK:
        probability = pad(probability, (0, BLOCK - vocabulary % BLOCK))
    blocks = probability.view(rows, -1, BLOCK)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    point = uniform[:, None] * cumulative[:, -1:]
    # Rounding may put the point at the very end: the last block, and in it the last token, that adds anything is meant.
    hit = torch.searchsorted(cumulative, point, right=True).minimum(_last(cumulative))
    before = torch.where(hit > 0, cumulative.gather(1, (hit - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, hit[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    place = torch.searchsorted(inside, point - before, right=True).minimum(_last(inside))
    return (hit * BLOCK + place)[:, 0]


def _last(cumulative: Tensor) -> Tensor:
    """The first place of each row that reaches its end."""
    return (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)


def _kept(probability: Tensor) -> list[array[int]]:
    """The tokens of each row that have not been cut off; a GPU is waited for once."""
    row, token = probability.nonzero().cpu().unbind(1)
    return [array("i", tokens.tolist()) for tokens in token.split(row.bincount().tolist())]


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
