"""Off-policy corrections: the behaviour policy may have other kernels or older weights than the trained one.

Three policies: the behaviour policy mu sampled (its log-probabilities come from the engine), the old policy pi_old is
the denominator of the ratio, pi is trained. rho = pi_old / mu is the importance weight. Weights and masks carry no
gradient, and never change the count that the loss is divided by.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtgrpo.algorithms import Tensor
from mtgrpo.algorithms.grpo import ratio_of
from mtgrpo.errors import ConfigError, refuse_without_effect, require


class OldPolicy(Enum):
    """The old policy: the denominator of the ratio."""

    trainer = "trainer"  # the policy before the first update of the batch; with a weight: decoupled PPO
    engine = "engine"  # the behaviour policy: ratio and clip then correct for staleness too
    interpolated = "interpolated"  # between the two by staleness, without a forward pass (A-3PO, arXiv:2512.06547)


class Weight(Enum):
    """The factor of a token's loss: the truncated importance weight min(rho, cap)."""

    none = "none"  # 1
    token = "token"  # of the token
    sequence = "sequence"  # of the whole trajectory: the product over its sampled tokens


class Reject(Enum):
    """Which tokens are masked where rho is not in [low, high]."""

    none = "none"  # none
    token = "token"  # the token itself (IcePop)
    sequence = "sequence"  # the trajectory, by the product over its sampled tokens: rejects long ones
    geometric = "geometric"  # the trajectory, by the geometric mean over its sampled tokens


@dataclass
class Correction:
    """Off-policy corrections: importance weights, masks, and which policy is the old one.

    Decoupled PPO (arXiv:2110.00641, arXiv:2505.24298) is old_policy=trainer with weight=token.
    """

    # null: engine if rollout.max_staleness > 0 and nothing below is on, else trainer
    old_policy: OldPolicy | None = None
    weight: Weight = Weight.none  # the factor of a token's loss
    cap: float = 2.0  # the largest importance weight
    reject: Reject = Reject.none  # which tokens are masked
    low: float = 0.5  # rho below is rejected
    high: float = 2.0  # rho above is rejected
    veto: float = 0.0  # mask a trajectory with a token whose rho is below this or above 1 / this; 0 = off

    def __post_init__(self) -> None:
        require(self, cap="> 0", low=">= 0 and < 1", high="> 1", veto=">= 0 and < 1")
        if self.weight is Weight.none:
            refuse_without_effect(self, ("cap",), "set `weight=token`")
        if self.reject is Reject.none:
            refuse_without_effect(self, ("low", "high"), "set `reject=token`")
        if self.old_policy is OldPolicy.engine and self.active:
            raise ConfigError(
                "`old_policy=engine` has the importance weight in its ratio already; with `weight`, "
                "`reject` or `veto` set `old_policy=trainer`"
            )
        whole = self.weight is Weight.sequence or self.reject in (Reject.sequence, Reject.geometric) or self.veto
        if self.old_policy is OldPolicy.interpolated and whole:
            raise ConfigError(
                "`old_policy=interpolated` is computed one micro-batch at a time: whole trajectories cannot "
                "be weighted or masked; set `weight=token`, `reject=token`, or `old_policy=trainer`"
            )

    @property
    def active(self) -> bool:
        """Whether any token is weighted or masked."""
        return self.weight is not Weight.none or self.reject is not Reject.none or self.veto > 0

    def resolve(self, stale: bool, uses_behaviour_policy: bool) -> OldPolicy:
        """The old policy, where the batch may be `stale`."""
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
        weight = {Weight.token: rho, Weight.sequence: product}.get(self.weight, rho.new_ones(len(rho)))
        weight = weight.clamp(max=self.cap)  # without a weight, `cap` is 2
        judged = {Reject.token: rho, Reject.sequence: product, Reject.geometric: mean}.get(self.reject)
        if judged is not None:
            weight = weight * ((self.low <= judged) & (judged <= self.high))
        if self.veto:
            outlying = (rho < self.veto) | (rho > 1 / self.veto)
            weight = weight * (rho.new_zeros(len(counts)).index_add(0, index, outlying.to(rho)) == 0)[index]
        return weight


def interpolate(behaviour_logp: Tensor, logp: Tensor, sampled_at: Tensor, version: int) -> Tensor:
    """A stand-in for the log-probabilities of the policy before the last update (A-3PO, arXiv:2512.06547), [tokens].

    behaviour_logp + a (logp - behaviour_logp), a = (version - 1 - sampled_at) / (version - sampled_at), and 0 for
    tokens that this version itself sampled. sampled_at [tokens] int64: the version that sampled each token.
    """
    staleness = (version - sampled_at).clamp(min=0)
    share = (staleness - 1).clamp(min=0) / staleness.clamp(min=1)
    return behaviour_logp + share * (logp - behaviour_logp)


def diagnostics(log_rho: Tensor) -> dict[str, float]:
    """How far the behaviour policy is from the old one; `log_rho` [tokens] = log(pi_old / mu).

    kl: of mu from pi_old, by k3; chi2: E[rho^2] - 1; ess: the effective sample size as a share, (E rho)^2 / E[rho^2].
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
