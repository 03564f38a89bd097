"""Every algorithm's update: what it does not depend on, and what belongs to the batch as a whole."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.gae import GAE
from mtgrpo.advantages.gigpo import GiGPO
from mtgrpo.advantages.return_to_go import ReturnToGo
from mtgrpo.advantages.rewards import Level, rewards_of
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.advantages.turn import ByTurn
from mtgrpo.algorithms import Algorithm, Tokens
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.cispo import CISPO
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight
from mtgrpo.algorithms.dapo import DAPO
from mtgrpo.algorithms.dppo import DPPO
from mtgrpo.algorithms.dr_grpo import DrGRPO
from mtgrpo.algorithms.gmpo import GMPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.gspo import GSPO
from mtgrpo.algorithms.kl import KL, Estimator, Place, estimate
from mtgrpo.algorithms.ppo import PPO
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.algorithms.rloo import RLOO
from mtgrpo.algorithms.sapo import SAPO
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.batch.packing import Packing, pack
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.errors import ConfigError
from mtgrpo.model.attention import AttentionKind, choose_attention
from mtgrpo.model.scorer import Scores, flops_of, layout_of
from mtgrpo.model.value import add_value_head
from mtgrpo.policy import updater
from mtgrpo.policy.settings import ReferenceSettings
from mtgrpo.policy.step import CooperativeTask, Metrics, at_once
from mtgrpo.policy.updater import Objective, PolicyUpdater, ReferencePolicy, UpdateConfig, Updates
from mtgrpo.types import Group, Message, Sampling, Trajectory
from mtgrpo.weights.source import ModelWeights
from test_policy import (
    LONGEST,
    MODEL,
    ONE_MICRO_BATCH,
    OTHER,
    PLAYED,
    REFERENCE,
    Watched,
    largest_difference,
    stored_with,
)

REWARDS = [1.0, -0.5, 0.25, 2.0]
TRAJECTORIES = [
    replace(
        trajectory,
        reward=reward,
        turn_rewards=[round(0.3 * reward + 0.1 * number, 3) for number in range(len(trajectory.turns))],
        turns=[replace(turn, observations=(Message("tool", str(n % 2)),)) for n, turn in enumerate(trajectory.turns)],
    )
    for trajectory, reward in zip(PLAYED, REWARDS, strict=True)
]
ALGORITHMS: list[Algorithm] = [
    GRPO(dual_clip=1.5),
    DrGRPO(),
    DAPO(overlong_tokens=20, overlong_buffer=15),
    GSPO(clip_low=0.05, clip_high=0.05),
    CISPO(clip_low=0.2, clip_high=0.2),
    RLOO(average=Average.prompt_mean),
    ReinforcePP(),
    ReinforcePP(group_baseline=True),
    SAPO(),
    GMPO(clip_low=0.1, clip_high=0.1),
    DPPO(clip_low=1e-5, clip_high=1e-5),
    PPO(value_clip=0.01),
]
NAMES = [type(algorithm).__name__ for algorithm in ALGORITHMS]
CORRECTION = Correction(weight=Weight.sequence, cap=1.5, reject=Reject.geometric, low=0.1, high=10)


def near_the_engine(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """With the log-probabilities that the model gives, a little off."""
    batch = build_batch(trajectories)
    logp = at_once(Watched(copy.deepcopy(MODEL)).scoring(batch, torch.arange(len(batch)))).logp.tolist()
    found: list[Trajectory] = []
    place = 0
    for trajectory in trajectories:
        turns = []
        for turn in trajectory.turns:
            values = [value + 0.05 * ((place + i) % 3 - 1) for i, value in enumerate(logp[place:][: len(turn.output)])]
            turns.append(replace(turn, logprobs=values))
            place += len(turn.output)
        found.append(replace(trajectory, turns=turns))
    return found


TRAJECTORIES = near_the_engine(TRAJECTORIES)


def estimator_for(algorithm: Algorithm) -> AdvantageEstimator:
    return GAE() if algorithm.has_critic else WholeTrajectory()


class OverRanks(Watched):
    """Takes the micro-batches of three ranks one after the other."""

    def pack(self, batch: Batch, entries: Tensor) -> list[Packing]:
        found = pack(batch, entries, LONGEST, flops_of(self.model), layout_of(self.model), ranks=3)
        assert all(rank.micro_batches for rank in found)
        return [replace(found[0], micro_batches=[micro for rank in found for micro in rank.micro_batches])]


def updates(
    learning: UpdateConfig,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
    token_budget: int = ONE_MICRO_BATCH,
    lr: float = 5e-4,
    reference: bool = False,
    attention: AttentionKind = AttentionKind.forest,
    kind: type[Watched] = Watched,
    sizes: Sequence[int] = (2, 2),
) -> tuple[list[Metrics], list[dict[str, Tensor]], Metrics]:
    """Metrics and gradients of every update, and the metrics of the batch, in groups of these `sizes`."""
    model = copy.deepcopy(MODEL)
    if learning.algorithm.has_critic:
        add_value_head(model, torch.float64, Path("nowhere"))
        head = model.get_submodule("value_head")
        with torch.no_grad():
            for parameter in head.parameters():
                parameter += 0.05
    choose_attention(model, attention)
    policy = kind(model, lr=lr, token_budget=token_budget)
    batch = build_batch(trajectories)
    parts = [list(part) for part in _split(trajectories, sizes)]
    groups = [Group(part[0].task, part) for part in parts]
    rewards = rewards_of(groups, learning.algorithm, batch.trajectory, batch.turn)
    found = at_once(
        PolicyUpdater(policy, learning, REFERENCE if reference else None).training(batch, rewards, version=3, seed=0)
    )
    return policy.metrics, policy.descent.gradients, found


def _split(trajectories: Sequence[Trajectory], sizes: Sequence[int]) -> list[Sequence[Trajectory]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [trajectories[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def update_config(algorithm: Algorithm, estimator: AdvantageEstimator | None = None) -> UpdateConfig:
    correction = Correction() if algorithm.uses_behaviour_policy else CORRECTION
    return UpdateConfig(
        algorithm,
        estimator or estimator_for(algorithm),
        KL(0.1, unbiased=True),
        correction=correction,
        updates=Updates(0, 3),
        length=7,
    )


CASES: list[tuple[Algorithm, AdvantageEstimator]] = [(algorithm, estimator_for(algorithm)) for algorithm in ALGORITHMS]
CASES += [
    (GRPO(), estimator) for estimator in (ReturnToGo(gamma=0.9), ByTurn(), ByTurn(unbiased=False), GiGPO(), GAE())
]
CASES += [(GSPO(clip_low=0.05, clip_high=0.05), ByTurn()), (PPO(), GAE(level=Level.token))]
IDS = [f"{type(algorithm).__name__}-{type(estimator).__name__}" for algorithm, estimator in CASES]


@functools.cache
def expected(case: int) -> tuple[list[Metrics], list[dict[str, Tensor]], Metrics]:
    return updates(update_config(*CASES[case]), reference=True)


def assert_the_same(case: int, found: tuple[list[Metrics], list[dict[str, Tensor]], Metrics]) -> None:
    metrics, gradients, _ = expected(case)
    assert len(metrics) == 3
    for one, other in zip(metrics, found[0], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-10)
        assert other["clip_fraction"] == pytest.approx(one["clip_fraction"], abs=1e-12)
    for gradient, other in zip(gradients, found[1], strict=True):
        assert largest_difference(gradient, other) < 1e-10
    assert max(value.abs().max().item() for value in gradients[-1].values()) > 1e-4


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
@pytest.mark.parametrize("breaks", [{1}, {1, 2, 3}])
def test_invariance_to_segments(case: int, breaks: set[int]) -> None:
    stored = [stored_with(trajectory, breaks) for trajectory in TRAJECTORIES]
    assert sum(t.segments for t in stored) > sum(t.segments for t in TRAJECTORIES)
    assert_the_same(case, updates(update_config(*CASES[case]), stored, reference=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_invariance_to_the_micro_batch_cut(case: int) -> None:
    assert_the_same(case, updates(update_config(*CASES[case]), token_budget=LONGEST, reference=True))


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_invariance_to_padding(case: int) -> None:
    """Padded rows, one for each conversation, in place of the forest."""
    assert_the_same(case, updates(update_config(*CASES[case]), reference=True, attention=AttentionKind.sdpa))


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_invariance_to_ranks(case: int) -> None:
    """Each of three ranks takes a part of the batch; their gradients add up to the whole."""
    assert_the_same(case, updates(update_config(*CASES[case]), reference=True, kind=OverRanks))


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_invariance_to_the_order_of_trajectories(case: int) -> None:
    turned = [TRAJECTORIES[i] for i in (3, 2, 1, 0)]
    assert_the_same(case, updates(update_config(*CASES[case]), turned, reference=True))


def test_the_invariances_are_tested_where_something_is_clipped() -> None:
    for case, (algorithm, _) in enumerate(CASES):
        if not isinstance(algorithm, SAPO):
            assert expected(case)[0][2]["clip_fraction"] > 0, IDS[case]


def test_sequence_mean_is_the_exception() -> None:
    learning = update_config(GRPO(average=Average.sequence_mean))
    stored = [stored_with(trajectory, {1, 2, 3}) for trajectory in TRAJECTORIES]
    one, other = updates(learning, reference=True), updates(learning, stored, reference=True)
    assert abs(one[0][0]["loss"] - other[0][0]["loss"]) > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
def test_invariance_of_the_direction_at_ratio_one(algorithm: Algorithm) -> None:
    """Every policy loss then has the gradient of weighted REINFORCE, token by token."""
    logp = torch.tensor([-0.3, -7.0, -1.0, -2.0], dtype=torch.float64).requires_grad_()
    advantage = torch.tensor([1.5, 1.5, -0.5, -0.5], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.float64)
    sequence = algorithm.sequence_term(zeros, advantage) if algorithm.needs_sequence_ratio else None
    found = algorithm.loss(Tokens(logp, logp.detach(), advantage, sequence))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logp)
    assert torch.allclose(gradient, -advantage, rtol=0, atol=1e-12)
    assert not found.clipped.any()


@pytest.mark.parametrize("algorithm", [algorithm for algorithm in ALGORITHMS if not algorithm.has_critic])
def test_invariance_constant_rewards_have_no_gradient(algorithm: Algorithm) -> None:
    same = [replace(t, reward=0.7, turn_rewards=[]) for t in TRAJECTORIES]
    plain = replace(algorithm, **({"kl_coef": 0.0} if isinstance(algorithm, DPPO) else {}))
    if isinstance(plain, DAPO):
        plain = DAPO()
    _, gradients, metrics = updates(UpdateConfig(plain, WholeTrajectory(), length=7), same)
    assert metrics["trained_tokens"] == 0
    assert gradients == []


def test_the_corrected_k3_has_the_gradient_of_the_reverse_kl() -> None:
    """grad(ratio * k3) = ratio * log(pi / pi_ref) * grad log pi."""
    generator = torch.Generator().manual_seed(0)
    logp, old, ref = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    found = KL(1.0, unbiased=True).penalty(logp, old, ref)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    expected_gradient = (logp - old).exp() * (logp - ref)
    assert torch.allclose(gradient, expected_gradient.detach(), rtol=1e-12, atol=1e-12)


def test_invariance_what_the_tools_said_is_never_trained() -> None:
    """Final states that predict no sampled token may be anything."""
    learning = replace(update_config(GRPO()), kl=KL())
    plain = updates(learning)
    noisy_model = copy.deepcopy(MODEL)
    policy = Watched(noisy_model, lr=5e-4)
    batch = build_batch(TRAJECTORIES)
    micro = policy.pack(batch, torch.arange(len(batch)))[0].micro_batches[0]
    read = torch.zeros(micro.ids.numel(), dtype=torch.bool)
    read[micro.parent] = True
    generator = torch.Generator().manual_seed(0)

    def disturb(_module: torch.nn.Module, _inputs: object, hidden: Tensor) -> Tensor:
        if hidden.shape[1] < len(read):  # the check of the first micro-batch
            return hidden
        noise = torch.randn(hidden.shape[1:], generator=generator, dtype=hidden.dtype)
        noise[: len(read)][read] = 0
        return hidden + noise

    noisy_model.model.norm.register_forward_hook(disturb)
    groups = [Group(t[0].task, list(t)) for t in _split(TRAJECTORIES, (2, 2))]
    rewards = rewards_of(groups, learning.algorithm, batch.trajectory, batch.turn)
    at_once(PolicyUpdater(policy, learning).training(batch, rewards, version=3, seed=0))
    assert [m["loss"] for m in policy.metrics] == pytest.approx([m["loss"] for m in plain[0]], abs=1e-12)


# --- old policies and corrections ---


def losses(learning: UpdateConfig, **settings: object) -> list[float]:
    return [m["loss"] for m in updates(learning, **settings)[0]]  # type: ignore[arg-type]


def test_the_ratio_is_against_the_old_policy_that_was_chosen() -> None:
    def ratio_of(old: OldPolicy | None, stale: bool = False) -> float:
        learning = UpdateConfig(GRPO(), WholeTrajectory(), correction=Correction(old_policy=old), stale=stale, length=7)
        return updates(learning)[0][0]["loss"]

    trainer, engine = ratio_of(OldPolicy.trainer), ratio_of(OldPolicy.engine)
    assert ratio_of(None) == trainer
    assert ratio_of(None, stale=True) == engine
    assert abs(trainer - engine) > 1e-4


def test_a_weight_multiplies_the_loss_and_not_the_normaliser() -> None:
    """All weights at a cap of a half: half the loss, at the first update of a batch."""
    plain = UpdateConfig(GRPO(), WholeTrajectory(), length=7)
    capped = replace(plain, correction=Correction(weight=Weight.token, cap=0.5))
    assert losses(capped)[0] == pytest.approx(losses(plain)[0] / 2, abs=1e-12)


def test_what_advantages_are_like_is_told() -> None:
    _, _, metrics = updates(UpdateConfig(GRPO(divide_by_std=False), WholeTrajectory(turn_weight=0), length=7))
    spread = [0.75, -0.75, -0.875, 0.875]
    tokens = [t.sampled_tokens for t in TRAJECTORIES]
    mean = sum(a * n for a, n in zip(spread, tokens, strict=True)) / sum(tokens)
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-0.875, 0.875)
    assert metrics["advantage/mean"] == pytest.approx(mean)
    square = sum(a * a * n for a, n in zip(spread, tokens, strict=True)) / sum(tokens)
    assert metrics["advantage/std"] == pytest.approx((square - mean**2) ** 0.5)


def test_the_effective_sample_size_falls_with_updates_of_one_batch() -> None:
    once = UpdateConfig(GRPO(), WholeTrajectory(), length=7)
    assert "ess" not in updates(once)[2]
    often = replace(once, updates=Updates(0, 3))
    assert updates(often, lr=0.0)[2]["ess"] == pytest.approx(1.0)
    near, far = (updates(often, lr=lr)[2]["ess"] for lr in (1e-4, 5e-3))
    assert 0 < far < near < 1


def test_rejected_trajectories_stay_in_the_normaliser() -> None:
    shifted = [
        replace(t, turns=[replace(turn, logprobs=[p - 5 * (i == 0) for p in turn.logprobs]) for turn in t.turns])
        for i, t in enumerate(TRAJECTORIES)
    ]
    plain = UpdateConfig(GRPO(divide_by_std=False), WholeTrajectory(turn_weight=0), length=7)
    rejecting = replace(plain, correction=Correction(reject=Reject.geometric, low=0.5, high=2))
    _, _, metrics = updates(rejecting, shifted)
    tokens = [t.sampled_tokens for t in TRAJECTORIES]
    assert metrics["correction/rejected"] == pytest.approx(tokens[0] / sum(tokens))
    advantages = [0.75, -0.75, -0.875, 0.875]
    wanted = -sum(a * n for a, n in list(zip(advantages, tokens, strict=True))[1:]) / sum(tokens)
    assert losses(rejecting, trajectories=shifted)[0] == pytest.approx(wanted, abs=1e-10)


def test_interpolation_needs_no_forward_pass_and_lies_between() -> None:
    class Counting(Watched):
        looks = 0

        def scoring(self, *arguments: object) -> object:  # type: ignore[override]
            self.looks += 1
            return super().scoring(*arguments)  # type: ignore[arg-type]

    def run(old: OldPolicy) -> tuple[float, int]:
        policy = Counting(copy.deepcopy(MODEL), lr=5e-4)
        learning = UpdateConfig(
            GRPO(), WholeTrajectory(), correction=Correction(old_policy=old), updates=Updates(0, 1), stale=True
        )
        batch = build_batch(TRAJECTORIES)
        groups = [Group(t[0].task, list(t)) for t in _split(TRAJECTORIES, (2, 2))]
        rewards = rewards_of(groups, learning.algorithm, batch.trajectory, batch.turn)
        at_once(PolicyUpdater(policy, learning).training(batch, rewards, version=3, seed=0))
        return policy.metrics[0]["loss"], policy.looks

    (engine, _), (middle, looks), (trainer, _) = (
        run(old) for old in (OldPolicy.engine, OldPolicy.interpolated, OldPolicy.trainer)
    )
    assert looks == 0
    assert min(engine, trainer) < middle < max(engine, trainer)


# --- KL in the reward, adaptive, references that move ---


def test_a_penalty_in_the_reward_is_taken_off_before_advantages() -> None:
    learning = UpdateConfig(RLOO(), ReturnToGo(level=Level.token), KL(0.3, Estimator.k1, Place.reward), length=7)
    found = updates(learning, reference=True)
    policy, batch = Watched(copy.deepcopy(MODEL)), build_batch(TRAJECTORIES)
    everything = torch.arange(len(batch))
    logp, ref = (
        at_once(policy.scoring(batch, everything)).logp,
        at_once(policy.scoring(batch, everything, REFERENCE.weights)).logp,
    )
    penalty = 0.3 * estimate(Estimator.k1, logp, ref)
    groups = [Group(t[0].task, list(t)) for t in _split(TRAJECTORIES, (2, 2))]
    rewards = replace(rewards_of(groups, RLOO(), batch.trajectory, batch.turn), per_token=-penalty)
    advantage = learning.advantage.assign(rewards, RLOO()).advantage
    assert found[0][0]["loss"] == pytest.approx(-advantage.mean().item(), abs=1e-10)
    without = updates(replace(learning, kl=KL()))
    assert abs(found[0][0]["loss"] - without[0][0]["loss"]) > 1e-3


def test_the_coefficient_follows_the_target() -> None:
    kl = KL(0.5, target=0.1, adaptation=1.0)
    assert kl.adapt(0.5, 0.1) == pytest.approx(0.5)
    assert kl.adapt(0.5, 0.11) == pytest.approx(0.55)
    assert kl.adapt(0.5, 9.0) == pytest.approx(0.6)
    assert kl.adapt(0.5, 0.0) == pytest.approx(0.4)
    assert KL(0.5).adapt(0.5, 9.0) == 0.5


@pytest.mark.parametrize("target", [0.0, 1e9])
def test_a_target_is_not_met_by_a_batch_in_which_nothing_was_measured(target: float) -> None:
    learning = replace(update_config(GRPO()), kl=KL(0.1, target=target))
    updater = PolicyUpdater(Watched(copy.deepcopy(MODEL)), learning, REFERENCE)
    batch = build_batch(TRAJECTORIES)
    groups = [Group(t[0].task, list(t)) for t in _split(TRAJECTORIES, (2, 2))]
    rewards = rewards_of(groups, GRPO(), batch.trajectory, batch.turn)
    nothing = replace(rewards, trained=torch.zeros_like(rewards.trained))
    assert "kl" not in at_once(updater.training(batch, nothing, version=3, seed=0))
    assert not updater._target_met and updater.kl_coef == 0.1
    assert "kl" in at_once(updater.training(batch, rewards, version=3, seed=0))
    assert not updater._target_met and updater.kl_coef == 0.1, (
        "the first that is measured is far below, or there is none"
    )


@pytest.mark.parametrize(
    ("settings", "step", "share"),
    [
        (ReferenceSettings(), 4, 0.0),
        (ReferenceSettings(update_every=2), 4, 1.0),
        (ReferenceSettings(update_every=3), 4, 0.0),
        (ReferenceSettings(ema=0.25), 4, 0.25),
    ],
)
def test_references_move(settings: ReferenceSettings, step: int, share: float) -> None:
    model, reference = copy.deepcopy(MODEL), ReferencePolicy(OTHER)
    before = [weight.clone() for weight in reference.weights.values()]
    reference.move(model, settings, step)
    for old, new, policy in zip(before, reference.weights.values(), model.parameters(), strict=True):
        assert torch.allclose(new, old + share * (policy - old), rtol=0, atol=1e-12)


# --- the critic, entropy ---


def test_values_are_learnt() -> None:
    """Many updates on one batch: the explained variance of its returns rises towards 1."""
    learning = UpdateConfig(PPO(value_clip=0), GAE(), updates=Updates(0, 40))
    metrics, _, _ = updates(learning, lr=2e-3)
    values = [m["value_loss"] for m in metrics]
    assert values[-1] < values[0] / 4


def test_the_value_loss_that_is_told_is_the_mean_over_states_whatever_tokens_weigh() -> None:
    told = []
    for average in (Average.token_mean, Average.constant):
        learning = UpdateConfig(PPO(value_clip=0, average=average), GAE(), length=7)
        told.append(updates(learning)[0][0]["value_loss"])
    assert told[0] > 0 and told[1] == pytest.approx(told[0], rel=1e-9)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    bonus = UpdateConfig(GRPO(entropy_coef=1.0), WholeTrajectory(), updates=Updates(0, 5), length=7)
    same = [replace(t, reward=0.0, turn_rewards=[]) for t in TRAJECTORIES]
    metrics, _, _ = updates(bonus, same, lr=1e-3)
    entropies = [m["entropy"] for m in metrics]
    assert all(later > earlier for earlier, later in itertools.pairwise(entropies))


def test_only_tokens_of_high_entropy_are_trained() -> None:
    learning = UpdateConfig(GRPO(top_entropy=0.2), WholeTrajectory(), length=7)
    policy, batch = Watched(copy.deepcopy(MODEL)), build_batch(TRAJECTORIES)
    entropy = at_once(policy.scoring(batch, torch.arange(len(batch)))).entropy
    kept = entropy >= torch.quantile(entropy, 0.8)
    assert 0.15 < kept.double().mean() < 0.3
    groups = [Group(t[0].task, list(t)) for t in _split(TRAJECTORIES, (2, 2))]
    advantage = WholeTrajectory().assign(rewards_of(groups, GRPO(), batch.trajectory, batch.turn), GRPO()).advantage
    assert losses(learning)[0] == pytest.approx(-(advantage * kept).mean().item(), abs=1e-10)


class Rounded(Watched):
    """Rounding gives every pass over a part of a batch other last bits, more than there are of its own."""

    def scoring(
        self, batch: Batch, entries: Tensor, weights: dict[str, Tensor] | None = None
    ) -> CooperativeTask[Scores]:
        found = yield from super().scoring(batch, entries, weights)
        self.passes = getattr(self, "passes", 0) + 1
        return found._replace(entropy=found.entropy * (1 + 1e-6 * self.passes))


@pytest.mark.parametrize("size", [0, 1, 2])
def test_tokens_of_one_context_are_chosen_together_whatever_the_mini_batches(size: int) -> None:
    """Four siblings that said the same."""
    siblings = [replace(TRAJECTORIES[0], reward=float(number), sample_index=number) for number in range(4)]
    policy, seen = Rounded(copy.deepcopy(MODEL)), []

    class Seen(Objective):
        def prepare(self, *arguments: Any) -> CooperativeTask[None]:
            yield from super().prepare(*arguments)
            seen.append(self._kept)

    batch = build_batch(siblings)
    learning = UpdateConfig(GRPO(top_entropy=0.3), WholeTrajectory(), updates=Updates(size, 1))
    rewards = rewards_of([Group(siblings[0].task, siblings)], learning.algorithm, batch.trajectory, batch.turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updater, "Objective", Seen)
        at_once(PolicyUpdater(policy, learning).training(batch, rewards, version=3, seed=0))
    entropy = at_once(policy.scoring(batch, torch.arange(len(batch)))).entropy
    (kept,) = seen
    assert kept.tolist() == (entropy >= torch.quantile(entropy, 0.7) * (1 - 1e-9)).tolist()


# --- refusals ---


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: KL(0.1, Estimator.k1), "no gradient in expectation"),
        (lambda: KL(0.1, Estimator.k3, Place.reward), "`estimator=k1"),
        (lambda: KL(0.1, Estimator.k1, Place.reward, unbiased=True), "`unbiased"),
        (lambda: KL(0.0, target=0.1), "`coef"),
        (lambda: KL(0.1, Estimator.k2, unbiased=True), "corrects k1 and k3"),
        (lambda: KL(0.1, target=0.1, adaptation=1.5), "`adaptation"),
        (lambda: GRPO(average_length=5), "average=constant"),
        (lambda: GRPO(entropy_coef=-0.1), "entropy_coef"),
        (lambda: Correction(old_policy=OldPolicy.engine, weight=Weight.token), "`old_policy=trainer`"),
        (lambda: Correction(old_policy=OldPolicy.interpolated, reject=Reject.geometric), "one micro-batch"),
        (lambda: Correction(low=1.5), "`low` must be >= 0 and < 1"),
        (lambda: ReferenceSettings(update_every=2, ema=0.1), "two ways"),
        (lambda: GRPO(dual_clip=1.1), "dual_clip"),
        (lambda: DAPO(overlong_tokens=5, overlong_buffer=9), "overlong_buffer"),
        (lambda: GRPO(top_entropy=0), "top_entropy"),
    ],
)
def test_contradictions_are_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


class Decoding(Watched):
    """An engine samples from the policy after every micro-batch."""

    sampled = 0

    def updating(self, *arguments: Any) -> CooperativeTask[Metrics]:
        engine = Local().start(ModelWeights(self.model), False, 64)

        async def decode() -> None:
            async with engine.conversation(Key(0, "train/1", str(Decoding.sampled), 0)) as sample:
                Decoding.sampled += len((await sample([5, 6, 7], Sampling(max_new_tokens=3))).tokens)

        work = super().updating(*arguments)
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value
            asyncio.run(decode())
            yield


@pytest.mark.parametrize("case", [0, IDS.index("GSPO-WholeTrajectory")])
def test_decoding_between_micro_batches_changes_no_digit(case: int) -> None:
    Decoding.sampled = 0
    learning, settings = update_config(*CASES[case]), {"token_budget": LONGEST, "reference": True}
    metrics, gradients, _ = updates(learning, **settings)
    same, alike, _ = updates(learning, kind=Decoding, **settings)
    assert Decoding.sampled > 3 * len(metrics)  # several micro-batches in each update
    assert same == metrics
    for one, other in zip(gradients, alike, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
