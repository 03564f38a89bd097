"""Divergence proximal policy optimisation: a token is masked where its probability has moved too far."""

from dataclasses import dataclass
from typing import ClassVar

from mtgrpo.algorithms import PerToken, Tokens
from mtgrpo.algorithms.grpo import GroupRelative, ratio_of
from mtgrpo.errors import require


@dataclass
class DPPO(GroupRelative):
    """DPPO with binary total variation (arXiv:2602.04879).

    d_t = pi(token) - mu(token)                        mu is the behaviour policy, as the engine reported it
    keep_t = not (A > 0 and d_t > clip_high or A <= 0 and d_t < -clip_low)
    L_t = -keep_t A rho_t + kl_coef (log rho_t)^2,     rho_t = pi(token) / mu(token)

    The last term is that of Kimi K2.5 (arXiv:2602.02276).
    When: rollouts run ahead of the trainer, or the engine's log-probabilities differ from the trainer's.
    """

    uses_behaviour_policy: ClassVar[bool] = True

    divide_by_std: bool = False
    clip_low: float = 0.2  # how far a probability may fall where the advantage is not positive
    clip_high: float = 0.2  # how far it may rise where it is
    kl_coef: float = 1e-3  # weight of the squared log-ratio

    def __post_init__(self) -> None:
        super().__post_init__()
        difference = "> 0 and <= 1 (a difference of probabilities)"
        require(self, clip_low=difference, clip_high=difference, kl_coef=">= 0")

    @property
    def always_has_gradient(self) -> bool:
        return super().always_has_gradient or self.kl_coef > 0

    def loss(self, tokens: Tokens) -> PerToken:
        moved = tokens.logp.detach().exp() - tokens.old_logp.exp()
        positive = tokens.advantage > 0
        masked = (positive & (moved > self.clip_high)) | (~positive & (moved < -self.clip_low))
        gain = ratio_of(tokens.log_ratio) * tokens.advantage * ~masked
        return PerToken(self.kl_coef * tokens.log_ratio.square() - gain, masked)
