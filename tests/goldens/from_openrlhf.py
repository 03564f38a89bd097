"""Golden numbers of OpenRLHF."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from cases import (
    CLOSE,
    EXACT,
    SINGLE,
    Compute,
    Numbers,
    Safe,
    build_group,
    differentiate,
    differentiate_average,
    differentiate_kl,
    differentiate_value_loss,
    draw_kl,
    draw_lengths,
    draw_losses,
    draw_outcome,
    draw_policy,
    draw_steps,
    draw_values,
    ones,
    pad,
    sequences_clear,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "OpenRLHF"
VERSION = "0.11.2"
STAND_INS = [
    *("ray", "deepspeed", "flash_attn", "ring_flash_attn", "liger_kernel", "vllm", "optimum", "torchdata", "wandb"),
    *(
        "pylatexenc",
        "openrlhf.models.actor",
        "openrlhf.models.model",
        "openrlhf.trainer.ray",
        "openrlhf.trainer.ppo_trainer",
    ),
]
LOSS = "openrlhf/models/loss.py"
MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"
WHITENED = "then minus the mean over all tokens, divided by the standard deviation (ddof 0, variance at least 1e-8)"


def build_groups() -> list[Numbers]:
    return [*outcome_advantages(), *token_advantages(), overlong(), *losses(), value_loss(), *averages(), *kl()]


def maker(estimator: str, gamma: float = 1.0, lam: float = 1.0, group_size: int = 1) -> Any:
    """An experience maker without its models: only what compute_advantages_and_returns reads."""
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        reward=SimpleNamespace(clip_range=None),
    )
    kind = load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    return kind(None, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=args), None)


def outcome_advantages() -> list[Numbers]:
    def compute_with(estimator: str) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            experience = SimpleNamespace(
                rewards=torch.tensor(inputs["rewards"], dtype=torch.float64),
                index=list(range(len(lengths))),
                action_mask=ones(lengths),
                kl=torch.zeros_like(ones(lengths)),
                info={},
            )
            result = maker(estimator, group_size=inputs["group"].count(0)).compute_advantages_and_returns([experience])
            return {"advantage": unpad(result[0].advantages, lengths)}

        return compute

    def one(what: str, estimator: str, settings: Numbers, note: str = "", tolerance: float = EXACT) -> Numbers:
        where = (MAKER, "RemoteExperienceMaker.compute_advantages_and_returns")
        draw = draw_outcome(same_size=True)
        return build_group("advantage", what, where, settings, draw, compute_with(estimator), note, tolerance=tolerance)

    baseline = f"R - mean of the group, {WHITENED}"
    return [
        one("grpo", "group_norm", {"eps": 1e-9, "ddof": 1}),
        one("dr_grpo", "dr_grpo", {}),
        one("rloo", "rloo", {}),
        one("reinforce_pp_baseline", "reinforce_baseline", {"eps": 1e-8, "ddof": 0}, baseline, SINGLE),
    ]


def token_advantages() -> list[Numbers]:
    def gae(gamma: float, lam: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            values, rewards, mask = (pad(inputs[name], lengths) for name in ("values", "token_rewards", "mask"))
            advantage, returns = maker("gae").get_advantages_and_returns(values, rewards, mask, gamma, lam)
            return {"advantage": unpad(advantage, lengths), "returns": unpad(returns, lengths)}

        return compute

    def returns(gamma: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            rewards, mask = pad(inputs["token_rewards"], lengths), pad(inputs["mask"], lengths)
            return {"returns": unpad(maker("reinforce").get_cumulative_returns(rewards, mask, gamma), lengths)}

        return compute

    note = (
        "no whitening. Every token is sampled: with observation tokens in between this peer sets their value to 0 "
        "and discounts over them, where verl carries the next value across"
    )
    sampled = draw_steps(observations=False)
    groups: list[Numbers] = []
    for gamma, lam in [(1.0, 1.0), (0.99, 0.95)]:
        where = (MAKER, "RemoteExperienceMaker.get_advantages_and_returns")
        settings = {"gamma": gamma, "lam": lam}
        groups.append(build_group("advantage", "gae_token", where, settings, sampled, gae(gamma, lam), note))
    where = (MAKER, "RemoteExperienceMaker.get_cumulative_returns")
    groups.append(build_group("advantage", "reinforce_pp", where, {"gamma": 0.9}, sampled, returns(0.9), note))
    return groups


def overlong() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        lengths = torch.tensor(inputs["lengths"])
        experience = SimpleNamespace(response_length=lengths, rewards=torch.zeros(len(lengths), dtype=torch.float64))
        load("openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty([experience], 64, 16, 0.5)
        return {"penalty": experience.rewards}

    where = ("openrlhf/trainer/ppo_utils/length_penalty.py", "apply_overlong_penalty")
    settings = {"max_length": 64, "buffer": 16, "factor": 0.5}
    return build_group("reward", "dapo_overlong", where, settings, draw_lengths, compute, "-factor beyond max_length")


def policy(settings: Numbers, **given: Any) -> Compute:
    options: dict[str, Any] = {"clip_eps_low": settings["clip_low"], "clip_eps_high": settings["clip_high"]}
    options |= {"dual_clip": settings.get("dual_clip"), "token_level_loss": settings["average"] == "token_mean"}

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        behaviour = pad(inputs["behaviour_logp"], lengths) if "behaviour_logp" in inputs else None
        old, advantage = pad(inputs["old_logp"], lengths), pad(inputs["advantage"], lengths)

        def loss(logp: Tensor) -> Tensor:
            loss_of = load("openrlhf.models.loss").PolicyLoss(**options, **given)
            return loss_of(logp, old, advantage, ones(lengths), rollout_log_probs=behaviour)[0]

        return differentiate(inputs, loss)

    return compute


def losses() -> list[Numbers]:
    bounds = [0.5, 0.8, 1.2, 1.28, 1.5, 3.0]

    def one(
        what: str, settings: Numbers, note: str = "", spread: float = 0.4, safe: Safe | None = None, **given: Any
    ) -> Numbers:
        extra = ["behaviour_logp"] if "is_correction_level" in given else []
        compute = policy(settings, **given)
        where, draw = (LOSS, "PolicyLoss.forward"), draw_policy(spread, bounds, extra)
        tolerance = CLOSE if settings["average"] == "trajectory_mean" else EXACT
        safe = safe or (lambda _: True)
        return build_group("loss", what, where, settings, draw, compute, note, safe=safe, tolerance=tolerance)

    def corrected(what: str, level: str, mode: str, note: str, low: float, high: float) -> Numbers:
        settings = {**higher, "average": "token_mean", "low": low, "high": high}
        safe = sequences_clear("old_logp", "behaviour_logp", means=[low, high])
        threshold = {"is_correction_threshold": [low, high]}
        note = f"ratio = exp(old_logp - behaviour_logp), a constant factor on the loss of each token; {note}"
        return one(what, settings, note, 0.4, safe, is_correction_level=level, is_correction_mode=mode, **threshold)

    same, higher = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
    narrow = {"clip_low": 0.03, "clip_high": 0.04, "average": "trajectory_mean"}
    near = sequences_clear("logp", "old_logp", [0.97, 1.04])
    return [
        one("grpo", {**same, "average": "trajectory_mean"}),
        one("grpo", {**higher, "dual_clip": 3.0, "average": "token_mean"}),
        one("dapo", {**higher, "average": "token_mean"}),
        one("gspo", narrow, "gradient through the mean log ratio", 0.1, near, policy_loss_type="gspo"),
        corrected("grpo_with_token_tis", "token", "clip", "clamped to [low, high]", 0.5, 1.5),
        corrected("grpo_with_token_mis", "token", "mask", "0 outside [low, high]", 0.5, 1.5),
        corrected(
            "grpo_with_geometric_mis",
            "seq",
            "mask",
            "0 for trajectories whose geometric mean ratio is outside [low, high]; dropped tokens stay in the average",
            0.9,
            1.1,
        ),
    ]


def value_loss() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        return differentiate_value_loss(inputs, load("openrlhf.models.loss").ValueLoss(clip_eps=0.2))

    settings = {"clip_low": 0.2, "clip_high": 0.2, "average": "token_mean"}
    note = "half the larger of the clipped and the plain squared error; the gradient is by 'values'"
    return build_group("loss", "value_loss", (LOSS, "ValueLoss.forward"), settings, draw_values, compute, note)


def averages() -> list[Numbers]:
    def average(token_mean: bool) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            aggregate = load("openrlhf.models.loss").aggregate_loss
            return differentiate_average(inputs, lambda losses, mask: aggregate(losses, mask, token_mean))

        return compute

    where, note = (LOSS, "aggregate_loss"), "weights are d loss / d token_loss"
    return [
        build_group(
            "average", name, where, {"average": name}, draw_losses, average(name == "token_mean"), note, tolerance=CLOSE
        )
        for name in ("token_mean", "trajectory_mean")
    ]


def kl() -> list[Numbers]:
    def estimator(name: str, unbiased: bool) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            approximate = load("openrlhf.models.utils").compute_approx_kl
            return differentiate_kl(inputs, lambda logp, ref, old: approximate(logp, ref, old, name, unbiased))

        return compute

    where = ("openrlhf/models/utils.py", "compute_approx_kl")
    note = "the value of k3; the gradient is exp(logp - old_logp) * (logp - ref_logp)"
    plain = [
        build_group("kl", name, where, {}, draw_kl, estimator(name, False), tolerance=SINGLE)
        for name in ("k1", "k2", "k3")
    ]
    return [*plain, build_group("kl", "k3_unbiased", where, {}, draw_kl, estimator("k3", True), note, tolerance=SINGLE)]
