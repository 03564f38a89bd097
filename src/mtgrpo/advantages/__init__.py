"""Which turn deserves what: from the rewards of a batch to the advantage of every sampled token. One file = one way.

A way of assigning credit is independent of the algorithm, which says what returns are compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm
from mtgrpo.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Level(Enum):
    """What a step of a return is."""

    turn = "turn"
    token = "token"


@dataclass(frozen=True)
class Assigned:
    """The advantage of each sampled token [tokens] fp64, and what its value should have been.

    target [tokens] fp64: NaN where the token's state has no value to be learnt; None without a critic.
    """

    advantage: Tensor
    target: Tensor | None = None


@dataclass
class AdvantageEstimator(ABC):
    """Base of all ways to assign credit."""

    outcome_weight: float = 1.0  # of the reward of the whole trajectory
    turn_weight: float = 1.0  # of the rewards of single turns

    def check(self, algorithm: Algorithm) -> None:
        """Raise ConfigError where this way has no meaning for `algorithm`."""
        if algorithm.has_critic:
            raise ConfigError(
                f"algorithm {type(algorithm).__name__} learns values, which only advantage=gae uses: set advantage=gae"
            )

    def note(self, algorithm: Algorithm) -> str:
        """What the user should know before training begins; "" = nothing."""
        return ""

    def weighted(self, rewards: Rewards) -> Rewards:
        """The rewards, as outcome and turns are to be weighed."""
        return replace(
            rewards, outcome=rewards.outcome * self.outcome_weight, per_turn=rewards.per_turn * self.turn_weight
        )

    @abstractmethod
    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """The advantages before `Algorithm.normalise`.

        rewards: already weighted. values [tokens] fp64: what the critic expects before each sampled token.
        """


def advantages(
    estimator: AdvantageEstimator, algorithm: Algorithm, rewards: Rewards, values: Tensor | None = None
) -> Assigned:
    """What every sampled token of a rollout batch is worth to the loss: 0 where its trajectory is not trained.

    rewards: weighted by `advantage`. values [tokens] fp64: as in `AdvantageEstimator.assign`.
    """
    assigned = estimator.assign(rewards, algorithm, values)
    trained = rewards.of_tokens(rewards.trained)
    advantage = assigned.advantage.new_zeros(len(assigned.advantage))
    advantage[trained] = algorithm.normalise(assigned.advantage[trained])
    return replace(assigned, advantage=advantage)


def refuse_constant(algorithm: Algorithm, name: str) -> None:
    """Raise ConfigError where `algorithm` needs one advantage for a whole trajectory."""
    if algorithm.constant_advantage:
        raise ConfigError(
            f"algorithm {type(algorithm).__name__} takes a geometric mean over the trajectory, which needs one "
            f"advantage for all of it; advantage={name} gives each turn its own: set advantage=trajectory"
        )


def refuse_no_siblings(algorithm: Algorithm, name: str) -> None:
    """Raise ConfigError where `algorithm` compares with no siblings."""
    if not algorithm.compares_siblings:
        raise ConfigError(
            f"advantage={name} compares the turns of siblings, and algorithm {type(algorithm).__name__} has no "
            "baseline of the group: set advantage=trajectory or advantage=return_to_go, or another algorithm"
        )


def discounted(amounts: Tensor, sequence: Tensor, discount: float) -> Tensor:
    """The sum of each amount and of those that follow in its sequence, discounted by the distance; [n] fp64.

    amounts [n]; sequence [n] int64, ascending: what follows one another has the same number.
    """
    import torch  # noqa: PLC0415  settings alone import no library

    if len(amounts) == 0:
        return amounts.clone()
    _, row, counts = sequence.unique_consecutive(return_inverse=True, return_counts=True)
    column = torch.arange(len(amounts)) - (counts.cumsum(0) - counts)[row]
    table = amounts.new_zeros(len(counts), int(counts.max()) + 1)
    table[row, column] = amounts
    for place in range(table.shape[1] - 2, -1, -1):
        table[:, place] += discount * table[:, place + 1]
    return table[row, column]


def last_of(sequence: Tensor) -> Tensor:
    """Where each sequence ends: [n] bool for `sequence` [n] int64, ascending."""
    import torch  # noqa: PLC0415  settings alone import no library

    return torch.cat([sequence[1:] != sequence[:-1], torch.ones(min(1, len(sequence)), dtype=torch.bool)])
