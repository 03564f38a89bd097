"""A reward for benchmarks of speed: conversations differ, so every one of them is trained."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory


@dataclass
class Spread(Reward):
    """A number in [0, 1) that depends on the text of the last message and on the sample's index in its group."""

    def reward(self, trajectory: Trajectory) -> float:
        """Of one conversation."""
        return zlib.crc32(f"{trajectory.sample_index} {trajectory.final}".encode()) % 1000 / 1000
