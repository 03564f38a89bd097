"""Golden numbers of AReaL."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cases import (
    EXACT,
    SINGLE,
    Compute,
    Draw,
    Numbers,
    Safe,
    build_group,
    differentiate,
    differentiate_kl,
    differentiate_value_loss,
    draw_kl,
    draw_lengths,
    draw_mismatch,
    draw_outcome,
    draw_policy,
    draw_steps,
    draw_values,
    ones,
    pad,
    sequences_clear,
    split,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "AReaL"
VERSION = "cbff54d645d2cd8ee1f1c358a82f3f473588433d"
STAND_INS = [
    *("einops", "torchdata", "numba", "areal.api", "areal.infra", "areal.utils.logging", "areal.utils.stats_tracker"),
    *("areal.utils.perf_tracer", "areal.v2", "areal.trainer.rl_trainer", "areal.trainer.sft_trainer"),
    *("areal.trainer.rw_trainer", "areal.trainer.dpo_trainer", "areal.trainer.ppo.critic"),
]
FUNCTIONS = "areal/utils/functional/functional.py"
GAE = "areal/trainer/ppo/gae.py"
DATA = "areal/utils/data.py"
RATIO = {"metric": "ratio", "agg": "mean"}


def build_groups() -> list[Numbers]:
    return [
        *outcome_advantages(),
        *gae_token(),
        *gae_turn(),
        overlong(),
        *losses(),
        value_loss(),
        *proximal(),
        *kl(),
        *corrections(),
    ]


def functions() -> Any:
    return load("areal.utils.functional.functional")


def outcome_advantages() -> list[Numbers]:
    def one(what: str, settings: Numbers, note: str = "", **given: Any) -> Numbers:
        levels = {"mean_level": "group", "mean_leave1out": False, "std_level": None, "std_unbiased": True}
        config = SimpleNamespace(**{**levels, "group_size": None, "eps": 1e-5, **given})

        def compute(inputs: Numbers) -> Numbers:
            group = inputs["group"]
            sizes = [group.count(name) for name in sorted(set(group))]
            rewards = torch.tensor(inputs["rewards"], dtype=torch.float64)
            result = load("areal.utils.data").Normalization(config)(rewards, group_sizes=sizes).tolist()
            pairs = zip(result, inputs["lengths"], strict=True)
            return {"advantage": [value for value, length in pairs for _ in range(length)]}

        draw = draw_outcome((1, 3) if settings.get("singletons") else (2, 5))
        where = (DATA, "Normalization.__call__")
        return build_group("advantage", what, where, settings, draw, compute, note, tolerance=SINGLE)

    std, alone = {"eps": 1e-5, "ddof": 1}, {"singletons": True}
    return [
        one("grpo", std, std_level="group"),
        one("grpo", {"eps": 1e-5, "ddof": 0}, "std_unbiased=False", std_level="group", std_unbiased=False),
        one("grpo", {**std, **alone}, "a group of one gets 0", std_level="group"),
        one("grpo_batch_std", std, "mean of the group; std of R - mean of the group over the batch", std_level="batch"),
        one("rloo", alone, "a group of one gets 0", mean_leave1out=True),
    ]


def widen(inputs: Numbers, name: str, dtype: torch.dtype = torch.float64, value: float = 0.0) -> Tensor:
    """Rows with one column more: the peer's last column is no state of the policy."""
    return torch.nn.functional.pad(pad(inputs[name], inputs["lengths"], dtype, value), (0, 1), value=value)


def gae_token() -> list[Numbers]:
    def compute_with(gamma: float, lam: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            tensors = [widen(inputs, name) for name in ("token_rewards", "values", "mask")]
            ended = torch.zeros(len(lengths))
            peer = load("areal.trainer.ppo.gae")
            advantage, returns = peer._compute_token_level_gae(*tensors, ended, gamma, lam)
            return {"advantage": unpad(advantage, lengths), "returns": unpad(returns, lengths)}

        return compute

    note = "lengths count all tokens; at mask 0 the next value and the running advantage are carried; no whitening"
    where = (GAE, "_compute_token_level_gae")
    return [
        build_group("advantage", "gae_token", where, {"gamma": g, "lam": lam}, draw_steps(), compute_with(g, lam), note)
        for g, lam in [(1.0, 1.0), (0.99, 0.95)]
    ]


def gae_turn() -> list[Numbers]:
    def draw(rng: random.Random) -> Numbers:
        inputs = draw_steps()(rng)
        turns: list[int] = []
        for row in split(inputs["mask"], inputs["lengths"]):
            starts = [index for index, m in enumerate(row) if m and (index == 0 or not row[index - 1])]
            turns += [sum(start <= index for start in starts) - 1 if m else -1 for index, m in enumerate(row)]
        return {**inputs, "turn": turns}

    def compute_with(gamma: float, lam: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            rewards, values, mask = (widen(inputs, name) for name in ("token_rewards", "values", "mask"))
            turns, ended = widen(inputs, "turn", torch.int64, -1), torch.zeros(len(lengths))
            peer = load("areal.trainer.ppo.gae")
            advantage, returns = peer._compute_turn_level_gae(rewards, values, mask, turns, ended, gamma, lam)
            sampled = torch.tensor(inputs["mask"])
            return {"advantage": unpad(advantage, lengths) * sampled, "returns": unpad(returns, lengths) * sampled}

        return compute

    note = (
        "turn: number of the turn, -1 at observation tokens. A turn is one step: its value is that of its first token, "
        "its reward the sum over its tokens; advantage and return are repeated on its tokens, 0 elsewhere; no whitening"
    )
    where = (GAE, "_compute_turn_level_gae")
    return [
        build_group(
            "advantage", "gae_turn", where, {"gamma": g, "lam": lam}, draw, compute_with(g, lam), note, tolerance=SINGLE
        )
        for g, lam in [(1.0, 1.0), (0.99, 0.95)]
    ]


def overlong() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        mask = ones(inputs["lengths"])
        data = {"rewards": torch.zeros(len(mask), dtype=torch.float64), "input_ids": mask, "loss_mask": mask}
        return {"penalty": functions().reward_overlong_penalty(data, 16, 0.5, 64)["rewards"]}

    settings = {"max_length": 64, "buffer": 16, "factor": 0.5}
    where = (FUNCTIONS, "reward_overlong_penalty")
    return build_group("reward", "dapo_overlong", where, settings, draw_lengths, compute, "no floor beyond max_length")


def losses() -> list[Numbers]:
    def one(
        what: str,
        symbol: str,
        settings: Numbers,
        note: str = "",
        draw: Draw | None = None,
        safe: Safe = lambda _: True,
        **given: Any,
    ) -> Numbers:
        known = {"clip_low": "eps_clip", "clip_high": "eps_clip_higher", "dual_clip": "c_clip"}
        known |= {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}
        options = {known[key]: value for key, value in settings.items() if key in known} | given

        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            old = pad(inputs["old_logp"], lengths)
            policies = {"old_logprobs": old} if symbol == "sapo_loss_fn" else {"proximal_logprobs": old}
            if symbol == "ppo_actor_loss_fn":
                policies["old_logprobs"] = pad(inputs.get("behaviour_logp", inputs["old_logp"]), lengths)
            advantage, mask = pad(inputs["advantage"], lengths), ones(lengths).bool()

            def loss(logp: Tensor) -> Tensor:
                function = getattr(functions(), symbol)
                return function(logp, **policies, advantages=advantage, loss_mask=mask, **options)[0]

            return differentiate(inputs, loss)

        draw = draw or draw_policy(bounds=[0.8, 1.2, 1.28, 3.0])
        tolerance = SINGLE if given.get("rejection_sampling") else EXACT
        return build_group("loss", what, (FUNCTIONS, symbol), settings, draw, compute, note, 20, safe, tolerance)

    higher, token = {"clip_low": 0.2, "clip_high": 0.28}, {"average": "token_mean"}
    gspo = "token mean; gradient through the mean log ratio; the advantage is the mean over the trajectory's tokens"
    near = sequences_clear("logp", "old_logp", [0.97, 1.04])
    decoupled = "logp against old_logp is clipped; exp(old_logp - behaviour_logp), at most 'high', weighs each token"
    clamp = SimpleNamespace(**RATIO, level="token", action="clamp", upper=1.5, lower=None)
    three = draw_policy(0.4, [0.8, 1.2, 1.28, 1.5], ["behaviour_logp"])
    taus = {"tau_positive": 1.0, "tau_negative": 1.05}
    ppo = "ppo_actor_loss_fn"
    return [
        one("grpo", ppo, {**higher, "dual_clip": 3.0, **token}),
        one("dapo", ppo, {**higher, **token}),
        one("grpo_with_token_tis", ppo, {**higher, "high": 1.5, **token}, decoupled, three, rejection_sampling=clamp),
        one(
            "gspo",
            ppo,
            {"clip_low": 0.03, "clip_high": 0.04, **token},
            gspo,
            draw_policy(0.1),
            near,
            importance_sampling_level="sequence",
        ),
        one("cispo", "cispo_loss_fn", {"clip_low": 1.0, "clip_high": 0.28, **token}, "clip_low 1: no lower bound"),
        one("sapo", "sapo_loss_fn", {**taus, **token}, "token mean, where others take the trajectory mean"),
    ]


def value_loss() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
            return functions().ppo_critic_loss_fn(values, old, returns, 0.2, mask.bool())[0]

        return differentiate_value_loss(inputs, loss, torch.float32)

    settings = {"clip_low": 0.2, "clip_high": 0.2, "average": "token_mean"}
    note = "half the larger of the clipped and the plain squared error; the gradient is by 'values'"
    where = (FUNCTIONS, "ppo_critic_loss_fn")
    return build_group("loss", "value_loss", where, settings, draw_values, compute, note, tolerance=SINGLE)


def proximal() -> list[Numbers]:
    def draw(rng: random.Random) -> Numbers:
        inputs = draw_policy()(rng)
        policies = {"logp": inputs["logp"], "behaviour_logp": inputs["old_logp"]}
        shape = {"group": inputs["group"], "lengths": inputs["lengths"]}
        return {**shape, **policies, "version": [rng.randint(4, 10) for _ in inputs["logp"]]}

    def compute_with(method: str) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            logp, behaviour = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("logp", "behaviour_logp"))
            versions = torch.tensor(inputs["version"])
            peer = load("areal.trainer.ppo.actor")
            return {
                "proximal_logp": peer.compute_prox_logp_approximations(behaviour, logp, versions, 10, method)[method]
            }

        return compute

    settings = {"current_version": 10}
    note = (
        "version: of the weights that sampled each token; logp is of current_version, the proximal policy one version "
        "older. share = (proximal - version) / (current - version), at least 0, and 0 for version = current; "
    )
    forms = {
        "loglinear": "behaviour_logp + share * (logp - behaviour_logp)",
        "linear": "log((1 - share) * exp(behaviour_logp) + share * exp(logp) + 1e-10)",
    }
    where = ("areal/trainer/ppo/actor.py", "compute_prox_logp_approximations")
    return [
        build_group(
            "proximal",
            "a3po",
            where,
            {**settings, "method": name},
            draw,
            compute_with(name),
            note + form,
            tolerance=SINGLE,
        )
        for name, form in forms.items()
    ]


def kl() -> list[Numbers]:
    def estimator(name: str) -> Compute:
        def estimate(logp: Tensor, ref: Tensor, _: Tensor) -> Tensor:
            return load("areal.utils.data").KLEstimator._compute_approx_kl(logp, ref, name)

        return partial(differentiate_kl, estimate=estimate)

    where = (DATA, "KLEstimator._compute_approx_kl")
    return [
        build_group("kl", name, where, {}, draw_kl, estimator(name), tolerance=SINGLE) for name in ("k1", "k2", "k3")
    ]


def corrections() -> list[Numbers]:
    def one(what: str, settings: Numbers, note: str, **given: Any) -> Numbers:
        config = SimpleNamespace(**{**RATIO, "lower": settings.get("low"), "upper": settings["high"], **given})

        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            old, behaviour = pad(inputs["old_logp"], lengths), pad(inputs["behaviour_logp"], lengths)
            result = functions().apply_rejection_sampling(old, behaviour, ones(lengths), None, config)
            weights = unpad(result.behave_imp_weight, lengths)
            return {"weights": weights, "kept": unpad(result.loss_mask, lengths).long()}

        safe = sequences_clear("old_logp", "behaviour_logp", [0.9, 1.1])
        where = (FUNCTIONS, "apply_rejection_sampling")
        return build_group(
            "correction", what, where, settings, draw_mismatch, compute, note, safe=safe, tolerance=SINGLE
        )

    band, narrow = {"low": 0.5, "high": 1.5}, {"low": 0.9, "high": 1.1}
    mean = "weights are the geometric mean ratio of the trajectory"
    return [
        one("token_tis", {"high": 1.5}, "", level="token", action="clamp"),
        one("token_mis", band, "", level="token", action="mask"),
        one("geometric_mis", narrow, f"{mean}, 0 where it is outside [low, high]", level="sequence", action="mask"),
        one("geometric_tis", narrow, f"{mean}, clamped to [low, high]", level="sequence", action="clamp"),
    ]
