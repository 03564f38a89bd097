"""What passes between the controller and its ranks: pickles, which these processes alone make and read.

A tensor passes as its bytes, in a tenth of the time that its own pickle takes.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """What every rank shall do: a method of its trainer, of the trainer's weights or of its last snapshot."""

    owner: str  # "trainer", "weights" or "snapshot"
    name: str
    arguments: Sequence[Any]


class Said(NamedTuple):
    """What rank 0 says of a call, and what has become of its trainer meanwhile."""

    kind: str  # "part" of what a generator gives, "result", or "error" that all ranks have alike
    value: Any
    notes: Sequence[str]
    changes: tuple[int, int]  # of what a snapshot holds, and of the weights


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        return _tensor, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, plain.shape)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)


def packed(message: Call | Said) -> memoryview:
    """As bytes, for `pickle.loads`; tensors are then on the CPU, without gradient."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(message)
    return file.getbuffer()
