"""Turns -> rows: one row per segment, micro-batches of right-padded rows under a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.extension import ConfigError
from mtgrpo.types import Trajectory


@dataclass(frozen=True)
class Batch:
    """The sampled tokens of some trajectories, flat, in the order of trajectory, turn and position.

    All tensors are [tokens] but `rows`, a list of token rows (one per segment). Token i of the flat order is
    `rows[row[i]][position[i]]`; it was predicted from the tokens before it in its row.
    """

    rows: list[list[int]]
    row: Tensor  # int64
    position: Tensor  # int64, >= 1
    token: Tensor  # int64
    behaviour_logp: Tensor  # fp64, what the engine reported
    trajectory: Tensor  # int64, index into the trajectories the batch was made of
    turn: Tensor  # int64, index of the turn within its trajectory

    def __len__(self) -> int:
        return len(self.token)


@dataclass
class BatchSettings:
    """How much is computed at once."""

    token_budget: int = 16_384  # padded tokens per micro-batch; a longer row is a micro-batch of its own

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError(f"batch.token_budget must be >= 1, got {self.token_budget}")


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, right-padded, with the entries that are read from them."""

    ids: Tensor  # [rows, width] int64
    entries: Tensor  # [n] int64: which entries of the batch
    row: Tensor  # [n] int64: the row of each entry within `ids`
    parent: Tensor  # [n] int64: the position whose hidden state predicts the entry
    token: Tensor  # [n] int64


def build_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Lay the turns out in rows: a turn that extends the one before it continues that row."""
    rows: list[list[int]] = []
    columns: dict[str, list[int]] = {name: [] for name in ("row", "position", "token", "trajectory", "turn")}
    behaviour: list[float] = []
    for index, trajectory in enumerate(trajectories):
        for number, turn in enumerate(trajectory.turns):
            if not turn.extends:
                rows.append([])
            row = rows[-1]
            row.extend(turn.new_context)
            start = len(row)
            row.extend(turn.output)
            count = len(turn.output)
            columns["row"] += [len(rows) - 1] * count
            columns["position"] += range(start, start + count)
            columns["token"] += turn.output
            columns["trajectory"] += [index] * count
            columns["turn"] += [number] * count
            behaviour += turn.logprobs
    tensors = {name: torch.tensor(values, dtype=torch.long) for name, values in columns.items()}
    return Batch(rows=rows, behaviour_logp=torch.tensor(behaviour, dtype=torch.float64), **tensors)


def micro_batches(batch: Batch, entries: Tensor, token_budget: int) -> Iterator[MicroBatch]:
    """Cover `entries` [n] int64 with micro-batches, rows of like length together; rows without entries are left out."""
    lengths = torch.tensor([len(row) for row in batch.rows], dtype=torch.long)
    rows = torch.unique(batch.row[entries])
    needed: list[int] = rows[lengths[rows].argsort(descending=True, stable=True)].tolist()
    while needed:
        width = len(batch.rows[needed[0]])
        count = max(1, token_budget // width)
        chosen, needed = needed[:count], needed[count:]
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        local = torch.full((len(batch.rows),), -1, dtype=torch.long)
        for place, row in enumerate(chosen):
            ids[place, : len(batch.rows[row])] = torch.tensor(batch.rows[row])
            local[row] = place
        mine = entries[local[batch.row[entries]] >= 0]
        yield MicroBatch(
            ids=ids,
            entries=mine,
            row=local[batch.row[mine]],
            parent=batch.position[mine] - 1,
            token=batch.token[mine],
        )
