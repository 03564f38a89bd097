"""What to do where the policy that sampled is not the one that is trained: other kernels, or older weights.

Three policies: mu sampled (its log-probabilities come from the engine), pi_old is what the ratio of the loss compares
with, pi is trained. rho = pi_old / mu. Weights and masks carry no gradient, and never change what is divided by.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mtgrpo.algorithms.ratio import ratio_of
from mtgrpo.errors import ConfigError, refuse_without_effect

if TYPE_CHECKING:
    from torch import Tensor


class OldPolicy(Enum):
    """Which policy the ratio of the loss compares with."""

    trainer = "trainer"  # this one as it was when the batch arrived, computed again: with a weight, decoupled PPO
    engine = "engine"  # the one that sampled: ratio and clip then hold against stale data too
    interpolated = "interpolated"  # between the two by age, without a forward pass (A-3PO, arXiv:2512.06547)


class Weight(Enum):
    """By what the loss of a token is multiplied: the truncated importance weight min(rho, cap)."""

    none = "none"  # 1
    token = "token"  # of the token
    sequence = "sequence"  # of the whole trajectory: the product over its sampled tokens


class Reject(Enum):
    """Which tokens are left out, when rho is not in [low, high]."""

    none = "none"  # none
    token = "token"  # those themselves (IcePop)
    sequence = "sequence"  # a trajectory, by the product over its sampled tokens: rejects long ones
    geometric = "geometric"  # a trajectory, by the geometric mean over its sampled tokens


@dataclass
class Correction:
    """Corrections for a policy that sampled with other numbers: weights, masks, and what the ratio compares with.

    Decoupled PPO (arXiv:2110.00641, arXiv:2505.24298) is old_policy=trainer with weight=token.
    """

    # null: engine if rollout.max_staleness > 0 and nothing below is on, else trainer
    old_policy: OldPolicy | None = None
    weight: Weight = Weight.none  # by what the loss of a token is multiplied
    cap: float = 2.0  # of the weight
    reject: Reject = Reject.none  # what is left out
    low: float = 0.5  # rho below is rejected
    high: float = 2.0  # rho above is rejected
    veto: float = 0.0  # a trajectory with a token whose rho is below this, or above 1 / this, is left out; 0 = none

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ConfigError(f"`cap` must be above 0, got {self.cap}")
        if not 0 <= self.low < 1 < self.high:
            raise ConfigError(
                f"`low` and `high` must lie on either side of 1, at least 0, got {self.low} and {self.high}"
            )
        if self.weight is Weight.none:
            refuse_without_effect(self, ("cap",), "set `weight=token`")
        if self.reject is Reject.none:
            refuse_without_effect(self, ("low", "high"), "set `reject=token`")
        if not 0 <= self.veto < 1:
            raise ConfigError(f"`veto` must be in [0, 1), got {self.veto}")
        if self.old_policy is OldPolicy.engine and self.active:
            raise ConfigError(
                "`old_policy=engine` has the importance weight in its ratio already; with `weight`, "
                "`reject` or `veto` set `old_policy=trainer`"
            )

        whole = self.weight is Weight.sequence or self.reject in (Reject.sequence, Reject.geometric) or self.veto
        if self.old_policy is OldPolicy.interpolated and whole:
            raise ConfigError(
                "`old_policy=interpolated` knows one micro-batch at a time: whole trajectories cannot be "
                "weighed or left out; set `weight=token`, `reject=token`, or "
                "`old_policy=trainer`"
            )

    @property
    def active(self) -> bool:
        """Whether anything is weighted or left out."""
        return self.weight is not Weight.none or self.reject is not Reject.none or self.veto > 0

    def resolved(self, stale: bool, uses_behaviour_policy: bool) -> OldPolicy:
        """Which policy the ratio compares with, where the batch may be `stale`."""
        if uses_behaviour_policy:
            return OldPolicy.engine
        return self.old_policy or (OldPolicy.engine if stale and not self.active else OldPolicy.trainer)

    def weights(self, old_logp: Tensor, behaviour_logp: Tensor, trajectory: Tensor) -> Tensor:
        """The factor of each token's loss [tokens]: its weight, 0 where it is rejected.

        old_logp, behaviour_logp [tokens]: nats, of all sampled tokens of the trajectories, which `trajectory` numbers.
        """
        log_rho = old_logp - behaviour_logp
        _, index, counts = trajectory.unique(return_inverse=True, return_counts=True)
        total = log_rho.new_zeros(len(counts)).index_add(0, index, log_rho)
        product, mean, rho = ratio_of(total)[index], ratio_of(total / counts)[index], ratio_of(log_rho)
        weight = {
            Weight.none: rho.new_ones(len(rho)),
            Weight.token: rho.clamp(max=self.cap),
            Weight.sequence: product.clamp(max=self.cap),
        }[self.weight]
        judged = {Reject.token: rho, Reject.sequence: product, Reject.geometric: mean}.get(self.reject)
        if judged is not None:
            weight = weight * ((self.low <= judged) & (judged <= self.high))
        if self.veto:
            outlying = (rho < self.veto) | (rho > 1 / self.veto)
            weight = weight * (rho.new_zeros(len(counts)).index_add(0, index, outlying.to(rho)) == 0)[index]
        return weight


def interpolated(behaviour_logp: Tensor, logp: Tensor, sampled_at: Tensor, version: int) -> Tensor:
    """A stand-in for the log-probabilities of the policy before the newest one (A-3PO, arXiv:2512.06547), [tokens].

    behaviour_logp + a (logp - behaviour_logp), a = (version - 1 - sampled_at) / (version - sampled_at), and 0 for
    tokens that this very version sampled. sampled_at [tokens] int64: the version of each token.
    """
    age = (version - sampled_at).clamp(min=0)
    share = (age - 1).clamp(min=0) / age.clamp(min=1)
    return behaviour_logp + share * (logp - behaviour_logp)


def diagnostics(log_rho: Tensor) -> dict[str, float]:
    """How far the policy that sampled is from the one that trains; `log_rho` [tokens] = log(pi_old / mu).

    pi_old is the policy before the first update of the batch; where its log-probabilities were not needed, the policy
    as it first scored each token, which in later mini-batches has been updated already.

    kl: of mu from pi_old, by k3; chi2: E[rho^2] - 1; ess: the effective share of the sample, (E rho)^2 / E[rho^2].
    """
    if len(log_rho) == 0:
        return {}
    rho = ratio_of(log_rho)
    square = rho.square().mean().item()
    return {
        "mismatch/max_abs_dlogp": log_rho.abs().max().item(),
        "mismatch/kl": (rho - 1 - log_rho).mean().item(),
        "mismatch/chi2": square - 1,
        "mismatch/ess": rho.mean().item() ** 2 / square,
    }
