"""Weights, gradients and moments are divided, by torch."""

from dataclasses import dataclass

from mtgrpo.parallel import Parallel


@dataclass
class FSDP2(Parallel):
    """Weights, gradients and moments are divided among the ranks, by torch (`fully_shard`, arXiv:2304.11277)."""

    divides = True

    # true: a layer's weights are put together for each pass and divided again, the least memory; false: weights and
    # gradients are whole during an optimiser step, less to send; null: false where memory has room for that
    reshard: bool | None = None
