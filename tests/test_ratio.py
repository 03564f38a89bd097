"""Log-ratios far beyond what fp32 can exponentiate: losses and gradients stay finite, and are those of the formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Algorithm, Tokens, grpo
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.cispo import CISPO
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight, diagnostics
from mtgrpo.algorithms.dppo import DPPO
from mtgrpo.algorithms.gmpo import GMPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.gspo import GSPO
from mtgrpo.algorithms.kl import KL, Estimator
from mtgrpo.policy.settings import Updates
from mtgrpo.policy.updater import UpdateConfig
from mtgrpo.types import Trajectory
from test_updater import ALGORITHMS, NAMES, TRAJECTORIES, estimator_for, updates

FAR = [30.0, 100.0, 1000.0, -30.0, -100.0, -1000.0]
PLAIN = [GRPO(), *ALGORITHMS]  # the first without a dual clip


def tokens(algorithm: Algorithm, log_ratio: float, advantage: float, likelier: float, dtype: torch.dtype) -> Tokens:
    """One token, a trajectory of its own; the likelier of its two log-probabilities is `likelier`."""
    logp = torch.tensor([likelier + min(0.0, log_ratio)], dtype=dtype).requires_grad_()
    old = torch.tensor([likelier - max(0.0, log_ratio)], dtype=dtype)
    found = Tokens(logp, old, torch.tensor([advantage], dtype=dtype))
    if not algorithm.needs_sequence_ratio:
        return found
    return replace(found, sequence=algorithm.sequence_term(found.log_ratio.detach(), found.advantage))


def slope(algorithm: Algorithm, given: Tokens) -> tuple[float, float]:
    """The loss of the token and its gradient."""
    loss = algorithm.loss(given).loss.sum()
    (gradient,) = torch.autograd.grad(loss, given.logp)
    return loss.item(), gradient.item()


@pytest.mark.parametrize("algorithm", PLAIN, ids=["GRPO", *NAMES])
@pytest.mark.parametrize("log_ratio", FAR)
@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("likelier", [-0.1, -5.0])  # with and without DPPO's mask
def test_far_log_ratios_have_finite_losses_and_the_gradient_of_the_formula(
    algorithm: Algorithm, log_ratio: float, advantage: float, likelier: float
) -> None:
    """It is 0, by the clip or where the log-ratio is clamped, but for CISPO's weight and DPPO's square."""
    loss, gradient = slope(algorithm, tokens(algorithm, log_ratio, advantage, likelier, torch.float32))
    expected = 0.0
    if isinstance(algorithm, CISPO):
        expected = -advantage * (1 + algorithm.clip_high if log_ratio > 0 else max(2e-9, 1 - algorithm.clip_low))
    if isinstance(algorithm, DPPO):
        expected = 2 * algorithm.kl_coef * log_ratio
    assert math.isfinite(loss)
    assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("algorithm", PLAIN, ids=["GRPO", *NAMES])
@given(st.floats(-20, 20), st.sampled_from([1.5, -0.5]))
def test_log_ratios_up_to_twenty_are_not_touched(algorithm: Algorithm, log_ratio: float, advantage: float) -> None:
    found = slope(algorithm, tokens(algorithm, log_ratio, advantage, -1.0, torch.float64))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grpo, "MAX_LOG_RATIO", math.inf)
        assert slope(algorithm, tokens(algorithm, log_ratio, advantage, -1.0, torch.float64)) == found


@given(st.floats(-1000, 1000))
def test_the_ratio_is_clamped_on_both_sides_and_has_no_gradient_there(log_ratio: float) -> None:
    given = torch.tensor([log_ratio], dtype=torch.float64).requires_grad_()
    found = grpo.ratio_of(given)
    (gradient,) = torch.autograd.grad(found.sum(), given)
    assert found.item() == pytest.approx(math.exp(max(-20, min(20, log_ratio))), rel=1e-12)
    assert grpo.is_clamped(given).item() == (abs(log_ratio) > 20)
    assert gradient.item() == (0 if abs(log_ratio) > 20 else found.item())


@pytest.mark.parametrize("algorithm", [GSPO(), GMPO()])
def test_a_small_ratio_of_a_trajectory_is_not_lost_beside_its_tokens_in_fp32(algorithm: Algorithm) -> None:
    given = Tokens(*(torch.tensor([x]) for x in (-30.25, -30.0, -1.0)), sequence=torch.tensor([1e-4]))
    assert algorithm.loss(given).loss.item() == pytest.approx(math.exp(1e-4), rel=1e-7)


# --- KL ---


@pytest.mark.parametrize("apart", FAR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_far_from_the_reference(apart: float, dtype: torch.dtype) -> None:
    """1 - exp(-d) while exp(-d) can be computed; beyond, nothing rather than a pull away from the reference."""
    logp = torch.tensor([-1.0 + min(0.0, apart)], dtype=dtype).requires_grad_()
    ref = torch.tensor([-1.0 - max(0.0, apart)], dtype=dtype)
    found = KL(1.0).penalty(logp, logp.detach(), ref)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert found.isfinite().all()
    assert found.item() == pytest.approx(math.exp(20) - 21 if apart < 0 else apart - 1, rel=1e-6)
    assert gradient.item() == pytest.approx(0 if apart < 0 else 1, abs=1e-7)


@pytest.mark.parametrize("estimator", [Estimator.k1, Estimator.k3])
@pytest.mark.parametrize("apart", FAR)
@pytest.mark.parametrize("log_ratio", FAR)
def test_the_corrected_penalty_is_finite(log_ratio: float, apart: float, estimator: Estimator) -> None:
    logp = torch.tensor([-1001.0]).requires_grad_()
    kl = KL(1.0, estimator, unbiased=True)
    found = kl.penalty(logp, logp.detach() - log_ratio, logp.detach() - apart)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


# --- corrections ---


@pytest.mark.parametrize("weight", Weight)
@pytest.mark.parametrize("reject", Reject)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_far_tokens_are_finite(weight: Weight, reject: Reject, dtype: torch.dtype) -> None:
    old, trajectory = torch.full((6,), -1.0, dtype=dtype), torch.tensor([0, 0, 1, 2, 2, 3])
    behaviour = old - torch.tensor([30.0, 0, 1000, -1000, -30, 0], dtype=dtype)
    found = Correction(weight=weight, reject=reject, veto=1e-6).weights(old, behaviour, trajectory)
    assert found[-1] == 1
    assert ((found >= 0) & (found <= 2)).all()
    assert all(map(math.isfinite, diagnostics(old - behaviour).values()))


# --- the updater ---


def strange(count: int, apart: float) -> list[Trajectory]:
    """The trajectories, of which the engine reported the first `count` tokens as that much less likely."""
    first, *others = TRAJECTORIES
    (turn,) = first.turns
    logprobs = [value - apart * (i < count) for i, value in enumerate(turn.logprobs)]
    return [replace(first, turns=[replace(turn, logprobs=logprobs)]), *others]


def against_the_engine(algorithm: Algorithm) -> UpdateConfig:
    correction = Correction() if algorithm.uses_behaviour_policy else Correction(old_policy=OldPolicy.engine)
    return UpdateConfig(algorithm, estimator_for(algorithm), correction=correction, length=7)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
@pytest.mark.parametrize("apart", [800.0, -800.0])
def test_an_update_survives_far_tokens(algorithm: Algorithm, apart: float) -> None:
    (metrics,), (gradient,), _ = updates(against_the_engine(algorithm), strange(2, apart))
    assert math.isfinite(metrics["loss"])
    assert all(value.isfinite().all() for value in gradient.values())
    assert max(value.abs().max().item() for value in gradient.values()) < 10


@pytest.mark.parametrize("apart", [400.0, -800.0])
def test_a_second_update_survives_where_all_tokens_are_far(apart: float) -> None:
    learning = replace(against_the_engine(GRPO()), updates=Updates(1, 2))
    _, _, metrics = updates(learning, strange(99, apart))
    assert metrics["updates"] == 8 and 0 < metrics["ess"] <= 1


@pytest.mark.parametrize("algorithm", [GRPO(), CISPO(), DPPO()])
def test_the_share_of_clamped_tokens_is_a_metric_where_there_are_any(algorithm: Algorithm) -> None:
    learning = against_the_engine(algorithm)
    share = 2 / sum(t.sampled_tokens for t in TRAJECTORIES)
    assert updates(learning, strange(2, 300.0))[2]["log_ratio_clamped"] == pytest.approx(share, rel=1e-12)
    assert "log_ratio_clamped" not in updates(learning)[2]


def test_a_clamped_trajectory_counts_whole() -> None:
    tokens = [t.sampled_tokens for t in TRAJECTORIES]
    found = updates(against_the_engine(GSPO(average=Average.token_mean)), strange(2, 300.0))[2]
    assert found["log_ratio_clamped"] == pytest.approx(tokens[0] / sum(tokens), rel=1e-12)


def test_what_a_penalty_clamps_counts_too() -> None:
    logp = torch.tensor([-40.0, -40.0, -1.0])
    ref = torch.tensor([-1.0, -39.0, -40.0])
    assert KL(0.1).clamped(logp, logp, ref).tolist() == [True, False, False]
    assert KL(0.1, Estimator.k2).clamped(logp, logp, ref).tolist() == [False] * 3
    behaviour = torch.tensor([-40.0, -1.0, -40.0])
    assert KL(0.1, unbiased=True).clamped(logp, behaviour, logp).tolist() == [False, True, True]
    learning = UpdateConfig(GRPO(), WholeTrajectory(), KL(0.1, unbiased=True), length=7)
    share = 2 / sum(t.sampled_tokens for t in TRAJECTORIES)
    found = updates(learning, strange(2, 300.0), reference=True)[2]
    assert found["log_ratio_clamped"] == pytest.approx(share, rel=1e-12)
