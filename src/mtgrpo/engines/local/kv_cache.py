"""The KV cache of all conversations: blocks of equal size, and a block table for each conversation.

A conversation takes small blocks. What several conversations begin with, a prefix, is cached once for all of them, in
large blocks of a pool of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.errors import ConfigError
from mtgrpo.model.load import computes_in
from mtgrpo.model.out_of_memory import explained
from mtgrpo.model.traits import traits
from mtgrpo.runtime.resources import memory_left

BLOCK_SIZE = 32  # tokens in a block of a conversation
PREFIX_BLOCK_SIZE = 256  # tokens in a block of a prefix
PREFIX_SHARE = 0.25  # of the memory


@dataclass(eq=False)
class BlockTable:
    """Consecutive tokens that are in the KV cache, and their blocks; before them stands a prefix if there is one."""

    tokens: list[int] = field(default_factory=list[int])
    blocks: list[int] = field(default_factory=list[int])
    prefix: SharedPrefix | None = None

    @property
    def start(self) -> int:
        """The position of the first token."""
        return len(self.prefix.wanted) if self.prefix is not None else 0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass(eq=False)
class SharedPrefix(BlockTable):
    """What several conversations begin with."""

    wanted: list[int] = field(default_factory=list[int])  # all its tokens; `tokens` are those that are there yet
    users: int = 0
    shared: bool = True  # whether more may join
    source: SharedPrefix | None = None  # begins alike: what both have in common is copied once it is there

    @property
    def missing(self) -> int:
        """How many tokens are not there yet."""
        return len(self.wanted) - len(self.tokens)


class BlockPool:
    """`count` blocks of `length` tokens. On a CPU memory is taken when a block is first used, on a GPU at once."""

    def __init__(self, model: PreTrainedModel, count: int, length: int) -> None:
        self._layers, self.heads, self.size = _shape(model)
        self.count, self.length = count, length
        self._dtype, self._device = computes_in(model), model.device
        self._free = list(range(count))  # a heap: ascending
        self.allocate()

    def allocate(self) -> None:
        """Take the memory: keys and values [count, heads, length, size] of every layer."""
        with explained("sampling"):
            self.keys, self.values = ([self._zeros() for _ in range(self._layers)] for _ in range(2))

    def _zeros(self) -> Tensor:
        """On a CPU without touching the memory, which the system gives when it is first written (numpy asks so)."""
        shape = (self.count, self.heads, self.length, self.size)
        if self._device.type != "cpu" or not self.count:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        untouched = np.zeros(math.prod(shape) * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(untouched).view(self._dtype).view(shape)

    def release(self) -> None:
        """Give the memory back; nobody may have a block."""
        assert len(self._free) == self.count, "blocks are taken"
        self.keys, self.values = [], []

    @property
    def free(self) -> int:
        return len(self._free)

    def missing(self, block_table: BlockTable, tokens: int) -> int:
        """How many more blocks `tokens` more tokens take."""
        return -(-(len(block_table.tokens) + tokens) // self.length) - len(block_table.blocks)

    def reserve(self, block_table: BlockTable, tokens: int) -> None:
        """Make room for `tokens` more tokens, for which there must be enough free blocks. The first blocks go first."""
        block_table.blocks.extend(heappop(self._free) for _ in range(self.missing(block_table, tokens)))

    def copy(self, source: BlockTable, target: BlockTable, count: int) -> None:
        """Give `target`, of which nothing is there yet but the room, the first `count` tokens of `source`."""
        for buffer in (*self.keys, *self.values):
            for start, block, copy in zip(range(0, count, self.length), source.blocks, target.blocks, strict=False):
                filled = min(count - start, self.length)
                buffer[copy, :, :filled] = buffer[block, :, :filled]
        target.tokens.extend(source.tokens[:count])

    def cut(self, block_table: BlockTable, count: int) -> None:
        """Keep the first `count` tokens of `block_table` (its prefix not counted) and take back the other blocks."""
        del block_table.tokens[count:]
        keep = -(-count // self.length)
        for block in block_table.blocks[keep:]:
            heappush(self._free, block)
        del block_table.blocks[keep:]


class KVCache:
    """The pool of the conversations and that of the prefixes."""

    def __init__(self, model: PreTrainedModel, tokens: int, longest: int) -> None:
        """Room for `tokens` tokens, of which one conversation may have `longest`; prefixes get what that leaves."""
        prefix_blocks = int(min(tokens * PREFIX_SHARE, tokens - whole_blocks(longest))) // PREFIX_BLOCK_SIZE
        self.prefixes = BlockPool(model, prefix_blocks, PREFIX_BLOCK_SIZE)
        self.own = BlockPool(model, (tokens - prefix_blocks * PREFIX_BLOCK_SIZE) // BLOCK_SIZE, BLOCK_SIZE)

    @property
    def tokens(self) -> int:
        return sum(pool.count * pool.length for pool in (self.own, self.prefixes))

    def allocate(self) -> None:
        self.prefixes.allocate()
        self.own.allocate()

    def release(self) -> None:
        self.prefixes.release()
        self.own.release()

    def pool(self, block_table: BlockTable) -> BlockPool:
        return self.prefixes if isinstance(block_table, SharedPrefix) else self.own


def whole_blocks(tokens: int) -> int:
    """`tokens`, rounded up to whole blocks of a conversation."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def memory_bytes(device: torch.device) -> int:
    """Of the device, in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_left()[1]


def check_room(fraction: float, memory: int, one: int, longest: int) -> None:
    """Raise ConfigError unless `fraction` of `memory` bytes holds `longest` tokens of `one` byte count each."""
    tokens, needed = int(fraction * memory / one) // BLOCK_SIZE * BLOCK_SIZE, whole_blocks(longest)
    if tokens < needed:
        share = math.ceil(1e4 * needed * one / memory) / 1e4
        more = f"engine.memory_fraction to at least {share}, or " if share < 1 else ""
        raise ConfigError(
            f"engine.memory_fraction={fraction} of {memory / 2**30:.1f} GiB holds the KV cache of a conversation of "
            f"{tokens} tokens, but one may grow to {longest}; set {more}environment.max_context_length to at most "
            f"{tokens}"
        )


def token_bytes(model: PreTrainedModel) -> int:
    """The size of one token in the KV cache: its keys and values in all layers."""
    layers, heads, size = _shape(model)
    return 2 * layers * heads * size * computes_in(model).itemsize


def _shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Attention calls, heads and size of the keys, which are those of the values."""
    caches = traits(model).caches
    heads, size = caches[0]
    return len(caches), heads, size
