"""Soft adaptive policy optimisation: a gate that closes smoothly in place of a clip."""

from dataclasses import dataclass

from mtgrpo.algorithms import PerToken, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GroupRelative, ratio_of


@dataclass
class SAPO(GroupRelative, tau_positive="> 0 and <= 40", tau_negative="> 0 and <= 40"):
    """SAPO (arXiv:2511.20347).

    L_t = -A (4 / tau) sigmoid(tau (rho_t - 1)),   tau = tau_positive where A > 0, else tau_negative

    When: several updates per batch, and a clip throws too much away.
    """

    average: Average = Average.trajectory_mean
    tau_positive: float = 1.0  # how quickly the gate closes where the advantage is positive
    tau_negative: float = 1.05  # and where it is negative

    def loss(self, tokens: Tokens) -> PerToken:
        import torch  # noqa: PLC0415  settings alone import no library

        positive = tokens.advantage > 0
        tau = torch.where(positive, self.tau_positive, self.tau_negative).to(tokens.advantage)
        gate = (tau * (ratio_of(tokens.log_ratio) - 1)).sigmoid() * (4 / tau)
        return PerToken(-gate * tokens.advantage, positive.new_zeros(len(positive)))
