"""Faults of learning itself: between the rewards and the weights. With those of `plants.py`, all that are tried."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plants
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import grpo
from mtgrpo.algorithms.average import Average
from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.policy import objective, optimizer, updater
from mtgrpo.policy.step import Policy
from mtgrpo.stages import update
from plants import Patch, Plant, changed, logprobs_with, run
from saving import save_model

USUAL = "the log-probabilities differ by more than rounding explains"


def negated_after_the_clip(clip: Any, parameters: Any, *rest: Any) -> Tensor:
    norm = clip(parameters, *rest)
    for parameter in parameters:
        parameter.grad.neg_()
    return norm


def advantages_with(change: Callable[[Tensor], Tensor]) -> Plant:
    def changed_advantages(assign: Any, *arguments: Any) -> Any:
        found = assign(*arguments)
        return replace(found, advantage=change(found.advantage))

    return changed(objective, "advantages", changed_advantages)


def negated_by_the_estimator(assign: Any, *arguments: Any) -> Any:
    found = assign(*arguments)
    return replace(found, advantage=-found.advantage)


def swapped_rewards(rewards_of: Any, *arguments: Any) -> Any:
    found = rewards_of(*arguments)
    return replace(found, outcome=found.outcome.view(-1, 2).flip(1).flatten())


def other_average(weigh: Any, _average: Average, *members: Any) -> Tensor:
    return weigh(Average.trajectory_mean, *members)


def one_group_alone(choose: Any, own: Any, rewards: Any) -> Tensor:
    return choose(own, rewards) & (rewards.of_tokens(rewards.group) == 0)


def moments_become(name: str, change: Callable[[Tensor], Any]) -> Plant:
    """Between two updates."""

    def step(original: Any, own: Any) -> float:
        norm = original(own)
        for inner in own._optimizers:
            for state in inner.state.values():
                if name in state:
                    state[name].copy_(change(state[name]))
        return norm

    return changed(optimizer.Optimizer, "step", step)


def weight_grows(step: Any, own: Any) -> float:
    norm = step(own)
    with torch.no_grad():
        own._weights[-1].view(-1)[1] = 1e30
    return norm


def large_lr(step: Any, own: Any, *rest: Any) -> Any:
    for group in own.param_groups:
        group["lr"] *= 1000
    return step(own, *rest)


def twice(step: Any, own: Any, *rest: Any) -> Any:
    step(own, *rest)
    return step(own, *rest)


def uphill(step: Any, own: Any, *rest: Any) -> Any:
    """Weights go the other way; their momentum is right."""
    before = [weight.detach().clone() for weight in own.param_groups[0]["params"]]
    found = step(own, *rest)
    with torch.no_grad():
        for weight, old in zip(own.param_groups[0]["params"], before, strict=True):
            weight.copy_(2 * old - weight)
    return found


LEARNING: dict[str, Plant] = {
    "gradients are negated after the clip": changed(optimizer.nn.utils, "clip_grad_norm_", negated_after_the_clip),
    "the loss is negated": changed(Policy, "_weighted", lambda weigh, *rest: -weigh(*rest)),
    "advantages are negated": advantages_with(lambda advantage: -advantage),
    "advantages are those of 7 tokens before": advantages_with(lambda advantage: advantage.roll(7)),
    "advantages are doubled": advantages_with(lambda advantage: 2 * advantage),
    "the estimator negates its advantages": changed(WholeTrajectory, "assign", negated_by_the_estimator),
    "siblings have one another's rewards": changed(update, "rewards_of", swapped_rewards),
    "the ratio is the inverse": changed(grpo, "ratio_of", lambda ratio, log_ratio: ratio(-log_ratio)),
    "tokens are weighed by another average": changed(updater, "token_weights", other_average),
    "one group alone is trained": changed(objective.Objective, "_with_gradient", one_group_alone),
    "second moments become 0": moments_become("exp_avg_sq", lambda moments: 0 * moments),
    "second moments become 1e-30": moments_become("exp_avg_sq", lambda moments: 0 * moments + 1e-30),
    "second moments become infinite": moments_become("exp_avg_sq", lambda moments: moments + torch.inf),
    "moments become NaN": moments_become("exp_avg", lambda moments: moments * torch.nan),
    "first moments are negated": moments_become("exp_avg", lambda moments: -moments),
    "momentum of Muon is negated": moments_become("momentum_buffer", lambda moments: -moments),
    "gradients are negated before Muon": changed(optimizer.nn.utils, "clip_grad_norm_", negated_after_the_clip),
    "Muon goes uphill": changed(torch.optim.Muon, "step", uphill),
    "a weight becomes 1e30": changed(optimizer.Optimizer, "step", weight_grows),
    "the learning rate is 1,000 times as large": changed(torch.optim.AdamW, "step", large_lr),
    "every update is made twice": changed(torch.optim.AdamW, "step", twice),
    "updates are lost": changed(torch.optim.AdamW, "step", lambda _step, *_: None),
    "gradients are kept after the update": changed(torch.optim.AdamW, "zero_grad", lambda *_, **__: None),
    "the engine's log-probabilities are .02 nats off": logprobs_with(lambda given: [one - 0.02 for one in given]),
}

ASKED = "what is trained is not what the rewards ask for"
OTHERWISE = "it is not the update of this gradient"
BETWEEN = "changed between two updates"
SAID = plants.SAID | {
    "gradients are negated after the clip": OTHERWISE,
    "the loss is negated": ASKED,
    "advantages are negated": ASKED,
    "advantages are those of 7 tokens before": ASKED,
    "advantages are doubled": ASKED,
    "the estimator negates its advantages": ASKED,
    "siblings have one another's rewards": ASKED,
    "the ratio is the inverse": ASKED,
    "tokens are weighed by another average": ASKED,
    "one group alone is trained": ASKED,
    "second moments become 0": BETWEEN,
    "second moments become 1e-30": BETWEEN,
    "second moments become infinite": BETWEEN,
    "moments become NaN": BETWEEN,
    "first moments are negated": BETWEEN,
    "momentum of Muon is negated": BETWEEN,
    "gradients are negated before Muon": OTHERWISE,
    "Muon goes uphill": "along its gradient, not against it",
    "a weight becomes 1e30": "something else has changed it",
    "the learning rate is 1,000 times as large": "an update changed a weight",
    "every update is made twice": OTHERWISE,
    "updates are lost": OTHERWISE,
    "gradients are kept after the update": "would be used again",
}
MUON = ("optimizer.kind=muon",)
WORDS = plants.WORDS | {"one group alone is trained": ("trainer.steps=6", "algorithm.truncated=keep")}
WORDS |= dict.fromkeys(("momentum of Muon is negated", "gradients are negated before Muon", "Muon goes uphill"), MUON)
FAULTS = plants.FAULTS | LEARNING


CONTROLS = [
    *(f"algorithm={name}" for name in ("rloo", "dapo", "dr_grpo", "gspo", "cispo", "gmpo", "sapo", "dppo")),
    "algorithm=reinforce_pp trainer.minibatch_trajectories=2",
    "algorithm=ppo advantage=gae model.value_head=true",
    *(f"advantage={name} reward=Judged" for name in ("return_to_go", "turn", "gigpo", "gae")),
    "optimizer.kind=muon optimizer.weight_decay=0.1 seed=3",
    "optimizer.betas=[0.9,0.999] optimizer.lr=1e-4 optimizer.schedule=cosine seed=4",
    "optimizer.max_grad_norm=1e-3 trainer.updates_per_batch=3 seed=5",
    "kl.coef=0.1 correction.weight=token seed=6",
    "kl.coef=0.1 kl.place=reward kl.estimator=k1 seed=7",
    "rollout.max_staleness=2 rollout.ahead=3 seed=8",
    "algorithm.top_entropy=0.3 algorithm.entropy_coef=0.01 seed=9",
]


def told_of(name: str, folder: Path, monkeypatch: Patch, seed: int = 0) -> list[str]:
    """What a run with the fault `name` tells its user, or ends with."""
    words = WORDS.get(name, ())
    if "model.lora.rank=4" in words:  # what is adapted has to be trained, and so to lie in a folder
        save_model(load_model(ModelSettings("tiny"), 0), tiny.load_tokenizer(), folder / "base")
        words = (*words, f"model.name={folder / 'base'}")
    FAULTS[name](monkeypatch)
    try:
        return run(folder, monkeypatch, *words, f"seed={seed}")
    except (ConfigError, RuntimeError, ValueError) as error:
        return [str(error)]


HOSTILE = """
from dataclasses import dataclass
from own import Varied


@dataclass
class Hostile(Varied):
    def reward(self, trajectory):
        worth = super().reward(trajectory)
        {change}
        return worth
"""
CHANGES = {  # what a reward does to the trajectory that it is given
    "a reward removes the last turn": "trajectory.turns.pop()",
    "a reward changes a sampled token": "trajectory.turns[-1].output[0] += 1",
    "a reward changes a context": "trajectory.turns[0].new_context[-1] += 1",
    "a reward changes a log-probability": "trajectory.turns[0].logprobs[0] -= 0.1",
    "a reward changes a version": "trajectory.turns[0].versions[:] = [7] * len(trajectory.turns[0].versions)",
    "a reward moves a turn": "trajectory.turns.reverse()",
    "a reward makes a turn another's": "trajectory.turns[-1].parent = 0",
    "a reward pays for a turn": "trajectory.turns[0].paid = 1000.0",
    "a reward fails its trajectory": "trajectory.status = type(trajectory.status).FAILED",
    "a reward gives rewards to turns": "trajectory.turn_rewards.extend([1000.0] * len(trajectory.turns))",
}


def losses(folder: Path, monkeypatch: Patch, change: str, seed: int = 0) -> list[tuple[float, float]]:
    """Loss and trained tokens of each step where the reward makes a `change` to what it is given; "pass" is none."""
    (folder / "hostile.py").write_text(HOSTILE.format(change=change))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    run(folder, monkeypatch, f"reward={folder / 'hostile.py'}:Hostile", f"seed={seed}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["policy/loss"], row["policy/trained_tokens"]) for row in rows if "policy/loss" in row]


def is_found(name: str, told: list[str]) -> bool:
    """Whether that names the fault."""
    signs = [SAID[name]] if name in SAID else ["of which rounding explains", "be computed exactly"]
    return any(sign in text for text in told for sign in signs)


def alarm(folder: Path, monkeypatch: Patch, words: str) -> str:
    """What a check says of six steps without a fault; "" = nothing."""
    words = words.replace("reward=Judged", f"reward={folder / 'own.py'}:Judged")
    try:
        told = run(folder, monkeypatch, "trainer.steps=6", *words.split())
    except (ConfigError, RuntimeError, ValueError) as error:
        return str(error)
    assert any(text.startswith("stopped after step 6") for text in told)
    return next((text for text in told for sign in (*SAID.values(), "rounding") if sign in text), "")
