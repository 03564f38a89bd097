"""Attention of new tokens over KV blocks, as a plan says; partial results are merged by log-sum-exp, which is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from mtgrpo.engines.local.batch_plan import BatchPlan
from mtgrpo.engines.local.kv_cache import KVCache

FEW = 2  # queries of a block for which plain products are faster than the flash kernel on a CPU
SCORES = 2**25  # that plain products hold at once; of longer prefill some queries come after others

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
        outputs.append(_unfold(output))
        sums.append(_unfold(log_sum[..., None]))
    table, shape = plan.table.flatten(), plan.table.shape
    output = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, table).unflatten(0, shape)
    if shape[1] == 1:
        return output[:, 0]
    log_sum = (torch.cat(sums) if len(sums) > 1 else sums[0]).index_select(0, table).unflatten(0, shape)
    if plan.absent is not None:
        log_sum.masked_fill_(plan.absent[:, :, None, None], -torch.inf)
    return output.mul_(log_sum.softmax(1)).sum(1)


def _fold(query: Tensor, groups: int) -> Tensor:
    """[n, queries, heads, size] -> [n, key heads, heads of each, queries, size]."""
    return query.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _unfold(output: Tensor) -> Tensor:
    """[n, key heads, heads of each, queries, size] -> [n * queries, heads, size]."""
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output, shaped as the query (see `_fold`), and the log-sum-exp of the scores, without its last dimension.

    key, value [n, key heads, places, size]; mask [n, 1, 1 or queries, places].
    """
    shape = heads, queries = query.shape[2:4]
    if query.device.type == "cpu" and heads * queries > FEW:
        mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads, 1)
        output, log_sum = _flash(query.flatten(2, 3), key, value, 0.0, False, attn_mask=mask, scale=scale)
        return output.unflatten(2, shape), log_sum.unflatten(2, shape)
    most = max(1, SCORES // (query[..., 0, 0].numel() * key.shape[2]))
    if queries > most:
        chunks = zip(query.split(most, 3), mask.expand(-1, -1, queries, -1).split(most, 2), strict=True)
        outputs, sums = zip(*(_attention(some, key, value, seen, scale) for some, seen in chunks), strict=True)
        return torch.cat(outputs, 3), torch.cat(sums, 3)
    scores = (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, shape)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale).add_(mask[:, :, None])
    share = scores.softmax(-1)
    log_sum = scores.amax(-1) - share.amax(-1).log()
    return (share.to(value.dtype).flatten(2, 3) @ value).unflatten(2, shape), log_sum
