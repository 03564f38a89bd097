"""Golden numbers of SkyRL."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import (
    CLOSE,
    EXACT,
    SINGLE,
    Compute,
    Draw,
    Numbers,
    Safe,
    build_group,
    clear,
    differentiate,
    differentiate_kl,
    differentiate_value_loss,
    draw_kl,
    draw_losses,
    draw_mismatch,
    draw_outcome,
    draw_policy,
    draw_steps,
    draw_values,
    last,
    ones,
    pad,
    sequences_clear,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "SkyRL"
VERSION = "0.3.0"
STAND_INS = ["ray", "jaxtyping", "loguru", "skyrl.train", "skyrl.tinker"]
CORE = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
OFF = {
    "tis_ratio_type": None,
    "sequence_mask_metric": None,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}
AVERAGES = {
    "token_mean": "token_mean",
    "trajectory_mean": "sequence_mean",
    "prompt_mean": "prompt_mean",
    "constant": "seq_mean_token_sum_norm",
}


def build_groups() -> list[Numbers]:
    return [
        *outcome_advantages(),
        *token_advantages(),
        *losses(),
        value_loss(),
        *averages(),
        *kl(),
        *corrections(),
    ]


def core() -> Any:
    return load("skyrl.backends.skyrl_train.utils.ppo_utils")


def outcome_advantages() -> list[Numbers]:
    std, alone = {"eps": 1e-6, "ddof": 1}, {"singletons": True}

    def one(what: str, name: str, settings: Numbers, note: str = "", **options: Any) -> Numbers:
        symbol = f"compute_{name}_advantage"

        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            advantage, _ = getattr(core(), symbol)(
                token_level_rewards=last(inputs["rewards"], lengths),
                response_mask=ones(lengths),
                index=np.array(inputs["group"]),
                **options,
            )
            return {"advantage": unpad(advantage, lengths)}

        size = (1, 3) if settings.get("singletons") else (2, 5)
        tolerance = CLOSE if settings == {**std, **alone} else EXACT
        return build_group(
            "advantage", what, (CORE, symbol), settings, draw_outcome(size), compute, note, tolerance=tolerance
        )

    raw = "a group of one is given mean 0 and std 1: its advantage is the reward itself"
    return [
        one("grpo", "grpo_outcome", std),
        one("grpo", "grpo_outcome", {**std, **alone}, raw),
        one("dr_grpo", "grpo_outcome", {}, grpo_norm_by_std=False),
        one("rloo", "rloo_outcome", {}),
        one("rloo", "rloo_outcome", alone, "a group of one gets 0"),
    ]


def token_advantages() -> list[Numbers]:
    def gae(gamma: float, lam: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            rewards, values, mask = (pad(inputs[name], lengths) for name in ("token_rewards", "values", "mask"))
            whitened, returns = core().compute_gae_advantage_return(rewards, values, mask, gamma, lam)
            named = {"advantage": returns - values, "returns": returns, "whitened": whitened}
            return {name: unpad(value, lengths) for name, value in named.items()}

        return compute

    def reinforce(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        rewards, mask = pad(inputs["token_rewards"], lengths), pad(inputs["mask"], lengths)
        whitened, returns = core().compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.9)
        return {"advantage": unpad(whitened, lengths), "returns": unpad(returns, lengths)}

    sampled = draw_steps(observations=False)
    note = "every token is sampled: this peer treats observation tokens in between like any other, verl skips them"
    reset = "every token is sampled: this peer drops the running return at a token with mask 0, verl carries it across"
    whitening = "; whitening (x - mean) * rsqrt(var + 1e-8) over all tokens, var with ddof 1"
    groups: list[Numbers] = []
    for gamma, lam in [(1.0, 1.0), (0.99, 0.95)]:
        settings = {"gamma": gamma, "lam": lam, "eps": 1e-8}
        where = (CORE, "compute_gae_advantage_return")
        groups.append(
            build_group("advantage", "gae_token", where, settings, sampled, gae(gamma, lam), note + whitening)
        )
    where, settings = (CORE, "compute_reinforce_plus_plus_outcome_advantage"), {"gamma": 0.9, "eps": 1e-8}
    groups.append(build_group("advantage", "reinforce_pp", where, settings, sampled, reinforce, reset + whitening))
    return groups


def scaled(values: Tensor, inputs: Numbers, average: str, length: int | None) -> Tensor:
    """Advantages made so that the sum of the losses is the average wanted; a prompt is a group of trajectories."""
    ends = np.cumsum([len(list(members)) for _, members in groupby(inputs["group"])]).tolist()
    return core().apply_loss_reduction_to_advantages_minibatch(
        advantages=values,
        loss_mask=ones(inputs["lengths"]),
        loss_reduction=AVERAGES[average],
        micro_batch_size=1,
        max_seq_len=length,
        prompt_boundaries=list(zip([0, *ends[:-1]], ends, strict=True)),
    )


def policy(name: str, settings: Numbers) -> Compute:
    clip = {"eps_clip_low": settings.get("clip_low"), "eps_clip_high": settings.get("clip_high")}
    config = SimpleNamespace(
        **clip,
        policy_loss_type="dual_clip" if "dual_clip" in settings else "regular",
        clip_ratio_c=settings.get("dual_clip"),
        loss_reduction="sequence_mean",
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        cispo=SimpleNamespace(**{f"cispo_{key}": value for key, value in clip.items()}),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=clip["eps_clip_low"], delta_high=clip["eps_clip_high"]),
        off_policy_correction=SimpleNamespace(**OFF),
    )

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        raw = pad(inputs["advantage"], lengths)
        advantage = scaled(raw, inputs, settings["average"], settings.get("length"))
        old = pad(inputs["old_logp"], lengths)
        return differentiate(inputs, lambda logp: getattr(core(), name)(logp, old, advantage, config, ones(lengths))[0])

    return compute


def losses() -> list[Numbers]:
    def one(
        what: str,
        name: str,
        settings: Numbers,
        note: str = "",
        draw: Draw | None = None,
        safe: Safe = lambda _: True,
        tolerance: float = SINGLE,
    ) -> Numbers:
        draw = draw or draw_policy(bounds=[0.8, 1.2, 1.28, 3.0])
        compute = policy(name, settings)
        return build_group("loss", what, (CORE, name), settings, draw, compute, note, safe=safe, tolerance=tolerance)

    def probability_is_clear(inputs: Numbers) -> bool:
        return clear((np.exp(inputs["logp"]) - np.exp(inputs["old_logp"])).tolist(), [-0.2, 0.15])

    clip, higher = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
    token, trajectory = {"average": "token_mean"}, {"average": "trajectory_mean"}
    taus = {"tau_positive": 1.0, "tau_negative": 1.05}
    narrow = {"clip_low": 0.03, "clip_high": 0.04}
    near = sequences_clear("logp", "old_logp", [0.97, 1.04])
    dppo = "clip_* bound the change of the token's probability; gradient through the ratio, which is not truncated"
    return [
        one("grpo", "ppo_policy_loss", {**clip, **trajectory}),
        one("grpo", "ppo_policy_loss", {**higher, "dual_clip": 3.0, **token}),
        one("grpo", "ppo_policy_loss", {**clip, "average": "prompt_mean"}),
        one("dapo", "ppo_policy_loss", {**higher, **token}),
        one("dr_grpo", "ppo_policy_loss", {**clip, "average": "constant", "length": 16}),
        one("gspo", "gspo_policy_loss", {**narrow, **trajectory}, "", draw_policy(0.1), near, EXACT),
        one("cispo", "compute_policy_loss_cispo", {**higher, **token}, "clipped on both sides"),
        one("sapo", "sapo_policy_loss", {**taus, **trajectory}, tolerance=EXACT),
        one(
            "dppo",
            "dppo_policy_loss",
            {"clip_low": 0.2, "clip_high": 0.15, **token},
            dppo,
            draw_policy(0.8),
            probability_is_clear,
        ),
    ]


def value_loss() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
            return core().ppo_critic_loss(values, old, returns, SimpleNamespace(value_clip=0.2), mask)[0]

        return differentiate_value_loss(inputs, loss)

    settings = {"clip_low": 0.2, "clip_high": 0.2, "average": "trajectory_mean"}
    note = "half the larger of the clipped and the plain squared error; the gradient is by 'values'"
    return build_group("loss", "value_loss", (CORE, "ppo_critic_loss"), settings, draw_values, compute, note)


def averages() -> list[Numbers]:
    def average(name: str, length: int | None) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            losses = pad(inputs["token_loss"], inputs["lengths"])
            weights = unpad(scaled(torch.ones_like(losses), inputs, name, length), inputs["lengths"])
            return {"loss": scaled(losses, inputs, name, length).sum(), "weights": weights}

        return compute

    groups: list[Numbers] = []
    for name, mode in AVERAGES.items():
        length = 16 if name == "constant" else None
        settings = {"average": name} | ({"length": 16} if length else {})
        note = f"loss_reduction {mode}; a prompt is a group; weights are d loss / d token_loss"
        where = (CORE, "apply_loss_reduction_to_advantages_minibatch")
        groups.append(build_group("average", name, where, settings, draw_losses, average(name, length), note))
    return groups


def kl() -> list[Numbers]:
    def estimator(name: str) -> Compute:
        def estimate(logp: Tensor, ref: Tensor, _: Tensor) -> Tensor:
            return core().compute_approx_kl(logp, ref, kl_estimator_type=name)

        return partial(differentiate_kl, estimate=estimate)

    where = (CORE, "compute_approx_kl")
    return [build_group("kl", name, where, {}, draw_kl, estimator(name)) for name in ("k1", "k2", "k3")]


def corrections() -> list[Numbers]:
    def compute_with(options: dict[str, Any]) -> Compute:
        config = SimpleNamespace(**{**OFF, **options})

        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            old, behaviour = pad(inputs["old_logp"], lengths), pad(inputs["behaviour_logp"], lengths)
            function = load(
                "skyrl.backends.skyrl_train.utils.off_policy_correction_utils"
            ).compute_off_policy_correction
            weights, _, mask = function(old, behaviour, ones(lengths), config)
            kept = unpad(mask, lengths).long()
            if weights is None:
                return {"kept": kept}
            return {"weights": unpad(weights.expand_as(mask), lengths), "kept": kept}

        return compute

    product, geometric = {"sequence_mask_metric": "product"}, {"sequence_mask_metric": "geometric"}
    outlier = {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0}
    masked = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 1.5}
    kinds: list[tuple[str, Numbers, dict[str, Any]]] = [
        ("token_tis", {"high": 1.5}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5}),
        ("sequence_tis", {"high": 2.0}, {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 2.0}),
        ("token_rejection", {"low": 0.5, "high": 1.5}, masked),
        (
            "sequence_rejection",
            {"low": 0.5, "high": 1.5},
            {**product, "product_mask_low": 0.5, "product_mask_high": 1.5},
        ),
        ("geometric_rejection", {"low": 0.9, "high": 1.1}, {**geometric, "geo_mask_low": 0.9, "geo_mask_high": 1.1}),
        ("veto", {"low": 0.5, "high": 2.0}, outlier),
    ]
    note = "ratio = exp(old_logp - behaviour_logp); a veto drops a trajectory for one token outside [low, high]"
    safe = sequences_clear("old_logp", "behaviour_logp", [0.9, 1.1], [0.5, 1.5, 2.0])
    where = (CORRECTION, "compute_off_policy_correction")
    return [
        build_group(
            "correction", what, where, settings, draw_mismatch, compute_with(options), note, safe=safe, tolerance=SINGLE
        )
        for what, settings, options in kinds
    ]
