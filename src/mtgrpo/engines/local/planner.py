"""Which kernels compute what lies between the matrix products of a model on this machine."""

from collections.abc import Sequence
from ctypes import CDLL
from typing import Protocol

import torch
from transformers import PreTrainedModel

from mtgrpo.engines.local.decode_kernels import CompiledPlanner, NoKernelsError, load_kernels
from mtgrpo.engines.local.kv_cache import KVCache
from mtgrpo.engines.local.paged_attention import BatchPlan, BatchPlanner, KernelPlan, Row
from mtgrpo.model.load import computes_in


class Planner(Protocol):
    """Makes plans of forward passes."""

    @property
    def library(self) -> CDLL | None:
        """Compiled kernels that also sample."""
        ...

    def plan(self, rows: Sequence[Row]) -> BatchPlan | KernelPlan:
        """Lay out one forward pass; from here on the new tokens count as cached."""
        ...


def choose_planner(model: PreTrainedModel, kv_cache: KVCache, compiled: bool) -> tuple[Planner, str]:
    """By compiled kernels where they compute such a model here; and what is said of it."""
    dtype, device, note = computes_in(model), model.device, ""
    try:
        if compiled and device.type == "cpu" and dtype is torch.float32:
            return CompiledPlanner(load_kernels(kv_cache.own.size), kv_cache), " by compiled kernels"
        if compiled and device.type == "cuda" and dtype is not torch.float64:
            return _triton_planner(kv_cache, device, dtype), " by Triton's kernels"
    except NoKernelsError as error:
        note = f", more slowly without compiled kernels ({error})"
    return BatchPlanner(kv_cache, device, dtype), note


def _triton_planner(kv_cache: KVCache, device: torch.device, dtype: torch.dtype) -> Planner:
    try:
        from mtgrpo.engines.local.triton_kernels import TritonPlanner  # noqa: PLC0415  a GPU's torch brings Triton
    except ImportError as error:
        raise NoKernelsError(f"Triton cannot be used: {error}") from error
    return TritonPlanner(kv_cache, device, dtype)
