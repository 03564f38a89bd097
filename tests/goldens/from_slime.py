"""Golden numbers of slime."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from cases import (
    SINGLE,
    Compute,
    Draw,
    Numbers,
    Safe,
    build_group,
    clear,
    differentiate_kl,
    draw_kl,
    draw_mismatch,
    draw_policy,
    draw_shape,
    draw_steps,
    number,
    sequences_clear,
    split,
    trajectory_means,
)
from importing import load
from torch import Tensor

PEER = "slime"
VERSION = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
STAND_INS = ["megatron", "ray", "sglang", "slime.utils.distributed_utils", "slime.utils.misc", "slime.utils.types"]
MATHS = "slime/utils/ppo_utils.py"
LOSS = "slime/backends/megatron_utils/loss.py"


def build_groups() -> list[Numbers]:
    load("megatron.core").mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    return [*gae(), *losses(), *averages(), *kl(), *corrections(), off_policy_mask()]


def maths() -> Any:
    return load("slime.utils.ppo_utils")


def rows(inputs: Numbers, name: str) -> list[Tensor]:
    return [torch.tensor(part, dtype=torch.float64) for part in split(inputs[name], inputs["lengths"])]


def all_sampled(inputs: Numbers) -> list[Tensor]:
    return [torch.ones(length, dtype=torch.float64) for length in inputs["lengths"]]


def mean(losses: Tensor, inputs: Numbers, trajectory: list[int], per_token: bool) -> Tensor:
    """The mean over tokens, or over trajectories of the mean over the tokens of all their segments."""
    masks, lengths = all_sampled(inputs), inputs["lengths"]
    totals = {name: sum(n for n, t in zip(lengths, trajectory, strict=True) if t == name) for name in trajectory}
    denominators = [torch.tensor(float(totals[name]), dtype=torch.float64) for name in trajectory]
    function = load("slime.backends.megatron_utils.cp_utils").get_sum_of_sample_mean
    total = function(lengths, lengths, masks, denominators, per_token)(losses)
    return total / (sum(lengths) if per_token else len(totals))


def gae() -> list[Numbers]:
    def compute_with(gamma: float, lam: float, chunked: bool) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            advantage, returns = maths().get_advantages_and_returns_batch(
                lengths, lengths, rows(inputs, "values"), rows(inputs, "token_rewards"), gamma, lam, chunked
            )
            return {"advantage": torch.cat(advantage), "returns": torch.cat(returns)}

        return compute

    note = "no whitening. Every token is sampled: this peer treats observation tokens in between like any other"
    where = (MATHS, "get_advantages_and_returns_batch")
    groups: list[Numbers] = []
    for gamma, lam, chunked in [(1.0, 1.0, False), (0.99, 0.95, True)]:
        settings = {"gamma": gamma, "lam": lam}
        compute = compute_with(gamma, lam, chunked)
        groups.append(build_group("advantage", "gae_token", where, settings, draw_steps(False), compute, note))
    return groups


def losses() -> list[Numbers]:
    def one(
        what: str, symbol: str, settings: Numbers, note: str = "", draw: Draw | None = None, safe: Safe = lambda _: True
    ) -> Numbers:
        def compute(inputs: Numbers) -> Numbers:
            logp = torch.tensor(inputs["logp"], dtype=torch.float64, requires_grad=True)
            old, advantage = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("old_logp", "advantage"))
            kl = old - logp
            if what == "gspo":
                new = list(logp.split(inputs["lengths"]))
                kl = maths().compute_gspo_kl(new, rows(inputs, "old_logp"), new, all_sampled(inputs))
            given = (kl, logp, advantage) if what == "cispo" else (kl, advantage)
            options = {"eps_clip_c": settings["dual_clip"]} if "dual_clip" in settings else {}
            token_losses, _ = getattr(maths(), symbol)(*given, settings["clip_low"], settings["clip_high"], **options)
            trajectory = list(range(len(inputs["lengths"])))
            loss = mean(token_losses, inputs, trajectory, settings["average"] == "token_mean")
            (gradient,) = torch.autograd.grad(loss, logp)
            return {"loss": loss, "gradient": gradient}

        draw = draw or draw_policy(bounds=[0.8, 1.2, 1.28, 3.0])
        return build_group("loss", what, (MATHS, symbol), settings, draw, compute, note, safe=safe)

    same, higher = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
    token, trajectory = {"average": "token_mean"}, {"average": "trajectory_mean"}
    narrow = {"clip_low": 0.03, "clip_high": 0.04, **trajectory}
    near = sequences_clear("logp", "old_logp", [0.97, 1.04])
    gspo = "gradient through the mean log ratio"
    return [
        one("grpo", "compute_policy_loss", {**same, **trajectory}),
        one("grpo", "compute_policy_loss", {**higher, "dual_clip": 3.0, **token}),
        one("dapo", "compute_policy_loss", {**higher, **token}),
        one("gspo", "compute_policy_loss", narrow, gspo, draw_policy(0.1), near),
        one("cispo", "compute_cispo_loss", {"clip_low": 1.0, "clip_high": 0.28, **token}, "clip_low 1: no lower bound"),
    ]


def averages() -> list[Numbers]:
    def draw(rng: random.Random) -> Numbers:
        """Trajectories of one to three segments; a row is a segment."""
        inputs = draw_shape(rng, (2, 3), (1, 2))
        trajectory = [index for index in range(len(inputs["group"])) for _ in range(rng.randint(1, 3))]
        lengths = [rng.randint(1, 5) for _ in trajectory]
        groups = [inputs["group"][index] for index in trajectory]
        token_loss = [number(rng, -2, 2) for _ in range(sum(lengths))]
        return {"group": groups, "trajectory": trajectory, "lengths": lengths, "token_loss": token_loss}

    def average(per_token: bool) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            losses = torch.tensor(inputs["token_loss"], dtype=torch.float64, requires_grad=True)
            loss = mean(losses, inputs, inputs["trajectory"], per_token)
            (weights,) = torch.autograd.grad(loss, losses)
            return {"loss": loss, "weights": weights}

        return compute

    where = ("slime/backends/megatron_utils/cp_utils.py", "get_sum_of_sample_mean")
    note = "rows are segments of a trajectory; weights are d loss / d token_loss"
    return [
        build_group("average", name, where, {"average": name}, draw, average(name == "token_mean"), note)
        for name in ("trajectory_mean", "token_mean")
    ]


def kl() -> list[Numbers]:
    def estimate(logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
        return maths().compute_approx_kl(logp, ref, "k3", importance_ratio=torch.exp(logp - old))

    def compute(inputs: Numbers) -> Numbers:
        return differentiate_kl(inputs, estimate)

    note = "k3 times exp(logp - old_logp), with the gradient through both"
    return [
        build_group("kl", "k3_corrected", (MATHS, "compute_approx_kl"), {}, draw_kl, compute, note, tolerance=SINGLE)
    ]


def corrections() -> list[Numbers]:
    def one(what: str, symbol: str) -> Numbers:
        def compute(inputs: Numbers) -> Numbers:
            weights, _, _ = getattr(load("slime.backends.megatron_utils.loss"), symbol)(
                SimpleNamespace(tis_clip_low=0.5, tis_clip=1.5),
                pg_loss=torch.ones(len(inputs["old_logp"]), dtype=torch.float64),
                train_log_probs=rows(inputs, "old_logp"),
                rollout_log_probs=rows(inputs, "behaviour_logp"),
                loss_masks=all_sampled(inputs),
            )
            return {"weights": weights, "kept": (weights > 0).long()}

        note = "ratio = exp(old_logp - behaviour_logp); weights are the losses that come out for losses of 1"
        settings = {"low": 0.5, "high": 1.5}
        return build_group("correction", what, (LOSS, symbol), settings, draw_mismatch, compute, note)

    return [one("token_tis", "vanilla_tis_function"), one("token_mis", "icepop_function")]


def off_policy_mask() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        tensors = [rows(inputs, name) for name in ("logp", "old_logp", "advantage")]
        kept, _ = maths().compute_opsm_mask(SimpleNamespace(opsm_delta=0.05), *tensors, all_sampled(inputs))
        return {"kept": kept.long()}

    def safe(inputs: Numbers) -> bool:
        logs = [a - b for a, b in zip(inputs["old_logp"], inputs["logp"], strict=True)]
        return clear(trajectory_means(logs, inputs["lengths"]), [0.05])

    note = "a trajectory is dropped if its advantage is negative and the mean of old_logp - logp is above 'high'"
    where = (MATHS, "compute_opsm_mask")
    return build_group(
        "correction", "off_policy_sequence_mask", where, {"high": 0.05}, draw_policy(0.3), compute, note, safe=safe
    )
