"""advantage=turn where the policy decides when to stop: its mean gradient, every group of a small problem enumerated.

Each turn is one action: two that go on, and one that ends the conversation; the last turn ends it in any case. Every
state has its own logits, every action its own random reward, every conversation a random outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.advantages.turn import ByTurn
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.rloo import RLOO

ACTIONS, STOP, SIBLINGS = 3, 2, 3
Path = tuple[int, ...]


def paths(turns: int, begun: Path = ()) -> Iterator[Path]:
    """Every conversation of at most so many turns."""
    for action in range(ACTIONS):
        path = (*begun, action)
        if action == STOP or len(path) == turns:
            yield path
        else:
            yield from paths(turns, path)


class Problem:
    """A tree of conversations, what each pays, and the policy's logits [states, ACTIONS]."""

    def __init__(self, turns: int, seed: int, last_turn_rewarded: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.paths = list(paths(turns))
        before = [[path[:k] for k in range(len(path))] for path in self.paths]
        number = {state: i for i, state in enumerate(dict.fromkeys(itertools.chain(*before)))}
        self.states = [torch.tensor([number[state] for state in states]) for states in before]
        self.actions = [torch.tensor(path) for path in self.paths]
        self.logits = torch.randn(len(number), ACTIONS, generator=generator, dtype=torch.float64)
        table = torch.rand(len(number), ACTIONS, generator=generator, dtype=torch.float64)
        self.reward = [table[states, actions] for states, actions in zip(self.states, self.actions, strict=True)]
        for reward in self.reward:
            reward[-1] *= last_turn_rewarded
        self.outcome = torch.rand(len(self.paths), generator=generator, dtype=torch.float64)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of each conversation."""
        logp = logits.log_softmax(-1)
        each = [logp[states, actions].sum() for states, actions in zip(self.states, self.actions, strict=True)]
        return torch.stack(each).exp()

    def gradient(self, reward: Tensor) -> Tensor:
        """Of the expectation of `reward` [conversations]."""
        logits = self.logits.clone().requires_grad_()
        return torch.autograd.grad((self.probabilities(logits) * reward).sum(), logits)[0]

    def total(self) -> Tensor:
        """Outcome and rewards of turns of each conversation."""
        return self.outcome + torch.stack([reward.sum() for reward in self.reward])

    def estimate(
        self,
        estimator: AdvantageEstimator,
        algorithm: Algorithm,
        logits: Tensor | None = None,
        siblings: int = SIBLINGS,
    ) -> Tensor:
        """What the advantages make of the gradient on average: the mean over every group of siblings, by its weight."""
        logits = self.logits if logits is None else logits
        groups = torch.tensor(list(itertools.product(range(len(self.paths)), repeat=siblings)))
        weight = self.probabilities(logits)[groups].prod(1)
        sampled = groups.flatten().tolist()
        counts = torch.tensor([len(self.paths[i]) for i in sampled])
        turns = torch.arange(int(counts.sum()))
        trajectory = torch.arange(len(sampled)).repeat_interleave(counts)
        rewards = Rewards(
            outcome=self.outcome[groups.flatten()],
            group=torch.arange(len(groups)).repeat_interleave(siblings),
            trained=torch.ones(len(sampled), dtype=torch.bool),
            per_turn=torch.cat([self.reward[i] for i in sampled]),
            trajectory=trajectory,
            position=turns - (counts.cumsum(0) - counts)[trajectory],
            anchor=turns,
            per_token=torch.zeros(len(turns), dtype=torch.float64),
            turn=turns,
        )
        advantage = estimator.assign(estimator.weigh(rewards), algorithm).advantage
        states, actions = (torch.cat([table[i] for i in sampled]) for table in (self.states, self.actions))
        score = torch.nn.functional.one_hot(actions, ACTIONS) - logits.softmax(-1)[states]
        share = advantage * weight[rewards.group[trajectory]] / siblings
        return torch.zeros_like(logits).index_add(0, states, share[:, None] * score)


def cosine(found: Tensor, expected: Tensor) -> float:
    return float((found * expected).sum() / found.norm() / expected.norm())


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


PROBLEMS = [Problem(turns, seed, last) for turns in (2, 3) for seed in range(4) for last in (False, True)]
PAPER = ByTurn(unbiased=False)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_gradient_is_unbiased_whenever_conversations_stop(problem: Problem) -> None:
    """A mean that contains the trajectory itself takes the same share of the gradient away everywhere."""
    exact = problem.gradient(problem.total())
    assert error(problem.estimate(ByTurn(), RLOO()), exact) < 1e-9
    within = problem.estimate(ByTurn(), GRPO(divide_by_std=False)) * SIBLINGS / (SIBLINGS - 1)
    assert error(within, exact) < 1e-9
    halved = problem.gradient(problem.outcome + 0.5 * (problem.total() - problem.outcome))
    assert error(problem.estimate(ByTurn(turn_coef=0.5), RLOO()), halved) < 1e-9
    assert cosine(problem.estimate(ByTurn(), GRPO()), exact) > 0.96  # the deviation is divided by: another scale


def test_the_form_of_the_paper_is_biased_where_conversations_differ_in_length() -> None:
    """Cosine and relative error of its gradient on average against the exact one."""
    found: dict[int, list[tuple[float, float]]] = {2: [], 3: []}
    for problem in PROBLEMS[::2]:  # those whose last turn is not rewarded, as the paper has it
        estimate, exact = problem.estimate(PAPER, RLOO()), problem.gradient(problem.total())
        found[max(map(len, problem.paths))].append((cosine(estimate, exact), error(estimate, exact)))
    assert found[2] == [
        pytest.approx(pair, abs=1e-3) for pair in [(0.997, 0.079), (0.997, 0.283), (0.984, 0.224), (0.969, 0.355)]
    ]
    assert found[3] == [
        pytest.approx(pair, abs=1e-3) for pair in [(0.810, 0.759), (0.954, 0.614), (0.181, 1.010), (0.409, 0.915)]
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_bias_of_the_paper_over_two_turns_is_a_bonus_for_stopping(seed: int) -> None:
    """Of the mean reward of the first turn: it is subtracted where the conversation goes on, and only there."""
    problem = Problem(2, seed, last_turn_rewarded=False)
    first = torch.stack([reward[0] for reward in problem.reward])
    stops = torch.tensor([len(path) == 1 for path in problem.paths]).double()
    bonus = (problem.probabilities(problem.logits) * first).sum() * problem.gradient(stops)
    bias = problem.estimate(PAPER, RLOO()) - problem.gradient(problem.total())
    assert torch.allclose(bias, bonus, rtol=0, atol=1e-12)
    assert bonus.norm() > 0.01


def test_what_following_each_form_leads_to() -> None:
    """With the default algorithm, on a problem whose best conversation pays 1.648."""
    problem, reached = Problem(3, 1, last_turn_rewarded=False), {}
    for name, estimator in (("unbiased", ByTurn()), ("paper", PAPER)):
        logits = problem.logits.clone()
        for _ in range(40):
            logits += 4 * problem.estimate(estimator, GRPO(), logits, siblings=2)
        reached[name] = float((problem.probabilities(logits) * problem.total()).sum())
    assert problem.total().max().item() == pytest.approx(1.648, abs=1e-3)
    assert reached["unbiased"] > 1.6
    assert reached["paper"] < 1.1
