"""An algorithm: a baseline for the rewards of a group, and a loss for each token.

    mtgrpo train algorithm=examples/algorithm.py:MedianGRPO algorithm.softness=0.2 trainer.steps=2

It never divides by the number of tokens: `algorithm.average` says how tokens are weighed, in one place for all.
"""

from dataclasses import dataclass

import torch

from mtgrpo.algorithms import Algorithm, Baseline, PerToken
from mtgrpo.errors import require


@dataclass
class MedianGRPO(Algorithm):
    """GRPO against the median of the group, with a ratio that fades out where GRPO cuts it off.

    A_i = R_i - median(R)
    L_t = -rho_t A sg(exp(-((rho_t - 1) / softness)^2 / 2))         rho_t = pi(token) / pi_old(token)

    One reward that lies far off moves a mean, and so the advantage of every sibling; a median hardly.
    """

    softness: float = 0.3  # of the ratio: at 1 +- softness a token counts .61 of what it did

    def __post_init__(self):
        super().__post_init__()
        require(self, softness="> 0")

    def baseline(self, returns, group):
        """returns [n] fp64, group [n] int64; a centre for each."""
        centre = torch.empty_like(returns)
        for number in group.unique():
            members = group == number
            centre[members] = returns[members].quantile(0.5)
        return Baseline(centre)

    def loss(self, tokens):
        ratio = tokens.log_ratio.clamp(-20, 20).exp()
        weight = (-((ratio.detach() - 1) / self.softness).square() / 2).exp()
        return PerToken(-ratio * tokens.advantage * weight, weight < 0.1, {"policy/kept": weight})
