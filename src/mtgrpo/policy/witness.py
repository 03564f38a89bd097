"""One trajectory of each batch is followed from its rewards to the gradient of its tokens, apart from what trains.

In the first update of a batch the derivative of the loss by a log-probability is -advantage * the token's share, in
every algorithm, for the ratio is 1; where it is not, the signs are compared. So a sign, a shift or a division that is
wrong anywhere between rewards and gradient is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator, advantages
from mtgrpo.advantages.rewards import Rewards, rewards_of
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Algorithm, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GroupRelative
from mtgrpo.algorithms.kl import Place
from mtgrpo.algorithms.rloo import RLOO
from mtgrpo.errors import RunError
from mtgrpo.policy.settings import Control, UpdateConfig
from mtgrpo.types import Group

MAX_RATIO_1_NATS = 0.01  # from the old policy, up to which the ratio is taken for 1
TOLERANCE = 0.05  # relative; what a ratio that is taken for 1 may do, and rounding in 16 bits
MIN_ADVANTAGE = 1e-6  # of a trajectory that may be chosen


@dataclass(frozen=True)
class GroupEvidence:
    """What the groups of a batch say by themselves: laid out apart from the batch that is trained."""

    names: list[str]  # [trajectories], for people
    group: list[int]  # [trajectories]
    sampled: list[int]  # tokens of each trajectory
    advantage: Tensor | None  # [tokens] fp64, by the plain formula; None where it is computed from `rewards`
    rewards: Rewards | None


def evidence_of(groups: Sequence[Group], learning: UpdateConfig) -> GroupEvidence | None:
    """That of `groups`; None where nobody knows what the loss should be: of a user's own code, and of controls."""
    algorithm, estimator = learning.algorithm, learning.advantage
    owners = [_owner(algorithm, method) for method in ("baseline", "normalise", "loss")]
    owners += [_owner(estimator, method) for method in ("assign", "weigh")]
    if learning.control is not Control.normal or any(not owner.__module__.startswith("mtgrpo.") for owner in owners):
        return None
    baseline, normalise, _, assign, _ = owners
    is_plain = baseline in (GroupRelative, RLOO) and normalise is Algorithm and assign is WholeTrajectory
    is_plain = is_plain and not (learning.kl.coef and learning.kl.place is Place.reward)
    trajectories = [t for group in groups for t in group.trajectories]
    sampled = [t.sampled_tokens for t in trajectories]
    advantage = rewards = None
    if is_plain:
        plain = [a for group in groups for a in _plain(group, algorithm, estimator)]
        advantage = torch.tensor(plain, dtype=torch.float64).repeat_interleave(torch.tensor(sampled))
    else:
        turns = [(n, k, len(turn.output)) for n, t in enumerate(trajectories) for k, turn in enumerate(t.turns)]
        trajectory, turn, counts = torch.tensor(turns, dtype=torch.long).reshape(-1, 3).unbind(1)
        tokens = trajectory.repeat_interleave(counts), turn.repeat_interleave(counts)
        rewards = rewards_of(groups, algorithm, *tokens)
    names = [f"sample {t.sample_index} of task {t.task.id!r} (reward {t.reward:.4g})" for t in trajectories]
    group = [number for number, group in enumerate(groups) for _ in group.trajectories]
    return GroupEvidence(names, group, sampled, advantage, rewards)


@dataclass
class Witness:
    """A trajectory of the first update of a batch, and what the gradient at its tokens must be."""

    name: str
    first: int  # its first token in the batch
    advantage: Tensor  # [its tokens] fp64
    share: float  # of each of its tokens in the loss
    trained: dict[int, str]  # the names of all of the update whose advantage is not 0, by number
    seen: int = 0  # tokens whose gradient was compared
    wrong: list[str] = field(default_factory=list[str])

    def watch(
        self,
        entries: Tensor,
        tokens: Tokens,
        algorithm: Algorithm,
        penalty: Callable[[Tensor, Tensor], Tensor | float],
        factor: Tensor,
        clipped: Tensor,
        scale: float,
    ) -> None:
        """Have the gradient of the loss of `entries` [n] compared where they are its own.

        penalty: what is added to the loss for (log-probabilities, which of the entries). factor [n]: of corrections
        and masks. scale: what the loss is multiplied by.
        """
        own = (entries >= self.first) & (entries < self.first + len(self.advantage))
        if not own.any():
            return
        logp, old, places = tokens.logp.detach()[own].requires_grad_(), tokens.old_logp[own], entries[own] - self.first
        sequence = None if tokens.sequence is None else tokens.sequence[own]
        rest = algorithm.loss(Tokens(logp, old, torch.zeros_like(old), sequence)).loss * factor[own]
        (gradient_of_rest,) = torch.autograd.grad((rest + penalty(logp, own)).sum(), logp)
        log_ratio = (logp.detach() - old).abs()
        log_ratio = log_ratio if sequence is None else log_ratio.maximum(sequence.abs())
        is_exact = ((log_ratio <= MAX_RATIO_1_NATS) & ~clipped[own]).cpu()
        expected = -self.advantage[places] * factor[own].double().cpu()

        def compare(gradient: Tensor) -> None:
            of_share = gradient[own].double().cpu() / scale / self.share
            self._compare(places, of_share - gradient_of_rest.double().cpu(), expected, is_exact)

        tokens.logp.register_hook(compare)

    def _compare(self, places: Tensor, derivative: Tensor, expected: Tensor, is_exact: Tensor) -> None:
        """The derivative at some of its tokens [n], without that of what is lost whatever the advantage."""
        self.seen += len(places)
        most = TOLERANCE * self.advantage.abs().max()
        fits = torch.where(is_exact, (derivative - expected).abs() <= most, derivative * expected >= -most.square())
        for place in (~fits).nonzero()[:1, 0].tolist():
            self.wrong.append(
                f"the loss has the derivative {derivative[place].item():.4g} by the log-probability of token "
                f"{int(places[place])} of {self.name}, in which its reward asks for {expected[place].item():.4g}"
            )

    def check(self, weights: Tensor, trajectories: Tensor) -> None:
        """Raise RunError where a gradient was wrong, or where there was none.

        weights [all tokens] fp64: the share of each. trajectories [n] int64: those of the tokens with a loss.
        """
        left_out = self.trained.keys() - set(trajectories.unique().tolist())
        self.wrong += [f"{self.trained[number]} is not trained" for number in sorted(left_out)]
        share = weights[self.first : self.first + len(self.advantage)]
        if not torch.allclose(share, torch.full_like(share, self.share), rtol=1e-9, atol=0.0):
            self.wrong.append(
                f"a token of {self.name} weighs {share[0].item():.6g} of the loss, and should weigh {self.share:.6g}"
            )
        if not self.seen:
            self.wrong.append(f"{self.name} has no gradient")
        if self.wrong:
            raise RunError(f"what is trained is not what the rewards ask for: {self.wrong[0]}")


def choose(
    evidence: GroupEvidence,
    learning: UpdateConfig,
    rewards: Rewards,
    values: Tensor | None,
    update: Sequence[int],
    seed: int,
) -> Witness | None:
    """One of the trajectories with the numbers `update`, whose advantage is not 0; None where there is none.

    Its advantage is by the plain formula with advantage=trajectory and a baseline of the group; by the other shipped
    estimators and algorithms it is computed again from the rewards of `evidence`.
    rewards, values: as the estimator got them. seed: decides which.
    """
    advantage, sampled = evidence.advantage, evidence.sampled
    if evidence.rewards is not None:
        fresh = replace(learning.advantage.weigh(evidence.rewards), per_token=rewards.per_token)
        advantage = advantages(learning.advantage, learning.algorithm, fresh, values).advantage
    assert advantage is not None, "of one of the two kinds"
    parts = advantage.split(sampled)
    update = [number for number in update if sampled[number]]
    trained = [n for n in update if rewards.trained[n] and parts[n].abs().max() > MIN_ADVANTAGE]
    if not trained:
        return None
    chosen = trained[seed % len(trained)]
    share, names = _share(learning, update, chosen, evidence), {n: evidence.names[n] for n in trained}
    return Witness(names[chosen], sum(sampled[:chosen]), parts[chosen], share, names) if share else None


def _plain(group: Group, algorithm: Algorithm, estimator: AdvantageEstimator) -> list[float]:
    """The advantage of each trajectory among its siblings."""
    returns: list[float] = []
    for t in group.trajectories:
        turns = sum(min(0.0, reward) if algorithm.penalises(t) else reward for reward in t.turn_rewards)
        returns.append(estimator.outcome_weight * algorithm.shaped_reward(t) + estimator.turn_weight * turns)
    if not isinstance(algorithm, GroupRelative):  # each is compared with the mean of the others
        others = [[*returns[:number], *returns[number + 1 :]] or returns for number in range(len(returns))]
        return [value - fmean(rest) for value, rest in zip(returns, others, strict=True)]
    mean, deviation = fmean(returns), stdev(returns) if len(returns) > 1 else 0.0
    return [(value - mean) / (deviation + algorithm.epsilon if algorithm.divide_by_std else 1.0) for value in returns]


def _share(learning: UpdateConfig, members: Sequence[int], chosen: int, evidence: GroupEvidence) -> float:
    """Of each token of `chosen` in the loss of `members`; 0 = not known."""
    average, group = learning.algorithm.average, evidence.group
    if average is Average.trajectory_mean:
        return 1 / (len(members) * evidence.sampled[chosen])
    if average is Average.prompt_mean:
        tokens = sum(evidence.sampled[number] for number in members if group[number] == group[chosen])
        return 1 / (len({group[number] for number in members}) * tokens)
    if average is Average.constant:
        return 1 / (len(members) * learning.length)
    return 1 / sum(evidence.sampled[number] for number in members) if average is Average.token_mean else 0.0


def _owner(part: Algorithm | AdvantageEstimator, method: str) -> type:
    """The class whose `method` a part has."""
    return next(kind for kind in type(part).__mro__ if method in vars(kind))
