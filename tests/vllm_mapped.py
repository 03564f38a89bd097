"""For a vLLM server without a GPU: its transfer by CUDA IPC, with a mapped file in the place of the GPU's memory.

All else is vLLM's own: the interface, the checks of what it is sent, how weights are unpacked, loaded and finished.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor  # type: ignore[import-not-found]


class MappedEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """Takes weights out of a file that the trainer has mapped too."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = self.parse_update_info(update_info)
        assert self.packed, "which the trainer says before"
        path, size = info.ipc_handles["cpu"]
        mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)[: sum(info.tensor_sizes)]
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        weights = unpack_tensor(mapped, info.names, info.shapes, dtypes, info.tensor_sizes)
        self.model.load_weights([(name, weight.clone()) for name, weight in weights])


class Extension:
    """What vLLM imports this module for (`--worker-extension-cls`)."""


WeightTransferEngineFactory.register_engine("mapped", MappedEngine)
