"""A reward: what is good. It has parts that are logged one by one, and a part for each turn.

    mtgrpo train reward=examples/reward.py:Thorough reward.per_turn=0.02 advantage=turn trainer.steps=2

It gets the whole trajectory: the task with its answer, all turns, the calls of tools and what they answered.
"""

from dataclasses import dataclass

from mtgrpo.errors import PolicyError
from mtgrpo.rewards import Reward, Score


@dataclass
class Thorough(Reward, per_turn=">= 0"):
    """1 for the right number that a tool has shown, half for a guessed one; turns whose calls fail cost a little."""

    per_turn: float = 0.05  # what a turn with a failed call costs
    success_at: float = 0.9  # from here on it counts as a success

    judges_turns = True

    def reward(self, trajectory):
        text = trajectory.final.rpartition("####")[2].strip()
        if not text:
            raise PolicyError("no answer")  # cannot be graded: worth 0. What is the world's fault raises anything else
        right = text == trajectory.task.answer
        shown = any(text == message.content for turn in trajectory.turns for message in turn.observations)
        turns = [-self.per_turn * self.failed(turn) for turn in trajectory.turns]
        return Score(
            right * (1.0 if shown else 0.5), components={"right": float(right), "shown": float(shown)}, turns=turns
        )

    def failed(self, turn):
        """Whether a call of the turn was answered by an error."""
        return any(message.content.startswith("error:") for message in turn.observations)
