"""Turns are compared with the turns of siblings at the same place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.credit import Rewards
from mtgrpo.credits import Assigned, Credit, last_of, refuse_constant, refuse_no_siblings
from mtgrpo.extension import ConfigError


@dataclass
class ByTurn(Credit):
    """MT-GRPO (Zeng et al., arXiv:2505.11821), for any number of turns.

    A_k = A_outcome + turn_coef A_turn,k            for all turns but the last
    A_K = A_outcome                                 for the last, which the outcome is about

    A_turn,k compares the reward of turn k with that of the siblings' turn k, A_outcome the outcomes. The paper puts its
    coefficient at the outcome: its lambda is 1 / turn_coef, up to the scale of the whole. A reward of the last turn by
    itself counts for nothing.
    When: every conversation has the same plan, such as search first, then answer.
    """

    turn_coef: float = 1.0  # weight of the advantage of single turns

    def __post_init__(self) -> None:
        if self.turn_coef < 0:
            raise ConfigError(f"credit.turn_coef must be >= 0, got {self.turn_coef}")

    def check(self, algorithm: Algorithm) -> None:
        """For algorithms that compare siblings, turn by turn."""
        super().check(algorithm)
        refuse_constant(algorithm, "turn")
        refuse_no_siblings(algorithm, "turn")

    def assign(self, rewards: Rewards, algorithm: Algorithm, values: Tensor | None = None) -> Assigned:
        """Outcomes compared within groups, rewards of turns within groups and places."""
        outcome = rewards.outcome.index_add(0, rewards.trajectory[rewards.turn], rewards.per_token)
        of_outcome = algorithm.baseline(outcome, rewards.group).advantage(outcome)
        pairs = torch.stack([rewards.group[rewards.trajectory], rewards.position], dim=1)
        _, place = torch.unique(pairs, dim=0, return_inverse=True)
        of_turn = algorithm.baseline(rewards.per_turn, place).advantage(rewards.per_turn)
        of_turn = of_turn.masked_fill(last_of(rewards.trajectory), 0.0)
        return Assigned((of_outcome[rewards.trajectory] + self.turn_coef * of_turn)[rewards.turn])
