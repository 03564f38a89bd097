from dataclasses import dataclass

from mtgrpo.rewards import Reward


@dataclass
class Short(Reward):
    """1 when the policy sampled at most `tokens` tokens, else 0."""

    tokens: int = 20

    def reward(self, trajectory):
        return float(trajectory.sampled_tokens <= self.tokens)
