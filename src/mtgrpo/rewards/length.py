"""What a long answer costs."""

from dataclasses import dataclass

from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory


@dataclass
class Length(Reward, budget_tokens=">= 0", cost="> 0", most="> 0"):
    """Minus `cost` for every token that the policy sampled beyond `budget_tokens`, over all turns; never below -`most`.

    To be added to a reward for what is said: 'reward=[em,length]'. By itself the shortest message is the best.
    """

    success_at: float = 0.0  # within the budget
    budget_tokens: int = 512  # sampled tokens of a whole conversation that cost nothing
    cost: float = 0.001  # of each token above
    most: float = 0.5  # that a conversation can cost

    def reward(self, trajectory: Trajectory) -> float:
        return max(-self.most, min(0.0, self.cost * (self.budget_tokens - trajectory.sampled_tokens)))
