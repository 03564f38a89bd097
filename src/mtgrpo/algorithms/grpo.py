"""GRPO whole, from the rewards of a group to the loss of each sampled token; other algorithms import parts of it.

For a task q, the trajectories o_i of its group with rewards r_i, and the sampled tokens t of each (arXiv:2402.03300):

    A_i     = (r_i - mean(r)) / (std(r) + epsilon)                                        section 4.1.2
    rho_i,t = pi(o_i,t | q, o_i,<t) / pi_old(o_i,t | q, o_i,<t)                           equation 3
    J_i,t   = min(rho_i,t A_i, clip(rho_i,t, 1 - clip_low, 1 + clip_high) A_i)            equation 3
    L       = -(sum of w_i,t J_i,t over all i and t), where `average.py` gives the weights w, whose sum is 1

`Baseline.advantage` computes the first line from the baseline below, `Policy.updating` the sum of the last. The KL
penalty of equation 3 is added by `kl.py`, its estimator k3 is equation 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.algorithms import Algorithm, Baseline, PerToken, Tensor, Tokens
from mtgrpo.errors import ConfigError

MAX_LOG_RATIO = 20.0  # nats; exp(20) is 5e8. In fp32 exp(89) is infinite, and infinity times a gradient of 0 is NaN


@dataclass
class GroupRelative(Algorithm, epsilon="> 0"):
    """The baseline of a group: advantage_i = (R_i - mean(R)) / (std(R) + epsilon).

    std is the unbiased one (n - 1). A group of one has advantage 0, and so has one of equal returns, exactly.
    """

    divide_by_std: bool = True  # of the returns of the group
    epsilon: float = 1e-6  # added to the standard deviation

    @property
    def scales_by_std(self) -> bool:
        return self.divide_by_std

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        centre = group_mean(returns, group)
        return Baseline(centre, group_std(returns - centre, group) + self.epsilon if self.divide_by_std else 1.0)


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    """The mean of `values` [n] over the same `group` [n] int64; [n], exactly the value where all of it are equal."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    least = values.new_zeros(len(counts)).scatter_reduce(0, index, values, "amin", include_self=False)
    above = values - least[index]
    return (least + values.new_zeros(len(counts)).index_add(0, index, above) / counts)[index]


def group_std(centred: Tensor, group: Tensor) -> Tensor:
    """The unbiased standard deviation of each group; `centred` [n] has mean 0 in it. 0 for a group of one. [n]."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    squares = centred.new_zeros(len(counts)).index_add(0, index, centred.square())
    return (squares / (counts - 1).clamp(min=1)).sqrt()[index]


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) for any tensor; beyond +-MAX_LOG_RATIO it is constant and has no gradient, as in verl."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_clamped(log_ratio: Tensor) -> Tensor:
    """Where `ratio_of` clamps; bool, without gradient."""
    return log_ratio.detach().abs() > MAX_LOG_RATIO


@dataclass
class ClippedSurrogate(Algorithm, clip_low="> 0 and <= 1", clip_high="> 0"):
    """L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -dual_clip A.

    rho_t = pi(token) / pi_old(token). The bound for A < 0 is the dual clip of arXiv:1912.09729.
    """

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # upper bound of the ratio where the advantage is negative; 0 = off

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(f"`dual_clip` must be 0 (off) or above 1 + `clip_high`, got {self.dual_clip}")

    def loss(self, tokens: Tokens) -> PerToken:
        return self.surrogate(ratio_of(tokens.log_ratio), tokens.advantage)

    def surrogate(self, ratio: Tensor, advantage: Tensor) -> PerToken:
        """The surrogate for `ratio` [tokens], which may be that of the token or of its trajectory."""
        gain = ratio * advantage
        bound = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage
        loss, clipped = -gain.minimum(bound), bound < gain
        if self.dual_clip:
            worst = -self.dual_clip * advantage
            too_much = (advantage < 0) & (loss > worst)
            loss, clipped = worst.where(too_much, loss), clipped | too_much
        return PerToken(loss, clipped)


@dataclass
class GRPO(ClippedSurrogate, GroupRelative):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300).

    A_i = (r_i - mean(r)) / (std(r) + epsilon)                              one number per trajectory of a group
    L_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)         one number per sampled token
    rho_t = pi(token) / pi_old(token)

    The paper averages over each trajectory first (average=trajectory_mean); token_mean is the default here.
    When: to begin with. Where rewards differ much in spread between tasks, divide_by_std=false is safer.
    """
