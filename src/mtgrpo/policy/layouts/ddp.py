"""Every rank has the whole model; gradients are summed before the step.

torch's DistributedDataParallel is not used: it reduces a weight at its first gradient, and one of a tree that is walked
gets several.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mtgrpo.policy.layouts import SeveralRanks
from mtgrpo.policy.optimizer import Optimizer

BUCKET_BYTES = 64 * 2**20  # of gradients that are sent at once


class DataParallel(SeveralRanks):
    """See above."""

    def finish(self, optimizer: Optimizer) -> None:
        weights = list(optimizer.stepped)
        reached = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
        dist.all_reduce(reached)  # a weight that no rank has reached stays without a gradient, as in one process
        for bucket in _buckets([weight for weight, count in zip(weights, reached.tolist(), strict=True) if count]):
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for weight, part in zip(bucket, flat.split([weight.numel() for weight in bucket]), strict=True):
                weight.grad = part.view_as(weight).clone()


def _buckets(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, up to `BUCKET_BYTES` together."""
    bucket: list[nn.Parameter] = []
    held = 0

    def kind(weight: Tensor) -> tuple[torch.dtype, torch.device]:
        return weight.dtype, weight.device

    for weight in weights:
        if bucket and (held + weight.nbytes > BUCKET_BYTES or kind(weight) != kind(bucket[0])):
            yield bucket
            bucket, held = [], 0
        bucket.append(weight)
        held += weight.nbytes
    if bucket:
        yield bucket
