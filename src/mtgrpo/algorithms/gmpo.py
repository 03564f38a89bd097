"""Geometric-mean policy optimisation: outlying tokens weigh less in a geometric mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtgrpo.algorithms import PerToken, Tensor, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GroupRelative, ratio_of


@dataclass
class GMPO(GroupRelative, clip_low="> 0", clip_high="> 0"):
    """GMPO (arXiv:2507.20673).

    c_t = sign(A) min(sign(A) log rho_t, sign(A) clip(log rho_t, -clip_low, clip_high))
    L = -A exp(mean over the trajectory of c_t)

    When: several updates per batch, and single tokens with extreme ratios make GRPO unstable.
    """

    constant_advantage: ClassVar[bool] = True

    average: Average = Average.trajectory_mean
    clip_low: float = 0.4  # the logarithm of the ratio is clipped to [-clip_low, clip_high]
    clip_high: float = 0.4

    def sequence_term(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        sign = advantage.sign()
        return sign * (sign * log_ratio).minimum(sign * log_ratio.clamp(-self.clip_low, self.clip_high))

    def loss(self, tokens: Tokens) -> PerToken:
        assert tokens.sequence is not None, "it has a sequence_term"
        term = self.sequence_term(tokens.log_ratio, tokens.advantage)
        loss = -tokens.advantage * ratio_of(tokens.sequence + (term - term.detach()))
        clipped = (term.detach() != tokens.log_ratio.detach()) & (tokens.advantage != 0)
        return PerToken(loss, clipped)
