"""Decoupled clip and dynamic sampling policy optimisation."""

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
        most = self.overlong_tokens
        if not 0 <= self.overlong_buffer <= most:
            raise ConfigError(f"`overlong_buffer` must be 0 to `overlong_tokens={most}`, got {self.overlong_buffer}")

    def check(self, experiment: Any) -> None:
        super().check(experiment)
        tokens, limit = self.overlong_tokens, experiment.rollout.max_trajectory_tokens
        if tokens > limit:
            raise ConfigError(
                f"algorithm.overlong_tokens={tokens} is above rollout.max_trajectory_tokens={limit}, which cuts a "
                "trajectory before its penalty is whole: lower the one or raise the other"
            )

    def shaped_reward(self, trajectory: Trajectory) -> float:
        return super().shaped_reward(trajectory) - self._penalty(trajectory.sampled_tokens)

    def _penalty(self, tokens: int) -> float:
        if not self.overlong_tokens:
            return 0.0
        if tokens >= self.overlong_tokens:
            return 1.0
        over = tokens - (self.overlong_tokens - self.overlong_buffer)
        return max(0.0, over / max(1, self.overlong_buffer))
