"""Attention of new tokens over KV blocks, as a plan says; partial results are merged by log-sum-exp, which is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from mtgrpo.engines.local.batch_plan import BatchPlan
from mtgrpo.engines.local.kv_cache import KVCache

FEW = 2  # queries of a block for which plain products are faster than the flash kernel on a CPU

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    kv_cache: KVCache, plan: BatchPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Write the new keys and values [tokens, key heads, size] into their blocks; returns the attention of the query.

    Query and result are [tokens, heads, size].
    """
    for pool, tokens, where in plan.writes:
        for buffer, new in ((pool.keys[layer], key), (pool.values[layer], value)):
            buffer.view(-1, pool.size).index_copy_(0, where, new[tokens].to(buffer.dtype).reshape(-1, pool.size))
    query = query.to(kv_cache.own.keys[layer].dtype)
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for part in plan.parts:
        keys, values = part.read(part.pool.keys[layer]), part.read(part.pool.values[layer])
        queries = len(part.query) // len(keys)
        folded = _fold(query.index_select(0, part.query).unflatten(0, (-1, queries)), part.pool.heads)
        output, log_sum = _attention(folded, keys, values, part.mask, scale)
        outputs.append(_unfold(output, queries).flatten(0, 1))
        sums.append(_unfold(log_sum[..., None], queries).flatten(0, 1))
    table, shape = plan.table.flatten(), plan.table.shape
    output = torch.cat(outputs).index_select(0, table).unflatten(0, shape)
    if shape[1] == 1:
        return output[:, 0]
    log_sum = torch.cat(sums).index_select(0, table).unflatten(0, shape)
    if plan.absent is not None:
        log_sum.masked_fill_(plan.absent[:, :, None, None], -torch.inf)
    return output.mul_(log_sum.softmax(1)).sum(1)


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
    if 1 < mask.shape[2] < query.shape[2]:
        mask = mask.repeat(1, 1, query.shape[2] // mask.shape[2], 1)  # several heads share a key head
    if query.device.type == "cpu" and query.shape[2] > FEW:
        return _flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale).add_(mask)
    share = scores.softmax(-1)
    log_sum = scores.amax(-1) - share.amax(-1).log()
    return share.to(value.dtype) @ value, log_sum
