"""Keys and values of all conversations: one slot each in preallocated buffers, written in place."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """Handed to a transformers model as `past_key_values`. Before each forward, `at` says which tokens it is about.

    keys[layer], values[layer]: [slots, heads, capacity, head_dim]. Both dimensions grow by doubling. Positions beyond a
    conversation's length hold garbage, which no mask admits and which the next tokens overwrite.
    """

    is_compileable = False

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots: Tensor | None = None
        self._positions = torch.empty(0)
        self._visible = 0

    def at(self, positions: Tensor, slots: Tensor | None) -> Tensor:
        """Set where the next forward writes: positions [rows, width], slots [rows] (None = 0..rows-1).

        Returns the attention mask [rows, 1, width, visible], true where a token may look.
        """
        self._positions = positions
        self._slots = None if slots is None else slots.to(positions.device)
        self._visible = int(positions.max()) + 1
        reach = torch.arange(self._visible, device=positions.device)
        return (reach <= positions[:, :, None])[:, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write this layer's new keys and values [rows, heads, width, head_dim]; return all that the rows may see."""
        if layer_idx == len(self._keys):
            self._keys.append(keys.new_zeros(0))
            self._values.append(values.new_zeros(0))
        rows = keys.shape[0]
        needed = (rows if self._slots is None else int(self._slots.max()) + 1), self._visible
        where = torch.arange(rows, device=keys.device) if self._slots is None else self._slots
        seen: list[Tensor] = []
        for buffers, new in ((self._keys, keys), (self._values, values)):
            buffer = buffers[layer_idx] = _grown(buffers[layer_idx], new, *needed)
            buffer[where[:, None], :, self._positions] = new.transpose(1, 2)
            all_rows = buffer[:rows] if self._slots is None else buffer[where]
            seen.append(all_rows[:, :, : self._visible])
        return seen[0], seen[1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                buffer = buffers[layer] = _grown(buffer, buffer, target + 1, length)
                buffer[target, :, :length] = buffer[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions visible to the coming forward (transformers asks)."""
        return self._visible


def _grown(buffer: Tensor, like: Tensor, slots: int, capacity: int) -> Tensor:
    """`buffer`, or a larger copy of it when it holds fewer than `slots` slots or `capacity` positions."""
    if buffer.dim() == 4 and buffer.shape[0] >= slots and buffer.shape[2] >= capacity:
        return buffer
    old_slots, old_capacity = (buffer.shape[0], buffer.shape[2]) if buffer.dim() == 4 else (0, 0)
    slots = slots if slots <= old_slots else max(slots, 2 * old_slots)
    capacity = capacity if capacity <= old_capacity else max(capacity, 2 * old_capacity, 64)
    grown = like.new_zeros(max(slots, old_slots), like.shape[1], max(capacity, old_capacity), like.shape[3])
    if buffer.dim() == 4:
        grown[:old_slots, :, :old_capacity] = buffer
    return grown
