"""How far is the answer from a length?"""

from dataclasses import dataclass

from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory


@dataclass
class TargetLength(Reward, chars=">= 0", success_at="<= 0"):
    """Minus the characters by which the final message is longer or shorter than `chars`: a first lesson in GRPO.

    What the message says is worth nothing. An answer within five characters counts as a success.
    """

    success_at: float = -5.0
    chars: int = 50

    def reward(self, trajectory: Trajectory) -> float:
        return -float(abs(self.chars - len(trajectory.final)))
