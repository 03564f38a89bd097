from dataclasses import dataclass

from mtgrpo.advantages import AdvantageEstimator, Assigned


@dataclass
class LastTurn(AdvantageEstimator):
    """The last turn alone deserves what the trajectory got; the others a share of it."""

    share: float = 0.5

    def assign(self, rewards, algorithm, values=None):
        totals = rewards.totals()
        advantage = algorithm.baseline(totals, rewards.group).advantage(totals)[rewards.trajectory]
        last = rewards.last_turn
        return Assigned((advantage * (last + self.share * ~last))[rewards.turn])
