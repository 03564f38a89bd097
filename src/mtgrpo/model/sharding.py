"""Tensors of which each rank has a part: the part, the whole, and the part of another whole."""

from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`: all of it, unless it is sharded. Shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, on every rank, without history; of a sharded one a copy, for which all ranks ask together."""
    if isinstance(tensor, DTensor):
        return cast(DTensor, tensor.detach()).full_tensor()
    if hasattr(tensor, "ds_id"):  # a parameter that DeepSpeed has partitioned
        with import_module("deepspeed.runtime.zero").GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank has a part of it only."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")


def elements(tensor: Tensor) -> int:
    """How many numbers the whole has."""
    return shape_of(tensor).numel()


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole."""
    return cast(Any, tensor).ds_shape if hasattr(tensor, "ds_id") else tensor.shape


def part_like(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor`, which all ranks have whole, sharded as `other` is where both have the same shape."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    device = other.to_local().device
    return distribute_tensor(tensor.to(device), other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def exchange(first: Tensor, second: Tensor) -> None:
    """Let two tensors of one layout change their values."""
    one, other = local_part(first), local_part(second)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
