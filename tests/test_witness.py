"""What each trajectory's gradient and every update are compared with: no alarm without a fault, in every setting."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.gmpo import GMPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator, Place
from mtgrpo.batch.forest import build_batch
from mtgrpo.errors import RunError
from mtgrpo.model.value import add_value_head
from mtgrpo.policy import objective
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import Kind, OptimizerSettings, Schedule
from mtgrpo.policy.step import at_once
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig, Updates
from mtgrpo.policy.witness import Witness, choose, evidence_of
from mtgrpo.types import Group
from test_policy import MODEL, REFERENCE, Watched
from test_updater import CASES, CORRECTION, IDS, TRAJECTORIES

GROUPS = [Group(TRAJECTORIES[n].task, TRAJECTORIES[n : n + 2]) for n in (0, 2)]
IN_LOSS, IN_REWARD = KL(0.1, unbiased=True), KL(0.1, Estimator.k1, Place.reward)
SETTINGS: dict[str, dict[str, Any]] = {
    "one update": {},
    "mini-batches": {"updates": Updates(1, 2)},
    "corrected": {"correction": CORRECTION},
    "stale": {"stale": True},
    "far from the reference": {"kl": IN_LOSS},
    "charged for the distance": {"kl": IN_REWARD},
}


def train(
    algorithm: Algorithm, estimator: AdvantageEstimator, seed: int = 0, **more: Any
) -> tuple[Witness | None, float]:
    """The witness of an update, and the updates."""
    model, found = copy.deepcopy(MODEL), []
    if algorithm.has_critic:
        add_value_head(model, torch.float64, Path("nowhere"))
    learning = UpdateConfig(algorithm, estimator, length=7, **more)
    batch = build_batch(TRAJECTORIES)
    rewards = rewards_of(GROUPS, algorithm, batch.trajectory, batch.turn)
    trains = PolicyUpdater(Watched(model, lr=5e-4), learning, REFERENCE if learning.kl.coef else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "choose", lambda *asked: found.append(choose(*asked)) or found[0])
        metrics = at_once(trains.training(batch, rewards, 3, seed, evidence_of(GROUPS, learning)))
    return found[0] if found else None, metrics["updates"]


def takes(algorithm: Algorithm, more: dict[str, Any]) -> bool:
    """Whether the algorithm can be combined with the setting."""
    corrects = "correction" in more and algorithm.uses_behaviour_policy
    return not (corrects or ("kl" in more and isinstance(algorithm, GMPO)))


SOUND = [
    pytest.param(case, setting, id=f"{name}-{setting}")
    for setting, more in SETTINGS.items()
    for case, name in enumerate(IDS)
    if takes(CASES[case][0], more)
]


@pytest.mark.parametrize(("case", "setting"), SOUND)
def test_no_sound_update_is_refused(case: int, setting: str) -> None:
    for seed in range(1 if SETTINGS[setting] else 2):
        witness, _ = train(*CASES[case], seed, **SETTINGS[setting])
        assert witness is not None and witness.seen == len(witness.advantage)


@pytest.mark.parametrize("average", Average)
def test_the_share_of_a_token_is_that_of_its_average(average: Average) -> None:
    witness, _ = train(GRPO(average=average), WholeTrajectory())
    assert (witness is None) == (average is Average.sequence_mean)  # by segments, which only the batch knows


@dataclass
class Doubled(GRPO):
    """A user's own, of which nothing is known."""

    def loss(self, tokens: Any) -> Any:
        found = super().loss(tokens)
        return replace(found, loss=2 * found.loss)


@dataclass
class Own(WholeTrajectory):
    def assign(self, *arguments: Any) -> Any:
        return replace(super().assign(*arguments), advantage=-super().assign(*arguments).advantage)


def test_what_a_user_writes_has_no_witness() -> None:
    assert train(Doubled(), WholeTrajectory())[0] is None
    assert train(GRPO(), Own())[0] is None


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
@pytest.mark.parametrize("fault", ["negated", "shifted", "scaled"])
def test_a_wrong_advantage_is_refused(case: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"negated": lambda a: -a, "shifted": lambda a: a.roll(3), "scaled": lambda a: 1.2 * a}
    assign = objective.advantages

    def wrong(*arguments: Any) -> Any:
        found = assign(*arguments)
        return replace(found, advantage=changes[fault](found.advantage))

    monkeypatch.setattr(objective, "advantages", wrong)
    with pytest.raises(RunError, match="what is trained is not what the rewards ask for"):
        for seed in range(4):  # one trajectory of each batch
            train(*CASES[case], seed)


# --- updates ---


def steps(settings: OptimizerSettings, dtype: torch.dtype, seed: int, count: int = 12) -> Optimizer:
    """Gradients of any size, some of them 0; a tensor in four has none."""
    optimizer = Optimizer(type(MODEL)(copy.deepcopy(MODEL.config)).to(dtype), settings, count)
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        size = 10.0 ** torch.randint(-9, 3, (1,), generator=generator)
        for number, weight in enumerate(optimizer._weights):
            grad = size * torch.randn(weight.shape, generator=generator)
            weight.grad = None if (step + number) % 4 == 0 else torch.where(grad.abs() < 0.1 * size, 0, grad).to(dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.adamw, Kind.muon])
@pytest.mark.parametrize(
    "more",
    [
        {"lr": 1e-2},
        {"lr": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.999]},
        {"lr": 1.0, "betas": [0.99, 0.9], "schedule": Schedule.cosine, "warmup_steps": 5},
        {"lr": 1e-3, "betas": [0.0, 0.0], "max_grad_norm": 1e-4},
    ],
)
def test_no_sound_step_is_refused(kind: Kind, dtype: torch.dtype, more: dict[str, Any]) -> None:
    for seed in range(3):
        steps(OptimizerSettings(kind, **more), dtype, seed)


def test_a_resumed_optimiser_with_spoilt_moments_is_refused() -> None:
    first = steps(OptimizerSettings(lr=1e-3), torch.float32, 0, 5)
    state = first.state_dict()
    for values in state["states"][0].values():
        values["exp_avg_sq"].zero_()
    optimizer = steps(OptimizerSettings(lr=1e-3), torch.float32, 1, 1)
    optimizer.load_state_dict(state)
    for weight in optimizer._weights:
        weight.grad = torch.full_like(weight, 1e-9)
    with pytest.raises(RunError, match=r"a learning rate of 0\.001 explains .*the optimiser's moments"):
        optimizer.step()


def test_the_reach_of_adamw_is_its_formula_s() -> None:
    """The worst gradients there are: the inequality of Cauchy and Schwarz is reached, and never passed."""
    first, second, mean, square = 0.9, 0.95, 0.0, 0.0
    gradient = [(first / second) ** n for n in range(200)][::-1]
    for steps_done, value in enumerate(gradient, 1):
        mean, square = first * mean + (1 - first) * value, second * square + (1 - second) * value**2
        change = mean / (1 - first**steps_done) / (square / (1 - second**steps_done)) ** 0.5
        assert change <= 1.17
    assert change > 1.15
