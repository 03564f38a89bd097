"""Golden numbers of prime-rl."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import (
    SINGLE,
    Numbers,
    build_group,
    clear,
    draw_outcome,
    draw_policy,
    split,
)
from importing import load
from torch import Tensor

PEER = "prime-rl"
VERSION = "559b44772e471d1538537b8805cc77f3824a5e64"
STAND_INS = [
    *("beartype", "jaxtyping", "verifiers", "renderers", "loguru", "wandb", "msgspec"),
    *("prime_rl.configs", "prime_rl.utils", "prime_rl.transports"),
    *(f"prime_rl.orchestrator.algo.{name}" for name in ("echo", "opd", "opsd", "sft", "rae", "hierarchical_grpo")),
]
LOSS = "src/prime_rl/trainer/rl/loss.py"


def build_groups() -> list[Numbers]:
    return [*advantages(), *losses()]


def score(module: str, symbol: str, algorithm: SimpleNamespace, traces: list[SimpleNamespace]) -> list[float]:
    """The advantages that an algorithm's score_group gives to one group of traces."""
    peer = load(f"prime_rl.orchestrator.algo.{module}")
    given: list[float] = []
    peer.assign_advantages = lambda _, advantage: given.append(advantage)
    asyncio.run(getattr(peer, symbol).score_group(algorithm, [SimpleNamespace(traces=traces)]))
    return given


def trace(reward: float, **counts: int) -> SimpleNamespace:
    node = SimpleNamespace(mask=[True])
    return SimpleNamespace(
        reward=reward, has_error=False, agent=SimpleNamespace(trainable=True), nodes=[node], **counts
    )


def advantages() -> list[Numbers]:
    def compute_with(module: str, symbol: str, weights: Numbers | None) -> Any:
        penalty = SimpleNamespace(**{f"num_{name}_weight": w for name, w in weights.items()}) if weights else None

        def compute(inputs: Numbers) -> Numbers:
            result: list[float] = []
            for name in sorted(set(inputs["group"])):
                members = [i for i, group in enumerate(inputs["group"]) if group == name]
                counts = [{key: inputs[key][i] for key in inputs if key.startswith("num_")} for i in members]
                traces = [trace(inputs["rewards"][i], **c) for i, c in zip(members, counts, strict=True)]
                result += score(module, symbol, SimpleNamespace(length_penalty=penalty), traces)
            pairs = zip(result, inputs["lengths"], strict=True)
            return {"advantage": [value for value, length in pairs for _ in range(length)]}

        return compute

    def draw_counts(rng: random.Random) -> Numbers:
        inputs = draw_outcome()(rng)
        turns = [rng.randint(1, 8) for _ in inputs["group"]]
        output = [rng.randint(8, 64) for _ in turns]
        total = [count + rng.randint(8, 64) for count in output]
        return {**inputs, "num_output_tokens": output, "num_total_tokens": total, "num_turns": turns}

    def one(what: str, module: str, symbol: str, settings: Numbers, note: str, draw: Any) -> Numbers:
        where = (f"src/prime_rl/orchestrator/algo/{module}.py", f"{symbol}.score_group")
        compute = compute_with(module, symbol, settings or None)
        return build_group("advantage", what, where, settings, draw, compute, note, tolerance=SINGLE)

    weights = {"output_tokens": 0.25, "input_tokens": 0.125, "turns": 0.0625}
    penalty = (
        "R - mean(R) * sum of weight * count / largest count of the group, then minus the mean of the group; "
        "counts are the tokens put out, the other tokens (total - output) and the turns of a trajectory"
    )
    max_rl = "(R - mean of the group) / mean of the group, and 0 where that mean is not positive"
    return [
        one("dr_grpo", "grpo", "GRPOAlgorithm", {}, "", draw_outcome()),
        one("grpo_length_penalty", "grpo", "GRPOAlgorithm", weights, penalty, draw_counts),
        one("max_rl", "max_rl", "MaxRLAlgorithm", {}, max_rl, draw_outcome()),
    ]


def losses() -> list[Numbers]:
    def one(what: str, symbol: str, settings: Numbers, options: Numbers, note: str, bounds: list[float]) -> Numbers:
        config = SimpleNamespace(adv_tau=1.0, **options)

        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            logp = torch.tensor(inputs["logp"], dtype=torch.float64, requires_grad=True)
            peer = load("prime_rl.trainer.rl.loss")

            def rows(name: str) -> list[Tensor]:
                return [torch.tensor(part, dtype=torch.float64) for part in split(inputs[name], lengths)]

            loss, _ = peer.compute_loss(
                trainer_logprobs=list(logp.split(lengths)),
                inference_logprobs=rows("behaviour_logp"),
                ref_logprobs=None,
                advantages=rows("advantage"),
                loss_mask=[torch.ones(length, dtype=torch.bool) for length in lengths],
                rl_weights=None,
                ce_weights=None,
                ref_kl_weights=None,
                rl_loss_fn=lambda given: getattr(peer, symbol)(given, config),
                rl_scale=len(logp),
                ce_scale=1,
                ref_kl_scale=1,
            )
            (gradient,) = torch.autograd.grad(loss, logp)
            return {"loss": loss, "gradient": gradient}

        def draw(rng: random.Random) -> Numbers:
            inputs = draw_policy(0.8)(rng)
            inputs["behaviour_logp"] = inputs.pop("old_logp")
            return inputs

        def safe(inputs: Numbers) -> bool:
            return clear((np.exp(inputs["logp"]) - np.exp(inputs["behaviour_logp"])).tolist(), bounds)

        return build_group("loss", what, (LOSS, symbol), settings, draw, compute, note, safe=safe)

    kimi = {"kl_tau": 1 / 8}
    average = {"average": "token_mean", "beta": 1 / 8}
    dppo = (
        "-A * ratio (not truncated) unless the token's probability rose by more than clip_high (A > 0) or fell by more "
        "than clip_low (A <= 0); plus beta * (logp - behaviour_logp)^2 on every token"
    )
    ipo = "as dppo, but a token is dropped if its probability moved by more than clip_high, whatever the advantage"
    bounds = {"clip_low": 0.2, "clip_high": 0.15}
    masks = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.15}
    threshold = {"ipo_threshold": 0.15}
    return [
        one("dppo", "default_loss_fn", {**bounds, **average}, {**masks, **kimi}, dppo, [-0.2, 0.15]),
        one("ipo", "ipo_loss_fn", {"clip_high": 0.15, **average}, {**threshold, **kimi}, ipo, [-0.15, 0.15]),
    ]
