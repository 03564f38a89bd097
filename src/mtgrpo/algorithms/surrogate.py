"""The clipped surrogate of PPO (arXiv:1707.06347), which most algorithms here share."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import PerToken, Tensor, Tokens
from mtgrpo.algorithms.ratio import ratio_of
from mtgrpo.errors import ConfigError, require


@dataclass
class ClippedSurrogate:
    """L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -dual_clip A.

    rho_t = pi(token) / pi_old(token). The bound for A < 0 is the dual clip of arXiv:1912.09729.
    """

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # upper bound of the ratio where the advantage is negative; 0 = off

    def __post_init__(self) -> None:
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]  (an algorithm follows in the order of bases)
        require(self, clip_low="> 0 and <= 1", clip_high="> 0")
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(f"`dual_clip` must be 0 (off) or above 1 + `clip_high`, got {self.dual_clip}")

    def loss(self, tokens: Tokens) -> PerToken:
        """The surrogate, per token."""
        return self.surrogate(ratio_of(tokens.log_ratio), tokens)

    def surrogate(self, ratio: Tensor, tokens: Tokens) -> PerToken:
        """The surrogate for `ratio` [tokens], which may be that of the token or of its trajectory."""
        gain = ratio * tokens.advantage
        bound = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantage
        loss, clipped = -gain.minimum(bound), bound < gain
        if self.dual_clip:
            worst = -self.dual_clip * tokens.advantage
            too_much = (tokens.advantage < 0) & (loss > worst)
            loss, clipped = worst.where(too_much, loss), clipped | too_much
        return PerToken(loss, clipped)
