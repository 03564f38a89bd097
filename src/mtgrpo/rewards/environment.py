"""What the environment paid."""

from dataclasses import dataclass

from mtgrpo.rewards import Reward, Score
from mtgrpo.types import Trajectory


@dataclass
class Environment(Reward):
    """The sum of what the environment paid for the steps of the conversation (`Reply.reward`).

    Training counts each payment once, in the turn that it was for: advantage=return_to_go, gae and turn see which. What
    was paid for turns that are not trained, such as those of an agent's helpers, counts for the whole.
    """

    judges_turns = True
    takes_posted = True

    def reward(self, trajectory: Trajectory) -> Score:
        paid = sum(turn.paid for turn in trajectory.turns)
        return Score(paid + sum(turn.paid for turn in trajectory.untrained), paid=paid)
