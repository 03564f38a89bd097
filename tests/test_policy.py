"""The update: its gradient is the one the formulas say, however the batch is stored, cut or ordered."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mtgrpo.advantages.rewards import Rewards
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Baseline, PerToken, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.model import scorer
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.logprobs import sampled_logprobs
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.optimizer import Kind, Optimizer, OptimizerSettings, Schedule, factor, note_of_lr
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy, TokenLoss, at_once
from mtgrpo.policy.updater import PolicyUpdater, ReferencePolicy, UpdateConfig, Updates
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn
from mtgrpo.weights.checkpoint import flatten, unflatten

TASK = Task("test/0", (Message("user", "?"),))
TEMPERATURE = 0.7
ONE_MICRO_BATCH = 10**9


def make_model(dtype: DType = DType.float64, seed: int = 0) -> PreTrainedModel:
    model = load_model(ModelSettings("tiny", dtype), seed)
    with torch.no_grad():  # a fresh model is nearly uniform: sharper, so that ratios and entropies differ by token
        model.get_input_embeddings().weight.mul_(6)
    return model


def make_trajectory(seed: int, turns: int) -> Trajectory:
    rng = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(20, 1000) for _ in range(rng.randint(least, most))]

    trajectory = Trajectory(TASK)
    for number in range(turns):
        output = tokens(1, 6)
        logprobs = [-rng.random() for _ in output]
        turn = Turn(tokens(2, 9), output, logprobs, [0] * len(output), Finish.STOP, Message("assistant"), number - 1)
        trajectory.turns.append(turn)
    return trajectory


PLAYED = [make_trajectory(seed, turns) for seed, turns in enumerate([1, 4, 2, 3])]
ADVANTAGE = torch.tensor([1.0, -0.5, 0.0, 2.0])
ALL = torch.ones(4, dtype=torch.bool)
LONGEST = max(len(t.context(i)) + len(turn.output) - 1 for t in PLAYED for i, turn in enumerate(t.turns))


class Descent:
    """Stands in for the optimiser: plain gradient descent that keeps every gradient it was given."""

    scale = 1.0

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        self.lr = lr
        self.gradients: list[dict[str, Tensor]] = []
        self._model = model

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    @torch.no_grad()
    def step(self) -> float:
        gradient: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            gradient[name] = parameter.grad
            parameter -= self.lr * parameter.grad
            parameter.grad = None
        self.gradients.append(gradient)
        return 1.0


class Watched(Policy):
    """Keeps what every optimiser step was asked to do, and its metrics."""

    def __init__(self, model: PreTrainedModel, lr: float = 0.0, token_budget: int = ONE_MICRO_BATCH) -> None:
        self.descent = Descent(model, lr)
        super().__init__(model, self.descent, token_budget, TEMPERATURE)  # type: ignore[arg-type]
        self.steps: list[tuple[Tensor, Tensor]] = []
        self.metrics: list[Metrics] = []

    def updating(
        self, batch: Batch, entries: Tensor, weights: Tensor, loss: TokenLoss, *rest: Any
    ) -> CooperativeTask[Metrics]:
        self.steps.append((entries, weights))
        self.metrics.append((yield from super().updating(batch, entries, weights, loss, *rest)))
        return self.metrics[-1]


@dataclass
class Given(GRPO):
    """GRPO whose advantages are the rewards themselves."""

    def baseline(self, returns: Tensor, group: Tensor) -> Baseline:
        return Baseline(torch.zeros_like(returns), torch.ones_like(returns))


@dataclass
class Recording(Given):
    """Keeps what its loss is given."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def loss(self, tokens: Tokens) -> PerToken:
        self.seen.append((tokens.logp.detach().clone(), tokens.old_logp.clone()))
        return super().loss(tokens)


def train(
    policy: Policy,
    played: Sequence[Trajectory] = PLAYED,
    advantage: Tensor = ADVANTAGE,
    trained: Tensor = ALL,
    algorithm: GRPO | None = None,
    kl: KL | None = None,
    reference: ReferencePolicy | None = None,
    updates: Updates | None = None,
    seed: int = 0,
) -> Metrics:
    learning = UpdateConfig(algorithm or Given(), WholeTrajectory(), kl or KL(), updates=updates or Updates(), length=7)
    batch = build_batch(played)
    rewards = replace(paid(played, advantage, batch), trained=trained)
    return at_once(PolicyUpdater(policy, learning, reference).training(batch, rewards, version=0, seed=seed))


def paid(played: Sequence[Trajectory], outcome: Tensor, batch: Batch) -> Rewards:
    """Outcomes alone, all in one group."""
    counts = torch.tensor([len(t.turns) for t in played])
    turns = int(counts.sum())
    return Rewards(
        outcome=outcome.double(),
        group=torch.zeros(len(played), dtype=torch.long),
        trained=torch.ones(len(played), dtype=torch.bool),
        per_turn=torch.zeros(turns, dtype=torch.float64),
        trajectory=torch.arange(len(played)).repeat_interleave(counts),
        position=torch.cat([torch.arange(int(count)) for count in counts]),
        anchor=torch.arange(turns),
        per_token=torch.zeros(len(batch), dtype=torch.float64),
        turn=(counts.cumsum(0) - counts)[batch.trajectory] + batch.turn,
    )


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def plain_logprobs(model: PreTrainedModel, trajectory: Trajectory) -> Iterator[Tensor]:
    """Of each turn's output, from transformers' own forward over that turn's whole context and nothing else."""
    for number, turn in enumerate(trajectory.turns):
        context = trajectory.context(number)
        ids = torch.tensor([context + turn.output], device=model.device)
        logprobs = (model(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
        yield torch.stack([logprobs[len(context) + i - 1, token] for i, token in enumerate(turn.output)])


def reinforce_gradient(
    model: PreTrainedModel, weight_of: Callable[[int], float], advantage: Tensor = ADVANTAGE
) -> dict[str, Tensor]:
    """Of - sum over trajectories of weight * advantage * sum of log-probabilities, by plain autograd."""
    loss = torch.zeros((), dtype=torch.float64, device=model.device)
    for index, trajectory in enumerate(PLAYED):
        total = torch.cat(list(plain_logprobs(model, trajectory))).sum()
        loss = loss - weight_of(index) * advantage[index].item() * total
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def size(trajectory: Trajectory) -> int:
    return sum(len(turn.output) for turn in trajectory.turns)


ALL_TOKENS = sum(map(size, PLAYED))


# --- the gradient ---


@pytest.mark.parametrize("average", Average)
def test_the_gradient_at_ratio_one_is_that_of_reinforce(average: Average) -> None:
    policy = Watched(make_model())
    train(policy, algorithm=Given(average=average))

    def weight_of(index: int) -> float:
        return {
            Average.token_mean: 1 / ALL_TOKENS,
            Average.trajectory_mean: 1 / (len(PLAYED) * size(PLAYED[index])),
            Average.prompt_mean: 1 / ALL_TOKENS,  # there is one group
            Average.constant: 1 / (len(PLAYED) * 7),
            Average.sequence_mean: 1 / (len(PLAYED) * size(PLAYED[index])),  # each is one segment
        }[average]

    expected = reinforce_gradient(policy.model, weight_of)
    assert largest_difference(policy.descent.gradients[0], expected) < 1e-10
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-2


def test_loss_and_entropy_are_averages_over_the_sampled_tokens() -> None:
    policy = Watched(make_model())
    metrics = train(policy, advantage=torch.tensor([1.0, -0.5, 0.25, 2.0]))
    sizes = [size(trajectory) for trajectory in PLAYED]
    expected = -(sizes[0] - 0.5 * sizes[1] + 0.25 * sizes[2] + 2 * sizes[3]) / ALL_TOKENS
    assert metrics["loss"] == pytest.approx(expected, abs=1e-12)
    entropies: list[float] = []
    for trajectory in PLAYED:
        for number, turn in enumerate(trajectory.turns):
            context = trajectory.context(number)
            ids = torch.tensor([context + turn.output], device=policy.model.device)
            probabilities = (policy.model(input_ids=ids).logits[0] / TEMPERATURE).softmax(-1)
            here = -(probabilities * probabilities.log()).sum(-1)
            entropies += here[len(context) - 1 : -1].tolist()
    assert metrics["entropy"] == pytest.approx(sum(entropies) / ALL_TOKENS, abs=1e-10)
    assert (metrics["trained_tokens"], metrics["updates"]) == (ALL_TOKENS, 1)


def stored_with(trajectory: Trajectory, breaks: set[int]) -> Trajectory:
    """The same turns in other segments: one begins at every turn of `breaks`."""
    turns = [
        replace(turn, new_context=trajectory.context(number), parent=-1) if number in breaks else turn
        for number, turn in enumerate(trajectory.turns)
    ]
    return replace(trajectory, turns=turns)


def gradients(
    played: Sequence[Trajectory] = PLAYED,
    advantage: Tensor = ADVANTAGE,
    average: Average = Average.token_mean,
    token_budget: int = ONE_MICRO_BATCH,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of three descents with a KL penalty: the ratio is 1 in the first alone."""
    policy = Watched(copy.deepcopy(MODEL), lr=5e-4, token_budget=token_budget)
    algorithm = Given(average=average)
    train(policy, played, advantage, algorithm=algorithm, kl=KL(0.1), reference=REFERENCE, updates=Updates(0, 3))
    return [metrics["loss"] for metrics in policy.metrics], policy.descent.gradients


def near(model: PreTrainedModel) -> PreTrainedModel:
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return found


MODEL = make_model()
OTHER = near(MODEL)
REFERENCE = ReferencePolicy(OTHER)


@functools.cache
def expected_gradients(average: Average) -> tuple[list[float], list[dict[str, Tensor]]]:
    return gradients(average=average)


def assert_the_same(found: tuple[list[float], list[dict[str, Tensor]]], average: Average) -> None:
    losses, steps = expected_gradients(average)
    assert found[0] == pytest.approx(losses, abs=1e-10)
    for step, expected in zip(found[1], steps, strict=True):
        assert largest_difference(step, expected) < 1e-10


def test_the_invariances_are_tested_off_policy_and_with_clipping() -> None:
    policy = Watched(copy.deepcopy(MODEL), lr=5e-4)
    train(policy, kl=KL(0.1), reference=REFERENCE, updates=Updates(0, 3))
    assert policy.metrics[0]["clip_fraction"] == 0
    assert 0 < policy.metrics[2]["clip_fraction"] < 1
    losses, _ = expected_gradients(Average.token_mean)
    assert abs(losses[0] - losses[2]) > 0.01
    assert expected_gradients(Average.trajectory_mean)[0] != pytest.approx(losses, abs=0.01)


@pytest.mark.parametrize("average", [average for average in Average if average is not Average.sequence_mean])
@pytest.mark.parametrize("breaks", [{1}, {2, 3}, {1, 2, 3}])
def test_segments_change_neither_loss_nor_gradient(average: Average, breaks: set[int]) -> None:
    stored = [stored_with(trajectory, breaks) for trajectory in PLAYED]
    assert sum(t.segments for t in stored) > sum(t.segments for t in PLAYED)
    assert_the_same(gradients(stored, average=average), average)


@pytest.mark.parametrize("average", Average)
@pytest.mark.parametrize("token_budget", [LONGEST, 50])
def test_the_micro_batch_cut_changes_neither_loss_nor_gradient(average: Average, token_budget: int) -> None:
    assert_the_same(gradients(average=average, token_budget=token_budget), average)


def test_a_shared_token_receives_the_weight_of_each_trajectory_also_when_clipped() -> None:
    """Siblings that sampled the same tokens, with other advantages and other old log-probabilities."""
    first = make_trajectory(9, 2)
    cut = replace(first.turns[1], output=first.turns[1].output[:1], logprobs=first.turns[1].logprobs[:1], versions=[0])
    played = [first, replace(first), Trajectory(TASK, turns=[first.turns[0], cut]), make_trajectory(3, 1)]
    batch = build_batch(played)
    assert len(batch.node.unique()) < len(batch)
    policy = Watched(make_model())
    plain = torch.cat([logp for trajectory in played for logp in plain_logprobs(policy.model, trajectory)])
    generator = torch.Generator().manual_seed(0)
    old = plain.detach() + 0.3 * torch.randn(len(batch), generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.5, -1.0, 0.7, -0.4], dtype=torch.float64)[batch.trajectory]
    weights = torch.rand(len(batch), generator=generator, dtype=torch.float64)
    expected = GRPO().loss(Tokens(plain, old, advantage))
    assert 0 < expected.clipped.sum() < len(batch)
    names, parameters = zip(*policy.model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad((expected.loss * weights).sum(), parameters), strict=True))
    entries = torch.arange(len(batch))
    metrics = at_once(
        policy.updating(
            batch,
            entries,
            weights,
            lambda chosen, scores: GRPO().loss(Tokens(scores.logp, old[chosen], advantage[chosen])),
        )
    )
    assert largest_difference(policy.descent.gradients[0], gradient) < 1e-10
    clipped = (expected.clipped * weights).sum() / weights.sum()
    assert metrics["clip_fraction"] == pytest.approx(clipped.item(), abs=1e-12)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_log_probabilities_that_are_not_finite_stop_the_update(broken: float) -> None:
    policy = Watched(make_model())
    with torch.no_grad():
        policy.model.model.norm.weight[0] = broken
    with pytest.raises(RuntimeError, match=r"sampled tokens is not finite, the first that of token \d+ with nan"):
        train(policy)
    assert not policy.descent.gradients


@pytest.mark.parametrize("average", Average)
def test_the_order_of_trajectories_changes_neither_loss_nor_gradient(average: Average) -> None:
    order = [2, 0, 3, 1]
    assert_the_same(gradients([PLAYED[i] for i in order], ADVANTAGE[order], average), average)


@pytest.mark.parametrize("trained", [ALL, torch.tensor([True, False, True, True])])
def test_tokens_without_a_loss_stay_in_the_normaliser(trained: Tensor) -> None:
    policy = Watched(make_model())
    metrics = train(policy, trained=trained)  # the third trajectory has advantage 0
    expected = reinforce_gradient(policy.model, lambda _: 1 / ALL_TOKENS, ADVANTAGE * trained)
    assert largest_difference(policy.descent.gradients[0], expected) < 1e-10
    computed = [index for index in range(4) if ADVANTAGE[index] and trained[index]]
    entries, weights = policy.steps[0]
    assert set(build_batch(PLAYED).trajectory[entries].tolist()) == set(computed)
    assert metrics["trained_tokens"] == sum(size(PLAYED[index]) for index in computed)
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)


def test_only_sampled_tokens_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Watched(make_model())
    train(policy)  # the checks of a first batch predict others
    predicted: list[int] = []

    def watch(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        predicted.append(len(hidden))
        return sampled_logprobs(hidden, *rest)

    monkeypatch.setattr(scorer, "sampled_logprobs", watch)
    algorithm = Recording()
    train(policy, advantage=torch.ones(4), algorithm=algorithm)
    assert predicted == [ALL_TOKENS]  # the head never sees another place
    with torch.no_grad():
        expected = torch.cat([logp for trajectory in PLAYED for logp in plain_logprobs(policy.model, trajectory)])
    assert torch.allclose(algorithm.seen[0][0], expected, rtol=0, atol=1e-10)


def test_what_the_engine_reported_is_compared_and_never_trained_on() -> None:
    first, second = Watched(make_model()), Watched(make_model())
    with torch.no_grad():
        true = [[logp.tolist() for logp in plain_logprobs(first.model, trajectory)] for trajectory in PLAYED]

    def reported(offset: float) -> list[Trajectory]:
        return [
            replace(
                trajectory,
                turns=[
                    replace(turn, logprobs=[value + offset for value in values])
                    for turn, values in zip(trajectory.turns, logprobs, strict=True)
                ],
            )
            for trajectory, logprobs in zip(PLAYED, true, strict=True)
        ]

    honest, wrong = train(first, reported(0)), train(second, reported(0.5))
    assert honest["mismatch/max_abs_dlogp"] < 1e-10
    assert honest["mismatch/kl"] == pytest.approx(0, abs=1e-12)
    assert wrong["mismatch/max_abs_dlogp"] == pytest.approx(0.5, abs=1e-10)
    assert wrong["mismatch/kl"] == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-10)
    assert largest_difference(first.descent.gradients[0], second.descent.gradients[0]) == 0


# --- several updates ---


def test_a_single_update_has_ratio_exactly_one_in_any_precision() -> None:
    for dtype in DType:
        algorithm, policy = Recording(), Watched(make_model(dtype), token_budget=60)
        metrics = train(policy, algorithm=algorithm)
        assert len(algorithm.seen) > 1
        assert all(torch.equal(logp, old) for logp, old in algorithm.seen)
        assert metrics["clip_fraction"] == 0


def test_old_logprobs_are_those_before_the_first_update() -> None:
    algorithm, policy = Recording(), Watched(make_model(), lr=5e-4)
    with torch.no_grad():
        logprobs = [torch.cat(list(plain_logprobs(policy.model, trajectory))) for trajectory in PLAYED]
    train(policy, algorithm=algorithm, updates=Updates(0, 3))
    expected = torch.cat([logprobs[index] for index in (0, 1, 3)])
    for _, old in algorithm.seen:
        assert torch.allclose(old, expected, rtol=0, atol=1e-10)
        assert torch.equal(old, algorithm.seen[0][1])
    moved = [(logp - old).abs().max().item() for logp, old in algorithm.seen]
    assert moved[0] < 1e-10
    assert min(moved[1:]) > 0.01
    assert policy.metrics[0]["clip_fraction"] == 0
    assert policy.metrics[2]["clip_fraction"] > 0


def test_later_minibatches_of_the_first_pass_are_already_off_policy() -> None:
    policy = Watched(make_model(), lr=0.2)
    metrics = train(policy, advantage=torch.tensor([1.0, -0.5, 0.25, 2.0]), updates=Updates(1, 1))
    fractions = [step["clip_fraction"] for step in policy.metrics]
    assert metrics["updates"] == len(fractions) == 4
    assert fractions[0] == 0
    assert max(fractions[1:]) > 0
    assert metrics["clip_fraction"] == pytest.approx(sum(fractions) / 4)


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 1000))
def test_every_pass_takes_every_trajectory_once(minibatch: int, passes: int, seed: int) -> None:
    steps = minibatches(Updates(minibatch, passes), seed)
    per_pass = math.ceil(4 / minibatch)
    assert len(steps) == per_pass * passes
    for first in range(0, len(steps), per_pass):
        assert sorted(i for step in steps[first : first + per_pass] for i in step) == [0, 1, 2, 3]
    assert steps == minibatches(Updates(minibatch, passes), seed)


def test_the_order_of_minibatches_differs_by_pass_and_seed() -> None:
    orders = [minibatches(Updates(1, 6), seed) for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert len({str(orders[0][first : first + 4]) for first in range(0, 24, 4)}) > 1


def minibatches(updates: Updates, seed: int) -> list[list[int]]:
    """Which trajectories each optimiser step took, seen from its weights, which must sum to 1."""

    class Idle(Policy):
        def __init__(self) -> None:
            self.steps: list[list[int]] = []

        def scoring(
            self, batch: Batch, entries: Tensor, weights: dict[str, Tensor] | None = None
        ) -> CooperativeTask[Scores]:
            yield
            return Scores(*torch.zeros(2, len(batch), dtype=torch.float64))

        def updating(
            self, batch: Batch, entries: Tensor, weights: Tensor, loss: TokenLoss, *_: Any
        ) -> CooperativeTask[Metrics]:
            assert weights.sum().item() == pytest.approx(1, abs=1e-12)
            assert torch.equal(entries, weights.nonzero()[:, 0])
            self.steps.append(sorted(set(batch.trajectory[entries].tolist())))
            yield
            return {"clip_fraction": 0.0}

    policy = Idle()
    train(policy, advantage=torch.ones(4), updates=updates, seed=seed)
    return policy.steps


def test_a_batch_without_signal_changes_nothing() -> None:
    policy = Watched(make_model(), lr=1.0)
    assert train(policy, advantage=torch.zeros(4)) == {"updates": 0, "trained_tokens": 0}
    assert policy.metrics == []


def test_trajectories_without_a_token_are_harmless() -> None:
    """A conversation whose opening fills the context is cut before its first turn."""
    silent = Trajectory(TASK)
    policy = Watched(make_model())
    train(policy, [silent, *PLAYED], torch.tensor([-1.0, *ADVANTAGE.tolist()]), torch.ones(5, dtype=torch.bool))
    expected = reinforce_gradient(policy.model, lambda _: 1 / ALL_TOKENS)
    assert largest_difference(policy.descent.gradients[0], expected) < 1e-10
    one_each = train(
        policy, [silent, PLAYED[0]], torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), updates=Updates(1, 1)
    )
    assert one_each["updates"] == 1
    alone = train(policy, [silent], torch.tensor([-1.0]), torch.ones(1, dtype=torch.bool))
    assert alone == {"updates": 0, "trained_tokens": 0}


def test_a_forward_pass_that_is_not_reproducible_is_noticed() -> None:
    policy = Watched(make_model())
    calls = 0

    def disturb(_module: nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return hidden * (2 if calls > 1 else 1)  # after the first of two passes

    train(policy)  # the checks of a first batch have passes too
    policy.model.model.norm.register_forward_hook(disturb)
    with pytest.raises(RuntimeError, match="not reproducible"):
        train(policy, updates=Updates(0, 2))


@pytest.mark.parametrize("bad", [{"minibatch_trajectories": -1}, {"updates_per_batch": 0}])
def test_impossible_updates_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Updates(**bad)


# --- the reference ---


@pytest.mark.parametrize("dtype", DType)
def test_the_reference_does_not_follow_the_policy(dtype: DType) -> None:
    policy = Watched(make_model(dtype), lr=0.05)
    reference = ReferencePolicy(policy.model)
    assert not any(weight.requires_grad for weight in reference.weights.values())
    batch = build_batch(PLAYED)
    entries = torch.arange(len(batch))
    before = at_once(policy.scoring(batch, entries)).logp
    assert torch.equal(at_once(policy.scoring(batch, entries, reference.weights)).logp, before)
    metrics = [train(policy, kl=KL(0.01), reference=reference) for _ in range(2)]
    assert torch.equal(at_once(policy.scoring(batch, entries, reference.weights)).logp, before)
    assert not torch.equal(at_once(policy.scoring(batch, entries)).logp, before)
    assert metrics[0]["kl"] == 0
    assert abs(metrics[1]["kl"]) > 1e-4


def test_the_reference_of_a_wholly_trained_model_shares_nothing() -> None:
    model = make_model()
    reference = ReferencePolicy(model)
    kept = {weight.data_ptr() for weight in model.parameters()}
    copied = {weight.data_ptr() for weight in reference.weights.values()}
    assert len(copied) == len(kept)
    assert copied.isdisjoint(kept)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("estimator", [Estimator.k2, Estimator.k3])
def test_the_penalty_pulls_towards_the_reference(estimator: Estimator) -> None:
    policy = Watched(make_model(), lr=1e-3)
    reference = ReferencePolicy(policy.model)
    train(policy, updates=Updates(0, 3))  # away
    kl = KL(1.0, estimator)
    batch = build_batch(PLAYED)
    everything = torch.arange(len(batch))
    found: list[float] = []
    for _ in range(6):
        distance = (
            at_once(policy.scoring(batch, everything)).logp
            - at_once(policy.scoring(batch, everything, reference.weights)).logp
        )
        found.append(distance.square().mean().item())
        train(policy, advantage=torch.zeros(4), kl=kl, reference=reference)
    assert found[0] > 0.01
    assert all(later < earlier for earlier, later in itertools.pairwise(found))
    assert found[-1] < found[0] / 2


def test_the_penalty_is_added_to_the_loss_token_by_token() -> None:
    policy = Watched(make_model())
    metrics = train(policy, kl=KL(0.3, Estimator.k2), reference=REFERENCE)
    with torch.no_grad():
        logp, ref = (
            torch.cat([logp for trajectory in PLAYED for logp in plain_logprobs(model, trajectory)])
            for model in (policy.model, OTHER)
        )
    penalty = ((logp - ref).square() / 2).mean().item()
    kl = (logp - ref).mean().item()  # measured by k1, whatever the penalty is
    sizes = [size(trajectory) for trajectory in PLAYED]
    surrogate = -(sizes[0] - 0.5 * sizes[1] + 2 * sizes[3]) / ALL_TOKENS
    assert metrics["kl"] == pytest.approx(kl, abs=1e-10)
    assert metrics["loss"] == pytest.approx(surrogate + 0.3 * penalty, abs=1e-6)  # 0.3 times, not the mean of something
    assert metrics["trained_tokens"] == ALL_TOKENS  # also the tokens whose advantage is 0


# --- the optimiser ---


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (Schedule.linear, [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]),
        (Schedule.wsd, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    ],
)
def test_schedules(schedule: Schedule, expected: list[float]) -> None:
    chosen = OptimizerSettings(schedule=schedule, warmup_steps=2)
    assert [factor(chosen, step, 12) for step in range(13)] == pytest.approx(expected)


def test_the_cosine_schedule() -> None:
    chosen = OptimizerSettings(schedule=Schedule.cosine, warmup_steps=1)
    found = [factor(chosen, step, 13) for step in (0, 1, 3, 5, 7, 9, 13, 20)]
    root = math.sqrt(3)
    assert found == pytest.approx([1, 1, (2 + root) / 4, 0.75, 0.5, 0.25, 0, 0])  # at 0, 30, 60, 90, 120, 180 degrees


def step_with(optimizer: Optimizer, model: PreTrainedModel, seed: int, scale: float = 1.0) -> float:
    """One step on a random gradient of that norm."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    found = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in found))
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = (gradient * scale / norm).to(parameter)
    return optimizer.step()


def test_the_schedule_sets_the_size_of_the_step() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    chosen = OptimizerSettings(lr=1e-3, schedule=Schedule.linear, warmup_steps=2)
    optimizer = Optimizer(model, chosen, total_steps=4)
    rates: list[float] = []
    for _ in range(4):
        rates.append(optimizer.lr)
        before = model.model.norm.weight.detach().clone()
        step_with(optimizer, model, seed=0)  # with equal gradients, Adam's step is the learning rate, up to its epsilon
        moved = (model.model.norm.weight - before).abs().median().item()
        assert moved == pytest.approx(rates[-1], rel=1e-2)
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("norm", "applied"), [(5.0, 0.5), (0.25, 0.25)])
def test_gradients_are_clipped_at_max_grad_norm(norm: float, applied: float) -> None:
    model = load_model(ModelSettings("tiny"), 0)
    optimizer = Optimizer(model, OptimizerSettings(max_grad_norm=0.5), 10)
    assert step_with(optimizer, model, seed=0, scale=norm) == pytest.approx(norm, rel=1e-5)
    moments = optimizer.state_dict()["states"][0].values()  # after one step: (1 - 0.9) * gradient
    total = math.sqrt(sum(moment["exp_avg"].square().sum().item() for moment in moments))
    assert total == pytest.approx(0.1 * applied, rel=1e-4)


def untied_qwen() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=40, **sizes, **heads))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=1, n_head=2))


@pytest.mark.parametrize("build", [lambda: load_model(ModelSettings("tiny"), 0), untied_qwen, gpt2])
def test_muon_moves_hidden_matrices_alone(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    optimizer = Optimizer(model, OptimizerSettings(kind=Kind.muon, lr=1e-12, muon_lr=0.1), 10)
    step_with(optimizer, model, seed=0)
    moved = {name for name, value in model.state_dict().items() if (value - before[name]).abs().max() > 1e-3}
    layers = ("_proj.weight", "c_attn.weight", "c_proj.weight", "c_fc.weight")
    assert moved == {name for name in before if name.endswith(layers)}
    assert moved
    assert optimizer.lr == 1e-12


@pytest.mark.parametrize("kind", [Kind.adamw, Kind.muon])
def test_an_offloaded_optimizer_takes_the_same_steps(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several micro-batches each; the gradients are gone from the weights as soon as they are there."""
    monkeypatch.setattr("mtgrpo.policy.optimizer._on_gpu", lambda _: True)
    batch = build_batch(PLAYED)
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    found: list[PreTrainedModel] = []
    for offload in (False, True):
        model = copy.deepcopy(MODEL)
        optimizer = Optimizer(model, OptimizerSettings(kind=kind, lr=1e-3, offload=offload), 0)
        policy = Policy(model, optimizer, 50, TEMPERATURE)

        def loss(entries: Tensor, scores: Scores, model: PreTrainedModel = model, offload: bool = offload) -> PerToken:
            assert not offload or all(weight.grad is None for weight in model.parameters())
            return PerToken(-scores.logp, torch.zeros(len(entries), dtype=torch.bool))

        for _ in range(3):
            at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss))
        found.append(model)
    plain, offloaded = (dict(model.named_parameters()) for model in found)
    assert largest_difference(offloaded, plain) <= 1e-12
    assert largest_difference(plain, dict(MODEL.named_parameters())) > 1e-3


def test_an_offloaded_optimizer_that_is_gone_takes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtgrpo.policy.optimizer._on_gpu", lambda _: True)
    model = load_model(ModelSettings("tiny"), 0)
    optimizer = Optimizer(model, OptimizerSettings(offload=True), 0)
    del optimizer
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_weights_on_a_cpu_are_not_offloaded() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    optimizer = Optimizer(model, OptimizerSettings(offload=True), 0)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert optimizer.step() > 0


@pytest.mark.parametrize("phase", ["training", "update"])
def test_a_gpu_that_runs_out_of_memory_says_when_and_what_would_help(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Scores:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.1 GiB in all. If reserved but unallocated ..."
        )

    policy = Watched(copy.deepcopy(MODEL))
    if phase == "training":
        monkeypatch.setattr(policy.scorer, "forward", full)
    else:
        monkeypatch.setattr(policy.descent, "step", full)
    helps = {"training": "model.checkpointing=true, batch.token_budget", "update": "optimizer.offload=true"}[phase]
    said = rf"not enough \({phase}\): CUDA out of memory\. Tried .* all\. Unless it is set, set {helps}"
    with pytest.raises(ConfigError, match=said):
        train(policy)


def test_what_needs_bitsandbytes_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"`kind=adamw_8bit` needs the package bitsandbytes: pip install .mtgrpo"):
        OptimizerSettings(kind=Kind.adamw_8bit)


@pytest.mark.parametrize("kind", [Kind.adamw, Kind.muon])
def test_an_optimizer_continues_from_its_state(kind: Kind) -> None:
    chosen = OptimizerSettings(kind=kind, lr=1e-3, schedule=Schedule.cosine, warmup_steps=2, weight_decay=0.1)
    model = load_model(ModelSettings("tiny"), 0)
    optimizer = Optimizer(model, chosen, total_steps=8)
    for seed in range(3):
        step_with(optimizer, model, seed)
    resumed_model = copy.deepcopy(model)
    resumed = Optimizer(resumed_model, chosen, total_steps=8)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh_model = copy.deepcopy(model)
    fresh = Optimizer(fresh_model, chosen, total_steps=8)
    for seed in range(3, 6):
        assert resumed.lr == optimizer.lr
        for one, weights in ((optimizer, model), (resumed, resumed_model), (fresh, fresh_model)):
            step_with(one, weights, seed)
    assert largest_difference(dict(model.named_parameters()), dict(resumed_model.named_parameters())) == 0
    assert largest_difference(dict(model.named_parameters()), dict(fresh_model.named_parameters())) > 0


class Kept(Optimizer):
    """Keeps the gradients that a step is given, as they are then."""

    def step(self) -> float:
        self.kept = {weight: weight.grad / self.scale for weight in self._weights if weight.grad is not None}
        return super().step()


def policy_in(dtype: DType) -> Policy:
    model = make_model(dtype)
    return Policy(model, Kept(model, OptimizerSettings(lr=1e-3), 0), 50, TEMPERATURE)


def update(policy: Policy, size: float = 1.0) -> Metrics:
    """One optimiser step whose loss is multiplied by `size`."""
    batch = build_batch(PLAYED)
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)

    def loss(entries: Tensor, scores: Scores) -> PerToken:
        return PerToken(-size * scores.logp, torch.zeros(len(entries), dtype=torch.bool))

    return at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss))


def test_float16_has_the_gradient_of_float32() -> None:
    """Small gradients too, for the loss is scaled; what is reported is not."""
    exact, half = policy_in(DType.float32), policy_in(DType.float16)
    for size in (1.0, 1e-4):
        expected, found = update(exact, size), update(half, size)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        assert found["skipped"] == expected["skipped"] == 0
        for policy in (exact, half):
            assert isinstance(policy.optimizer, Kept)
        pairs = zip(exact.optimizer.kept.values(), half.optimizer.kept.values(), strict=True)
        assert all((one - other).norm() <= 2e-2 * one.norm() for one, other in pairs)
    assert (exact.optimizer.scale, half.optimizer.scale) == (1, 65536)


def test_an_overflow_in_float16_skips_the_update_and_halves_the_scale() -> None:
    policy = policy_in(DType.float16)
    before = copy.deepcopy(policy.model.state_dict())
    for skipped in range(1, 6):  # more than would end a run in another dtype
        metrics = update(policy, 1e8)
        assert (metrics["skipped"], policy.optimizer.scale) == (1, 65536 / 2**skipped)
        assert largest_difference(policy.model.state_dict(), before) == 0
    assert len(policy.notes) == 5 and "the weights stay as they were" in policy.notes[0]
    assert update(policy)["skipped"] == 0
    assert policy.optimizer.scale == 65536 / 2**5 and largest_difference(policy.model.state_dict(), before) > 0


def test_a_gradient_that_no_scale_helps_ends_the_run() -> None:
    policy = policy_in(DType.float16)
    with pytest.raises(RunError, match=r"norm is nan, .* 16 times in a row; set optimizer\.lr"):
        for _ in range(20):
            update(policy, math.nan)


def test_float16_resumes_exactly() -> None:
    """The scale is part of the state, and how long ago it was last lowered."""
    policy = policy_in(DType.float16)
    policy.optimizer._scaler.set_growth_interval(3)
    for size in (1e8, 1.0, 1.0):
        update(policy, size)
    tensors, rest = flatten(policy.optimizer.state_dict())
    resumed, fresh = policy_in(DType.float16), policy_in(DType.float16)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed.optimizer.load_state_dict(unflatten(saved, json.loads(json.dumps(rest))))
    assert (resumed.optimizer.scale, fresh.optimizer.scale) == (32768, 65536)
    for other in (resumed, fresh):
        other.model.load_state_dict(copy.deepcopy(policy.model.state_dict()))
    for one in (policy, resumed, fresh):
        assert [update(one)["skipped"] for _ in range(3)] == [0, 0, 0]
    assert policy.optimizer.scale == resumed.optimizer.scale == 65536  # it grew after three updates without overflow
    assert largest_difference(policy.model.state_dict(), resumed.model.state_dict()) == 0
    assert largest_difference(policy.model.state_dict(), fresh.model.state_dict()) > 0


def test_an_optimizer_continues_with_the_settings_it_is_given_now() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    before = Optimizer(model, OptimizerSettings(lr=1e-3, schedule=Schedule.linear), 10)
    step_with(before, model, seed=0)
    now = OptimizerSettings(lr=1e-5, weight_decay=0.5, betas=[0.8, 0.9], schedule=Schedule.linear)
    after = Optimizer(model, now, 20)
    after.load_state_dict(before.state_dict())
    assert after.lr == pytest.approx(1e-5 * 19 / 20)
    (part,) = after._optimizers
    (group,) = part.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    lr = after.lr
    step_with(after, model, seed=1)
    assert group["lr"] == lr
    assert after.lr == pytest.approx(1e-5 * 18 / 20)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"muon_lr": -1.0},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"max_grad_norm": 0.0},
        {"weight_decay": -0.1},
        {"warmup_steps": -1},
    ],
)
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(bad))}"):
        OptimizerSettings(**bad)


def test_a_falling_schedule_needs_a_number_of_steps() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    with pytest.raises(ConfigError, match=r"optimizer\.schedule=linear"):
        Optimizer(model, OptimizerSettings(schedule=Schedule.linear), total_steps=0)
    Optimizer(model, OptimizerSettings(), total_steps=0)


def test_the_frozen_log_probabilities_are_packed_as_the_first_update_is() -> None:
    """In 16 bits another packing rounds otherwise, by more than a clip may be wide."""
    algorithm, policy = Recording(), Watched(make_model(DType.bfloat16), lr=0.0)
    together = [PLAYED[0], replace(PLAYED[0], turns=PLAYED[0].turns[:1]), *PLAYED[2:]]
    train(policy, together, torch.ones(4), algorithm=algorithm, updates=Updates(1, 2))
    assert len(algorithm.seen) == 8
    for logp, old, *_ in algorithm.seen:
        assert torch.equal(logp, old)


@pytest.mark.parametrize(
    ("width", "frozen", "lr", "said"),
    [
        (
            16_000,
            False,
            1.1e-5,
            "optimizer.lr=1.1e-05 is high for all weights of a model of 0.26 billion weights; usual is 1e-06",
        ),
        (16_000, False, 1e-5, ""),
        (16_000, True, 1e-4, ""),
        (
            16_000,
            True,
            1e-3,
            "optimizer.lr=0.001 is high for adapters of a model of 0.26 billion weights; usual is 1e-05",
        ),
        (15_000, False, 1e-3, ""),
    ],
)
def test_a_learning_rate_that_is_high_for_a_large_model_is_noted(
    width: int, frozen: bool, lr: float, said: str
) -> None:
    model = nn.Sequential(nn.Linear(width, width, device="meta"), nn.Linear(1, 1, device="meta"))
    model[0].requires_grad_(not frozen)
    assert note_of_lr(model, lr) == said
