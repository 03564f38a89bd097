"""From returns to a loss. One algorithm = one file = its baseline and its per-token loss, with formula and paper.

All tensors of a loss are flat: one entry for each sampled token, in any order. A loss returns one value per token and
never divides; `average.py` alone does. `mtgrpo.advantages` computes the return of each turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mtgrpo.algorithms.average import Average
from mtgrpo.errors import Bounded, ConfigError, refuse_without_effect
from mtgrpo.types import Status, Trajectory

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"  # settings alone import no library


class Truncated(Enum):
    """How a trajectory that reached a limit is rewarded and trained."""

    penalise = "penalise"  # its reward is at most 0: min(0, reward)
    mask = "mask"  # it counts in its group's statistics, its tokens are not trained
    keep = "keep"  # its reward stays as scored


@dataclass(frozen=True)
class Tokens:
    """The inputs of a loss; tensors [tokens], and only `logp` carries gradient."""

    logp: Tensor  # of the policy, nats
    old_logp: Tensor  # of the old policy: the denominator of the ratio
    advantage: Tensor
    sequence: Tensor | None = None  # mean of `Algorithm.sequence_term` over all sampled tokens of the same trajectory

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / pi_old) of each token."""
        return self.logp - self.old_logp


@dataclass(frozen=True)
class PerToken:
    """A loss before averaging; tensors [tokens]."""

    loss: Tensor
    clipped: Tensor  # bool, where the clip removed the gradient
    metrics: dict[str, Tensor] = field(default_factory=dict)  # without gradient; their averages are reported


@dataclass(frozen=True)
class Baseline:
    """A baseline: advantage = (return - centre) / scale; `centre` [n], `scale` [n] or one number for all."""

    centre: Tensor
    scale: Tensor | float = 1.0

    def advantage(self, returns: Tensor) -> Tensor:
        return (returns - self.centre) / self.scale


@dataclass
class Algorithm(Bounded, ABC, top_entropy="> 0 and <= 1", entropy_coef=">= 0", average_length=">= 0"):
    """Base of all algorithms."""

    constant_advantage: ClassVar[bool] = False  # whether all tokens of a trajectory must have the same advantage
    uses_behaviour_policy: ClassVar[bool] = False  # whether its old policy is always the behaviour policy

    average: Average = Average.token_mean  # how tokens are weighed
    average_length: int = 0  # tokens by which average=constant divides; 0 = rollout.max_trajectory_tokens
    truncated: Truncated = Truncated.penalise  # how a trajectory that reached a limit is rewarded and trained
    entropy_coef: float = 0.0  # entropy bonus: weight of the mean entropy, which is maximised
    top_entropy: float = 1.0  # the share of tokens, those of highest entropy, that are trained (arXiv:2506.01939)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average is not Average.constant:
            refuse_without_effect(self, ("average_length",), "set `average=constant`, whose divisor it is")

    @property
    def compares_siblings(self) -> bool:
        """Whether its baseline comes from the group. If not, a group may be of one, and turns cannot be compared."""
        return True

    @property
    def always_has_gradient(self) -> bool:
        """Whether a token has a gradient even where its advantage is 0."""
        return self.entropy_coef != 0 or self.has_critic

    @property
    def needs_variance(self) -> bool:
        """Whether nothing is learned from a group whose rewards are all equal."""
        return self.compares_siblings and not self.always_has_gradient

    @property
    def has_critic(self) -> bool:
        """Whether it trains a critic: the model's value head."""
        return type(self).value_loss is not Algorithm.value_loss

    @property
    def needs_sequence_ratio(self) -> bool:
        """Whether the loss of a token depends on its whole trajectory."""
        return type(self).sequence_term is not Algorithm.sequence_term

    @property
    def scales_by_std(self) -> bool:
        """Whether advantages are divided by the standard deviation of the group's returns."""
        return False

    def check(self, experiment: Any) -> None:
        """Raise ConfigError where it cannot be used with the other settings of `experiment`."""
        name, value_head, size = type(self).__name__, experiment.model.value_head, experiment.rollout.group_size
        if self.has_critic and not value_head:
            raise ConfigError(f"algorithm {name} learns values and needs a head for them: set model.value_head=true")
        if value_head and not self.has_critic:
            cure = "leave it out, or set algorithm=ppo advantage=gae, with siblings too algorithm.group_baseline=true"
            raise ConfigError(f"model.value_head=true, but algorithm {name} has no critic: {cure}")
        if size < 2 and self.compares_siblings:
            raise ConfigError(f"algorithm {name} compares siblings: rollout.group_size must be >= 2, got {size}")

    def shaped_reward(self, trajectory: Trajectory) -> float:
        """The outcome reward that training sees: as scored, or at most 0 where a truncated one is penalised.

        What the environment paid turn by turn is in the rewards of the turns, and not here too.
        """
        outcome = trajectory.reward - trajectory.paid
        return min(0.0, outcome) if self.penalises(trajectory) else outcome

    def penalises(self, trajectory: Trajectory) -> bool:
        """Whether only the negative rewards of `trajectory` and of its turns count."""
        return self.truncated is Truncated.penalise and trajectory.status is Status.TRUNCATED

    @abstractmethod
    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        """The baseline of each of `returns` [n] fp64, from those of the same `group` [n] int64."""

    def normalise(self, advantage: Tensor) -> Tensor:
        """Normalise the advantages of all trained tokens of a rollout batch; [tokens] -> [tokens]."""
        return advantage

    def sequence_term(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """For sequence-level losses: the term of each token [tokens], of which `Tokens.sequence` is the mean."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, tokens: Tokens) -> PerToken:
        """The loss of each token."""

    def value_loss(self, value: Tensor, old_value: Tensor, target: Tensor) -> Tensor:
        """For a critic: the weighted loss of each state [states]; old_value: before the first update of the batch."""
        raise NotImplementedError
