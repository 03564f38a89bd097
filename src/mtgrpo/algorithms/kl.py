"""How far the policy has moved from a reference, per sampled token, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from mtgrpo.extension import ConfigError


class Estimator(Enum):
    """Estimators of KL(policy, reference) from samples (Schulman 2020, "Approximating KL Divergence")."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


@dataclass
class KL:
    """A penalty in the loss: coef * estimate. coef 0 = no reference model is kept."""

    coef: float = 0.0  # weight of the penalty in the loss
    estimator: Estimator = Estimator.k3

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ConfigError(f"kl.coef must be >= 0 (0 = no penalty and no reference), got {self.coef}")

    def per_token(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """The estimate for each sampled token [tokens]; d = logp - ref_logp.

        k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. k3 is never negative and unbiased in value. As a term of the loss
        and on-policy, k2 has the exact gradient of the reverse KL, k3 agrees with it to first order in d, and k1 has
        none in expectation (arXiv:2510.01555).
        """
        d = logp - ref_logp
        if self.estimator is Estimator.k1:
            return d
        if self.estimator is Estimator.k2:
            return d.square() / 2
        return (-d).exp() - 1 + d
