"""The KL penalty against a reference policy, per sampled token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtgrpo.algorithms import Tensor
from mtgrpo.algorithms.grpo import MAX_LOG_RATIO, is_clamped, ratio_of
from mtgrpo.errors import ConfigError, refuse_without_effect, require

MAX_RELATIVE_ERROR = 0.2  # of the measured KL that one step reacts to (arXiv:1909.08593)


class Estimator(Enum):
    """Estimators of KL(policy, reference) from samples (Schulman 2020, "Approximating KL Divergence")."""

    k1 = "k1"  # d = log(pi / reference)
    k2 = "k2"  # d^2 / 2
    k3 = "k3"  # exp(-d) - 1 + d


class Place(Enum):
    """Where the penalty is applied."""

    loss = "loss"  # a term of the loss, with a gradient of its own
    reward = "reward"  # subtracted from the rewards, token by token, before advantages are computed


@dataclass
class KL:
    """A penalty for moving away from a reference policy: coef * estimate. coef 0 = no reference is kept.

    On-policy, k1 in the reward and k2 in the loss have the gradient of the reverse KL; k3 in the loss has it to first
    order, k1 in the loss has none in expectation (arXiv:2510.01555). `unbiased` multiplies the estimate in the loss by
    the ratio to the behaviour policy, with its gradient: k1 and k3 are then right off-policy too (arXiv:2512.02556).
    """

    coef: float = 0.0  # weight of the penalty
    estimator: Estimator = Estimator.k3  # of the KL, token by token
    place: Place = Place.loss  # where the penalty is applied
    unbiased: bool = False  # in the loss: times the ratio to the behaviour policy
    target: float = 0.0  # nats per token at which the KL is held by adapting `coef`, once it is met; 0 = off
    adaptation: float = 0.5  # how quickly: per step `coef` changes by at most a fifth of this share

    def __post_init__(self) -> None:
        require(self, coef=">= 0 (0 = no penalty and no reference)", target=">= 0", adaptation="> 0 and <= 1")
        if self.unbiased and self.estimator is Estimator.k2:
            raise ConfigError("`unbiased=true` corrects k1 and k3, whose mean is the KL: set `estimator=k3`")
        if not self.target:
            refuse_without_effect(self, ("adaptation",), "set `target`")
        if self.target and not self.coef:
            raise ConfigError(f"`target={self.target}` adapts `coef`, which is 0: set `coef` to where it starts")
        if self.unbiased and self.place is Place.reward:
            raise ConfigError("`unbiased=true` corrects the loss, and with `place=reward` there is no term in it")
        if self.coef and self.place is Place.reward and self.estimator is not Estimator.k1:
            raise ConfigError(
                f"`place=reward` with `estimator={self.estimator.value}` is biased (arXiv:2512.21852): "
                "set `estimator=k1`, whose expectation and gradient are those of the KL"
            )
        if self.coef and self.place is Place.loss and self.estimator is Estimator.k1 and not self.unbiased:
            raise ConfigError(
                "`estimator=k1` in the loss has no gradient in expectation: set `place=reward`, `unbiased=true`, "
                "or `estimator=k2`"
            )

    def penalty(self, logp: Tensor, behaviour_logp: Tensor, ref_logp: Tensor) -> Tensor:
        """The penalty of each token in the loss [tokens], before `coef`; behaviour_logp: of the behaviour policy."""
        kl = estimate(self.estimator, logp, ref_logp)
        return ratio_of(logp - behaviour_logp) * kl if self.unbiased else kl

    def clamped(self, logp: Tensor, behaviour_logp: Tensor, ref_logp: Tensor) -> Tensor:
        """Where a log-ratio of the penalty is clamped; [tokens] bool."""
        clamped = is_clamped((ref_logp - logp).clamp(min=0)) & (self.estimator is Estimator.k3)
        return clamped | is_clamped(logp - behaviour_logp) if self.unbiased else clamped

    def adapt(self, coef: float, measured: float) -> float:
        """The coefficient after a step in which the KL was `measured`, in nats per token (arXiv:1909.08593)."""
        if not self.target:
            return coef
        error = min(MAX_RELATIVE_ERROR, max(-MAX_RELATIVE_ERROR, measured / self.target - 1))
        return coef * (1 + error * self.adaptation)


def estimate(estimator: Estimator, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy, reference) at each sampled token [tokens], in nats. k1 and k3 have the KL as their mean."""
    d = logp - ref_logp
    if estimator is Estimator.k1:
        return d
    if estimator is Estimator.k2:
        return d.square() / 2
    d = d.clamp(min=-MAX_LOG_RATIO)  # where exp(-d) is clamped, d alone would pull away from the reference
    return ratio_of(-d) - 1 + d
