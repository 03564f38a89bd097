"""Clipped importance-sampling policy optimisation: the weight is clipped, never the gradient."""

from dataclasses import dataclass

from mtgrpo.algorithms import PerToken, Tokens
from mtgrpo.algorithms.grpo import GroupRelative, ratio_of


@dataclass
class CISPO(GroupRelative, clip_low="> 0 and <= 1", clip_high="> 0"):
    """CISPO (MiniMax-M1, arXiv:2506.13585): every token keeps its gradient.

    L_t = -sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A log pi(token)

    When: rollouts run ahead of the trainer, and rare tokens that a clip would leave without gradient matter.
    """

    clip_low: float = 1.0  # 1 = no lower bound, as in the paper
    clip_high: float = 4.0  # the weight of a token is at most 1 + clip_high

    def loss(self, tokens: Tokens) -> PerToken:
        """REINFORCE with clipped weights; tokens marked as `clipped` keep their gradient."""
        ratio = ratio_of(tokens.log_ratio.detach())
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return PerToken(-weight * tokens.advantage * tokens.logp, weight != ratio)
