"""Decoupled clip and dynamic sampling policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtgrpo.algorithms.grpo import ClippedSurrogate, GroupRelative
from mtgrpo.errors import ConfigError
from mtgrpo.types import Trajectory


@dataclass
class DAPO(ClippedSurrogate, GroupRelative):
    """DAPO (arXiv:2503.14476): GRPO with a higher upper clip, averaged over tokens, and a penalty on length.

    A_i and L_t as in GRPO with clip_high 0.28. Where overlong_tokens is set, a trajectory of n sampled tokens loses
    0 up to overlong_tokens - overlong_buffer, then linearly more, 1 from overlong_tokens on.
    Its dynamic sampling is filter.zero_variance=true with filter.refill=true.
    When: entropy collapses under GRPO, or long trajectories reach the limit.
    """

    clip_high: float = 0.28
    overlong_tokens: int = 0  # sampled tokens from which the full penalty of 1 applies; 0 = no penalty
    overlong_buffer: int = 0  # tokens before that over which the penalty grows from 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.overlong_buffer <= self.overlong_tokens:
            raise ConfigError(
                "`overlong_buffer` must be between 0 and `overlong_tokens`, "
                f"got {self.overlong_buffer} and {self.overlong_tokens}"
            )

    def check(self, experiment: Any) -> None:
        """See `Algorithm.check`; a penalty that is never reached is refused too."""
        super().check(experiment)
        longest = experiment.rollout.max_trajectory_tokens
        if self.overlong_tokens > longest:
            raise ConfigError(
                f"algorithm.overlong_tokens={self.overlong_tokens} is never reached: "
                f"rollout.max_trajectory_tokens={longest}"
            )

    def shaped_reward(self, trajectory: Trajectory) -> float:
        """The outcome reward less the penalty for length."""
        return super().shaped_reward(trajectory) - self._penalty(trajectory.sampled_tokens)

    def _penalty(self, tokens: int) -> float:
        if not self.overlong_tokens:
            return 0.0
        if tokens >= self.overlong_tokens:
            return 1.0
        over = tokens - (self.overlong_tokens - self.overlong_buffer)
        return max(0.0, over / max(1, self.overlong_buffer))
