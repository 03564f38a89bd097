"""The gradient with each advantage on average, against the exact one: every trajectory of a small problem enumerated.

Three tokens of a vocabulary of four, a policy with a free row of logits for each prefix, and a random reward for each
trajectory, or for each of its tokens.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.gae import GAE
from mtgrpo.advantages.return_to_go import ReturnToGo
from mtgrpo.advantages.rewards import Level, Rewards
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Algorithm, Tokens
from mtgrpo.algorithms.cispo import CISPO
from mtgrpo.algorithms.dr_grpo import DrGRPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.ppo import PPO
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.algorithms.rloo import RLOO

HORIZON, VOCABULARY, SIBLINGS, GROUPS = 3, 4, 4, 20_000
STATES = sum(VOCABULARY**depth for depth in range(HORIZON))
STANDARD_ERRORS = 3.0


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


LOGITS = torch.randn(STATES, VOCABULARY, generator=generator(), dtype=torch.float64)
EVERY = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=HORIZON)))


def states(tokens: Tensor) -> Tensor:
    """The row of logits before each token; [n, HORIZON] both."""
    number = torch.zeros(len(tokens), dtype=torch.long)
    found: list[Tensor] = []
    for depth in range(HORIZON):
        found.append(number + sum(VOCABULARY**d for d in range(depth)))
        number = number * VOCABULARY + tokens[:, depth]
    return torch.stack(found, dim=1)


def rewards_of_tokens() -> Tensor:
    """[trajectories, HORIZON]: a random number for each token after each prefix, whatever follows."""
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(STATES, VOCABULARY, generator=draw, dtype=torch.float64)
    return table[states(EVERY), EVERY]


PAID = rewards_of_tokens()


def exact(paid: Tensor) -> Tensor:
    """The gradient of the expected sum of `paid` [trajectories, HORIZON]."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)[states(EVERY), EVERY].sum(1)
    (gradient,) = torch.autograd.grad((logp.exp() * paid.sum(1)).sum(), logits)
    return gradient


def estimates(algorithm: Algorithm, estimator: AdvantageEstimator, per_token: bool) -> Tensor:
    """[GROUPS, STATES, VOCABULARY]: the sum over a group's tokens of -d loss, divided by the number of siblings."""
    draw = generator()
    probabilities = LOGITS.softmax(-1)
    tokens = torch.zeros(GROUPS * SIBLINGS, 0, dtype=torch.long)
    for _ in range(HORIZON):
        padded = torch.cat([tokens, torch.zeros(len(tokens), HORIZON - tokens.shape[1], dtype=torch.long)], dim=1)
        rows = probabilities[states(padded)[:, tokens.shape[1]]]
        tokens = torch.cat([tokens, torch.multinomial(rows, 1, generator=draw)], dim=1)
    number = (tokens * torch.tensor([VOCABULARY**d for d in reversed(range(HORIZON))])).sum(1)
    paid, trajectories = PAID[number], len(tokens)
    steps = torch.arange(trajectories).repeat_interleave(HORIZON)
    rewards = Rewards(
        outcome=torch.zeros(trajectories, dtype=torch.float64) if per_token else paid.sum(1),
        group=torch.arange(trajectories) // SIBLINGS,
        trained=torch.ones(trajectories, dtype=torch.bool),
        per_turn=paid.flatten() if per_token else torch.zeros(len(steps), dtype=torch.float64),  # a token is a turn
        trajectory=steps,
        position=torch.arange(HORIZON).repeat(trajectories),
        anchor=steps,
        per_token=torch.zeros(len(steps), dtype=torch.float64),
        turn=torch.arange(len(steps)),
    )
    values = torch.zeros(len(steps), dtype=torch.float64) if algorithm.has_critic else None
    advantage = algorithm.normalise(estimator.assign(rewards, algorithm, values).advantage)
    where, chosen = states(tokens).flatten(), tokens.flatten()
    logp = LOGITS.log_softmax(-1)[where, chosen].requires_grad_()
    algorithm.loss(Tokens(logp, logp.detach(), advantage)).loss.sum().backward()
    assert logp.grad is not None
    scores = torch.nn.functional.one_hot(chosen, VOCABULARY) - probabilities[where]
    found = torch.zeros(GROUPS * STATES, VOCABULARY, dtype=torch.float64)
    group = torch.arange(GROUPS).repeat_interleave(SIBLINGS * HORIZON)
    found.index_add_(0, group * STATES + where, -logp.grad[:, None] * scores)
    return found.view(GROUPS, STATES, VOCABULARY) / SIBLINGS


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """How far the mean is off, in standard errors, for each logit."""
    deviation = found.std(0) / GROUPS**0.5
    return (found.mean(0) - expected).abs() / deviation.clamp(min=1e-12)


def typical(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the errors: about 1 where the estimate is unbiased, however many logits there are."""
    return errors(found, expected).square().mean().sqrt().item()


OTHERS = (SIBLINGS - 1) / SIBLINGS  # a mean that contains the trajectory itself takes that much of the gradient away


@pytest.mark.parametrize(
    ("algorithm", "estimator", "per_token", "share"),
    [
        (RLOO(), WholeTrajectory(), False, 1.0),
        (RLOO(), WholeTrajectory(), True, 1.0),
        (RLOO(), ReturnToGo(), True, 1.0),
        (DrGRPO(), WholeTrajectory(), False, OTHERS),
        (GRPO(divide_by_std=False), WholeTrajectory(), False, OTHERS),
        (CISPO(divide_by_std=False), WholeTrajectory(), False, OTHERS),
        (DrGRPO(), ReturnToGo(), True, OTHERS),
        (DrGRPO(), GAE(gamma=1.0, lam=1.0), True, OTHERS),
        (PPO(whiten=False), GAE(gamma=1.0, lam=1.0), True, 1.0),
        (PPO(whiten=False), GAE(level=Level.token), True, 1.0),
        (PPO(whiten=False, group_baseline=True), GAE(gamma=1.0, lam=1.0), True, OTHERS),
        (PPO(whiten=False, group_baseline=True), GAE(level=Level.token), False, OTHERS),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool | float) else str(value),
)
def test_exact_gradient(algorithm: Algorithm, estimator: AdvantageEstimator, per_token: bool, share: float) -> None:
    found, expected = estimates(algorithm, estimator, per_token), exact(PAID) * share
    assert typical(found, expected) < 1.5
    assert (found.mean(0) * expected).sum() / expected.square().sum() == pytest.approx(1, abs=0.05)
    whole = (found.mean(0) - expected).norm() / (found.std(0).square().sum() / GROUPS).sqrt()
    assert whole < STANDARD_ERRORS


def test_exact_gradient_dividing_by_the_deviation_is_biased() -> None:
    """Not only in scale: no multiple of the exact gradient is what GRPO finds on average."""
    found, expected = estimates(GRPO(), WholeTrajectory(), per_token=False), exact(PAID)
    scale = (found.mean(0) * expected).sum() / expected.square().sum()
    assert typical(found, scale * expected) > STANDARD_ERRORS


def test_exact_gradient_whitening_changes_the_scale_alone() -> None:
    found, expected = estimates(ReinforcePP(), WholeTrajectory(), per_token=False), exact(PAID)
    scale = (found.mean(0) * expected).sum() / expected.square().sum()
    assert scale > 0
    assert typical(found, scale * expected) < 1.5
