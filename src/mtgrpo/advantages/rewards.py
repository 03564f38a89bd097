"""From groups to the rewards of their trajectories, turns and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mtgrpo.algorithms import Algorithm, Tensor, Truncated
from mtgrpo.types import Group, Status, Trajectory

AUXILIARY = 2**20  # more turns than any conversation has


class Level(Enum):
    """The time step of a return."""

    turn = "turn"
    token = "token"


def comparable(groups: Sequence[Group], algorithm: Algorithm) -> list[Group]:
    """The groups without their failed trajectories; those too small to compare are left out."""
    large_enough: list[Group] = []
    for group in groups:
        valid = group.valid
        if valid and (len(valid) >= 2 or len(group.trajectories) == 1 or not algorithm.compares_siblings):
            large_enough.append(Group(group.task, valid))
    return large_enough


@dataclass(frozen=True)
class Rewards:
    """The rewards of a rollout batch. Turns are numbered over the whole batch, in the order of trajectories."""

    outcome: Tensor  # [trajectories] fp64
    group: Tensor  # [trajectories] int64
    trained: Tensor  # [trajectories] bool; false = counts in statistics and normaliser, but its tokens have no loss
    per_turn: Tensor  # [turns] fp64
    trajectory: Tensor  # [turns] int64
    position: Tensor  # [turns] int64, from 0 within the trajectory; auxiliary turns are counted apart, from AUXILIARY
    anchor: Tensor  # [turns] int64, equal where siblings answered the same observation
    per_token: Tensor  # [tokens] fp64, of single sampled tokens, such as a KL penalty
    turn: Tensor  # [tokens] int64, the turn of each sampled token

    def of_tokens(self, per_trajectory: Tensor) -> Tensor:
        """A value of each trajectory [trajectories] -> of each sampled token [tokens]."""
        return per_trajectory[self.trajectory[self.turn]]

    @property
    def last_turn(self) -> Tensor:
        """Which turns are the last of their trajectory; [turns] bool."""
        return is_last(self.trajectory)

    def turn_sums(self) -> Tensor:
        """The reward of each turn, its tokens included, without the outcome; [turns]."""
        return self.per_turn.index_add(0, self.turn, self.per_token)

    def totals(self) -> Tensor:
        """The sum of all rewards of each trajectory; [trajectories]."""
        return self.outcome.index_add(0, self.trajectory, self.turn_sums())

    def steps(self, level: Level) -> tuple[Tensor, Tensor]:
        """The trajectory [steps] and the reward [steps] of each turn or token; the outcome is part of the last one."""
        if level is Level.turn:
            trajectory, rewards = self.trajectory, self.turn_sums()
        else:
            trajectory = self.trajectory[self.turn]
            rewards = self.per_token + self.per_turn[self.turn] * is_last(self.turn)
        return trajectory, rewards + self.outcome[trajectory] * is_last(trajectory)


def is_first(sequence: Tensor) -> Tensor:
    """Where each sequence begins: [n] bool for `sequence` [n] int64, ascending."""
    first = sequence != sequence.roll(1)
    first[:1] = True
    return first


def is_last(sequence: Tensor) -> Tensor:
    """Where each sequence ends: [n] bool for `sequence` [n] int64, ascending."""
    last = sequence != sequence.roll(-1)
    last[-1:] = True
    return last


def discounted_sums(amounts: Tensor, sequence: Tensor, discount: float) -> Tensor:
    """The discounted sum of `amounts` [n] from each to the end of its `sequence` [n] int64, ascending; [n] fp64."""
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


def rewards_of(groups: Sequence[Group], algorithm: Algorithm, trajectory: Tensor, turn: Tensor) -> Rewards:
    """The rewards of `groups`, in order of group and sample; none of the trajectories has failed.

    trajectory, turn [tokens] int64: of each sampled token, by number of trajectory, and of turn within it.
    """
    import torch  # noqa: PLC0415  settings alone import no library

    numbered = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    counts = torch.tensor([len(t.turns) for _, t in numbered], dtype=torch.long)
    anchors: dict[object, int] = {}
    masked = algorithm.truncated is Truncated.mask
    return Rewards(
        outcome=torch.tensor([algorithm.shaped_reward(t) for _, t in numbered], dtype=torch.float64),
        group=torch.tensor([number for number, _ in numbered], dtype=torch.long),
        trained=torch.tensor([not (masked and t.status is Status.TRUNCATED) for _, t in numbered], dtype=torch.bool),
        per_turn=torch.tensor([r for _, t in numbered for r in _turn_rewards(t, algorithm)], dtype=torch.float64),
        trajectory=torch.arange(len(numbered)).repeat_interleave(counts),
        position=torch.tensor([place for _, t in numbered for place in _places(t)], dtype=torch.long),
        anchor=torch.tensor(
            [anchors.setdefault((number, state), len(anchors)) for number, t in numbered for state in _anchors(t)],
            dtype=torch.long,
        ),
        per_token=torch.zeros(len(turn), dtype=torch.float64),
        turn=(counts.cumsum(0) - counts)[trajectory] + turn,
    )


def _anchors(trajectory: Trajectory) -> Iterator[object]:
    """The observation that each turn answers, as roles and contents; the first turn answers the task.

    An agent has several chains in any order: there it is the tokens that are new in the turn's context.
    """
    if trajectory.led_by_agent:
        yield from ((turn.auxiliary, turn.parent < 0, *turn.new_context) for turn in trajectory.turns)
        return
    state: object = "task"
    for turn in trajectory.turns:
        yield ("auxiliary", state) if turn.auxiliary else state
        if turn.observations:
            state = tuple((message.role, message.content) for message in turn.observations)


def _places(trajectory: Trajectory) -> Iterator[int]:
    following = {False: 0, True: AUXILIARY}
    for turn in trajectory.turns:
        yield following[turn.auxiliary]
        following[turn.auxiliary] += 1


def _turn_rewards(trajectory: Trajectory, algorithm: Algorithm) -> list[float]:
    rewards = trajectory.turn_rewards or [0.0] * len(trajectory.turns)
    return [min(0.0, reward) for reward in rewards] if algorithm.penalises(trajectory) else rewards
