"""Attention of new tokens over pages, as a plan says; partial results are merged by log-sum-exp, which is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from mtgrpo.engines.pages import Pages
from mtgrpo.engines.plan import Batch, Plan

FEW = 2  # queries of a page for which plain products are faster than the flash kernel on a CPU

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(pages: Pages, plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Store the new keys and values [tokens, key heads, size]; attention of query [tokens, heads, size], alike."""
    for pool, tokens, where in plan.writes:
        for buffer, new in ((pool.keys[layer], key), (pool.values[layer], value)):
            buffer.view(-1, pool.size).index_copy_(0, where, new[tokens].to(buffer.dtype).reshape(-1, pool.size))
    query = query.to(pages.own.keys[layer].dtype)
    merged = _merged(plan, layer, query, scale) if plan.parts else query[:0]
    if not plan.batches:
        return merged
    wide = [_wide(pages, batch, layer, query, scale) for batch in plan.batches]
    return torch.cat([merged, *wide, query[plan.real :]])


def _merged(plan: Plan, layer: int, query: Tensor, scale: float) -> Tensor:
    """What rows of one token gather from all their parts."""
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for part in plan.parts:
        key, value = (t[part.pages, :, : part.length] for t in (part.pool.keys[layer], part.pool.values[layer]))
        count = len(key)
        folded = _fold(query.index_select(0, part.query).unflatten(0, (count, -1)), part.pool.heads)
        output, log_sum = _attention(folded, key, value, part.mask, scale)
        queries = len(part.query) // count
        outputs.append(_unfold(output, queries).flatten(0, 1))
        sums.append(_unfold(log_sum[..., None], queries).flatten(0, 1))
    table = plan.table.flatten()
    shape = plan.table.shape
    output = torch.cat(outputs).index_select(0, table).unflatten(0, shape)
    log_sum = torch.cat(sums).index_select(0, table).unflatten(0, shape)
    if plan.absent is not None:
        log_sum.masked_fill_(plan.absent[:, :, None, None], -torch.inf)
    return output.mul_(log_sum.softmax(1)).sum(1)


def _wide(pages: Pages, batch: Batch, layer: int, query: Tensor, scale: float) -> Tensor:
    """What the rows of one batch see, in flat order."""
    width = batch.query.shape[1]

    def gather(prefixes: Tensor, own: Tensor) -> Tensor:
        parts = (prefixes[batch.prefix_pages], own[batch.own_pages])
        return torch.cat([part.transpose(1, 2).flatten(2, 3) for part in parts], dim=2)

    key = gather(pages.prefixes.keys[layer], pages.own.keys[layer])
    value = gather(pages.prefixes.values[layer], pages.own.values[layer])
    folded = _fold(query[batch.query], pages.own.heads)
    output, _ = _attention(folded, key, value, batch.mask.repeat(1, 1, folded.shape[2] // width, 1), scale)
    return _unfold(output, width).flatten(0, 1)[batch.real]


def _fold(query: Tensor, groups: int) -> Tensor:
    """[n, queries, heads, size] -> [n, key heads, (heads of each) * queries, size]."""
    n, queries, heads, size = query.shape
    return query.view(n, queries, groups, heads // groups, size).permute(0, 2, 3, 1, 4).reshape(n, groups, -1, size)


def _unfold(output: Tensor, queries: int) -> Tensor:
    """[n, key heads, (heads of each) * queries, size] -> [n, queries, heads, size]."""
    n, _, _, size = output.shape
    return output.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4).reshape(n, queries, -1, size)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All of one shape [n, heads, ..., size]: the output, and the log-sum-exp of the scores [n, heads, queries]."""
    if query.device.type == "cpu" and query.shape[2] > FEW:
        return _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale).add_(mask)
    share = scores.softmax(-1)
    log_sum = scores.amax(-1) - share.amax(-1).log()
    return share.to(value.dtype) @ value, log_sum
