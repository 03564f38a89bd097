"""The attention of the end of a context to each span of it, for condensers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtgrpo.engines.local.decoder import Forward, causal_attention

RECENT = 16  # tokens whose attention is measured: the last of the context, from which the policy would go on


@torch.inference_mode()
def attention_scores(
    forward: Forward, tokens: Sequence[int], spans: Sequence[tuple[int, int]], device: torch.device
) -> list[float]:
    """The share of attention that tokens [start, end) of each span get from the last `RECENT` tokens.

    Mean over these tokens, over layers and heads; the shares of spans that cover the context once add up to 1. Takes
    one forward pass over all `tokens`, whatever is cached of them. Raises ValueError for spans outside the context.
    """
    for start, end in spans:
        if not 0 <= start <= end <= len(tokens):
            raise ValueError(f"span [{start}, {end}) does not lie in the {len(tokens)} tokens of the context")
    layers: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        recent, heads = query[-RECENT:].float(), query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", recent, key.float().repeat_interleave(heads, dim=1)) * scale
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(len(tokens) - len(recent) + 1)
        layers.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((0, 1)))
        return causal_attention(layer, query, key, value, scale)

    forward(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), attend)
    share = torch.stack(layers).mean(0).double()
    return [share[start:end].sum().item() for start, end in spans]
