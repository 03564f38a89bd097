"""Streams over tasks that resume where they were, in an order that is computed, not stored."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mtgrpo.errors import ConfigError
from mtgrpo.parts.extension import misgiven
from mtgrpo.types import Task


class TaskStream(Protocol):
    """Iterates over tasks. `epoch` counts completed passes over the data (0 during the first, always if `endless`)."""

    notes: list[str]  # for the user, not shown yet
    epoch: int
    endless: bool  # a generated source: it never repeats

    def __iter__(self) -> Iterator[Task]: ...
    def __next__(self) -> Task: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class IndexedStream:
    """A stream over tasks that can be reached by number, in a new order every epoch.

    `task_at(index)` makes task `index` of `length`. `length` None is an endless generated source: the order is
    0, 1, 2, ... and `epoch` stays 0. `blocks` are the sizes of runs of rows that are stored together (their sum is
    `length`): the shuffle then orders the runs and the rows inside each, so that every run is read once per epoch.
    The order is computed, not stored: memory and the cost of resuming do not grow with the data. With `skips` a task
    that `task_at` refuses with ConfigError is passed over, which the first time is noted in `notes`.
    """

    def __init__(
        self,
        length: int | None,
        task_at: Callable[[int], Task],
        seed: int,
        repeat: bool = True,
        blocks: Sequence[int] = (),
        skips: bool = False,
    ) -> None:
        self.notes: list[str] = []  # for the user, not shown yet
        self.skipped = 0  # tasks passed over so far
        self._skips = skips
        self.epoch = 0
        self.endless = length is None
        self._position = 0  # rows delivered in this epoch
        self._length = length
        self._task_at = task_at
        self._seed = seed
        self._repeat = repeat
        self._blocks = blocks or (() if length is None else (length,))
        self._starts = [0, *itertools.accumulate(self._blocks)]
        self._plan: tuple[int, list[int], list[int]] = (-1, [], [])  # epoch, its order of blocks, where each ends

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        in_a_row = 0
        while self._repeat or not self.epoch:
            task: Any = None
            try:
                task = self._task_at(self._index())
                if not isinstance(task, Task):
                    raise misgiven(self._task_at, task, "give a Task")
            except ConfigError as error:
                in_a_row += 1
                if not self._skips or in_a_row == self._length:
                    raise
                if not self.skipped:
                    self.notes.append(f"what cannot be used is skipped, the first time here: {error}")
                self.skipped += 1
            self._position += 1
            if self._position == self._length:
                self.epoch += 1
                self._position = 0
            if task is not None:
                return task
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream; JSON-serialisable."""
        return {"epoch": self.epoch, "position": self._position, "rows": self._length, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which a stream opened with the same arguments gave.

        Raises ConfigError when the number of rows is not what it was: the order would be another one.
        """
        if state["rows"] != self._length:
            raise ConfigError(
                f"the data had {state['rows']} rows when the state was saved and has {self._length} now; "
                "continue with the data of that run, or start a new run"
            )
        self.epoch, self._position, self.skipped = state["epoch"], state["position"], state["skipped"]

    def _index(self) -> int:
        if self._length is None or not self._repeat:
            return self._position
        if self._plan[0] != self.epoch:
            count = len(self._blocks)
            order = [permuted(number, count, self._key("blocks")) for number in range(count)]
            self._plan = (self.epoch, order, list(itertools.accumulate(self._blocks[block] for block in order)))
        _, order, ends = self._plan
        nth = bisect_right(ends, self._position)
        block = order[nth]
        size = self._blocks[block]
        return self._starts[block] + permuted(self._position - (ends[nth] - size), size, self._key(block))

    def _key(self, part: int | str) -> int:
        return hashed(f"{self._seed}/{self.epoch}/{part}")


def permuted(index: int, length: int, key: int) -> int:
    """The image of `index` under the permutation of range(length) that `key` draws, in constant time and memory.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). Good for shuffling, not for secrecy.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(12):
            left, right = right, left ^ (_mix(right + key + (round_number << 32)) & mask)
        index = left << half_bits | right
        if index < length:
            return index


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): 64 well-mixed bits."""
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def hashed(text: str) -> int:
    """64 bits that depend on `text` alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
