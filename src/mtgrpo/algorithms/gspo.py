"""Group sequence policy optimisation: the ratio is that of the whole trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import PerToken, Tensor, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import ClippedSurrogate, GroupRelative, ratio_of


@dataclass
class GSPO(ClippedSurrogate, GroupRelative):
    """GSPO-token (arXiv:2507.18071).

    s = exp(mean over the trajectory of log rho_t)            the length is that of all its turns together
    s_t = sg(s) rho_t / sg(rho_t)                             the value of s, with the gradient of the token
    L_t = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)

    When: several updates per batch, or a mixture of experts, whose single tokens have noisy ratios.
    """

    average: Average = Average.trajectory_mean
    clip_low: float = 3e-4  # the trajectory's ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 4e-4

    def sequence_term(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """The log-ratio, whose mean is log s."""
        return log_ratio

    def loss(self, tokens: Tokens) -> PerToken:
        """The clipped surrogate with the trajectory's ratio."""
        assert tokens.sequence is not None, "it has a sequence_term"
        return self.surrogate(ratio_of(tokens.sequence + (tokens.logp - tokens.logp.detach())), tokens.advantage)
