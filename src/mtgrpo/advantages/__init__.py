"""From the rewards of a batch to the advantage of every sampled token. One advantage estimator = one file.

An estimator is independent of the algorithm, which sets the baseline.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtgrpo.advantages.rewards import Rewards, rewards_of
from mtgrpo.algorithms import Algorithm, Baseline, PerToken, Tensor, Tokens
from mtgrpo.errors import Bounded, ConfigError
from mtgrpo.parts.extension import misgiven
from mtgrpo.types import Group

LEAST_ADVANTAGE = 1e-9  # that is not rounding


@dataclass(frozen=True)
class Assigned:
    """What an estimator gives, for each sampled token; tensors [tokens] fp64."""

    advantage: Tensor
    target: Tensor | None = None  # of the critic: NaN where it learns nothing; None without a critic


@dataclass
class AdvantageEstimator(Bounded, ABC):
    """Base of all advantage estimators."""

    outcome_weight: float = 1.0  # weight of the reward of the whole trajectory
    turn_weight: float = 1.0  # weight of the rewards of single turns

    differs_by_turn: ClassVar[bool] = True  # whether the turns of a trajectory may have different advantages
    compares_turns: ClassVar[bool] = False  # whether turns are compared with those of siblings
    uses_critic: ClassVar[bool] = False

    def check(self, experiment: Any) -> None:
        """Raise ConfigError where it cannot be used with the algorithm and the reward of `experiment`."""
        algorithm: Algorithm = experiment.algorithm
        name = type(algorithm).__name__
        if algorithm.has_critic and not self.uses_critic:
            cure = "set advantage=gae with model.value_head=true"
            raise ConfigError(f"algorithm {name} has a critic, which only advantage=gae uses: {cure}")
        if self.differs_by_turn and algorithm.constant_advantage:
            raise ConfigError(
                f"algorithm {name} takes a geometric mean over the trajectory, which needs one advantage for all of "
                f"it; {type(self).__name__} gives each turn its own: set advantage=trajectory"
            )
        if self.compares_turns and not algorithm.compares_siblings:
            raise ConfigError(
                f"{type(self).__name__} compares the turns of siblings, and algorithm {name} has no baseline of the "
                "group: set advantage=trajectory, advantage=return_to_go or another algorithm"
            )
        if not self.outcome_weight and not experiment.rewards_turns:
            reward = type(experiment.reward).__name__
            raise ConfigError(f"advantage.outcome_weight=0, and reward {reward} gives turns none: nothing is rewarded")

    def note(self, algorithm: Algorithm) -> str:
        """A note that is printed before training; "" = none."""
        return ""

    def weigh(self, rewards: Rewards) -> Rewards:
        """`rewards` times `outcome_weight` and `turn_weight`."""
        outcome, per_turn = rewards.outcome * self.outcome_weight, rewards.per_turn * self.turn_weight
        return replace(rewards, outcome=outcome, per_turn=per_turn)

    @abstractmethod
    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """The advantages before `Algorithm.normalise`.

        rewards: already weighted. values [tokens] fp64: of the critic, at the state before each sampled token.
        """


def advantages(
    estimator: AdvantageEstimator, algorithm: Algorithm, rewards: Rewards, values: Tensor | None = None
) -> Assigned:
    """The advantage of every sampled token of a rollout batch in the loss: 0 where its trajectory is not trained.

    rewards: as `estimator.weigh` gives them. values [tokens] fp64: as in `AdvantageEstimator.assign`.
    """
    assigned: Any = estimator.assign(rewards, algorithm, values)
    if not isinstance(assigned, Assigned) or assigned.advantage.shape != rewards.turn.shape:
        raise misgiven(estimator.assign, assigned, "give an Assigned with an advantage for each sampled token")
    trained = rewards.of_tokens(rewards.trained)
    advantage = assigned.advantage.new_zeros(len(assigned.advantage))
    advantage[trained] = algorithm.normalise(assigned.advantage[trained])
    return replace(assigned, advantage=advantage)


def varies(group: Group, estimator: AdvantageEstimator, algorithm: Algorithm) -> bool:
    """Whether `group`, of which none failed, teaches anything: whether a token that is trained has an advantage.

    Where siblings are not compared or a critic gives the baseline: whether the sums of their rewards differ.
    """
    import torch  # noqa: PLC0415  settings alone import no library

    turns = [
        (number, place, len(turn.output))
        for number, t in enumerate(group.trajectories)
        for place, turn in enumerate(t.turns)
    ]
    trajectory, turn, length = torch.tensor(turns, dtype=torch.long).view(-1, 3).unbind(1)
    tokens = (length.unique(return_inverse=True)[1] + 1) * (length > 0)  # as different as the lengths, and few
    token = trajectory.repeat_interleave(tokens), turn.repeat_interleave(tokens)
    rewards = estimator.weigh(rewards_of([group], algorithm, *token))
    seen = rewards.totals() - rewards.totals()[:1]
    if algorithm.compares_siblings and not algorithm.has_critic:
        estimator, algorithm = copy.deepcopy((estimator, algorithm))  # what they keep is of training
        seen = estimator.assign(rewards, algorithm).advantage[rewards.of_tokens(rewards.trained)]
    return bool((seen.abs() > LEAST_ADVANTAGE).any())


def try_out(estimator: AdvantageEstimator, algorithm: Algorithm) -> None:
    """Compute advantages and losses of two trajectories of two tokens: mistakes raise before a run begins."""
    import torch  # noqa: PLC0415  settings alone import no library

    pair, group, zeros = torch.arange(2), torch.zeros(2, dtype=torch.long), torch.zeros(4, dtype=torch.float64)
    baseline: Any = algorithm.baseline(pair.double(), group)
    right = isinstance(baseline, Baseline) and {
        torch.as_tensor(part).shape for part in (baseline.centre, baseline.scale)
    }
    if not right or not right <= {pair.shape, torch.Size()}:
        raise misgiven(algorithm.baseline, baseline, "give a Baseline of the centre and the scale of each return")
    turn = pair.repeat_interleave(2)
    rewards = Rewards(pair.double(), group, group == 0, zeros[:2], pair, group, group, zeros, turn)
    advantage = advantages(estimator, algorithm, rewards, zeros if algorithm.has_critic else None).advantage.float()
    logp = torch.full((4,), -1.0, requires_grad=True)
    sequence = algorithm.sequence_term(logp - logp.detach(), advantage) if algorithm.needs_sequence_ratio else None
    loss: Any = algorithm.loss(Tokens(logp, logp.detach(), advantage, sequence))
    if not isinstance(loss, PerToken) or loss.loss.shape != (4,):
        raise misgiven(algorithm.loss, loss, "give a PerToken with a loss for each token, not averaged")
    if not loss.loss.isfinite().all():
        raise misgiven(algorithm.loss, loss, "give finite losses, as here for log-probabilities of -1")
    if not loss.loss.requires_grad:
        raise misgiven(algorithm.loss, loss, "its loss must have a gradient by `logp`: detach nothing of that")
