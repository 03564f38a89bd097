from dataclasses import dataclass

from mtgrpo.algorithms import Algorithm, Baseline, PerToken


@dataclass
class Reinforce(Algorithm):
    """REINFORCE against a constant."""

    centre: float = 0.25  # taken from every return

    def baseline(self, returns, group):
        return Baseline(returns * 0 + self.centre)

    def loss(self, tokens):
        return PerToken(-tokens.logp * tokens.advantage, tokens.logp > 0)
