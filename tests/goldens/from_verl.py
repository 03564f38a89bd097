"""Golden numbers of verl."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl_corrections
from cases import (
    CLOSE,
    EXACT,
    Compute,
    Draw,
    Numbers,
    build_group,
    clear,
    differentiate,
    differentiate_average,
    differentiate_kl,
    differentiate_value_loss,
    draw_kl,
    draw_lengths,
    draw_losses,
    draw_outcome,
    draw_policy,
    draw_rewards,
    draw_shape,
    draw_steps,
    draw_values,
    last,
    number,
    ones,
    pad,
    sequences_clear,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "verl"
VERSION = "0.9.1"
STAND_INS = [
    *("ray", "tensordict", "transfer_queue", "torchdata", "codetiming", "cachetools", "vllm", "sglang", "orjson"),
    *("aiohttp", "fastapi", "uvicorn", "tensorboard", "pylatexenc", "torchtitan", "veomni", "nemo_automodel"),
    *("verl.single_controller", "verl.workers.rollout", "verl.workers.engine", "verl.trainer.distillation"),
    *("verl.experimental.agent_loop", "verl.experimental.reward_loop.reward_loop", "verl.checkpoint_engine"),
    *("verl.trainer.ppo.v1.agent_loop_tq", "verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.v1.trainer_sync"),
]
CORE = "verl/trainer/ppo/core_algos.py"
SINGLETON = "a group of one is given mean 0 and std 1: its advantage is the reward itself"
AVERAGES = {
    "token_mean": "token-mean",
    "trajectory_mean": "seq-mean-token-mean",
    "trajectory_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}


def build_groups() -> list[Numbers]:
    return [
        *outcome_advantages(),
        *token_advantages(),
        segments(),
        overlong(),
        *policy_losses(),
        value_loss(),
        *averages(),
        *kl_estimators(),
        kl_controller(),
        *verl_corrections.build_groups(),
    ]


def core() -> Any:
    return load("verl.trainer.ppo.core_algos")


def outcome(symbol: str, **options: Any) -> Compute:
    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        advantage, _ = getattr(core(), symbol)(
            token_level_rewards=last(inputs["rewards"], lengths),
            response_mask=ones(lengths),
            index=np.array(inputs["group"]),
            **options,
        )
        return {"advantage": unpad(advantage, lengths)}

    return compute


def outcome_advantages() -> list[Numbers]:
    with_std = {"eps": 1e-6, "ddof": 1}
    alone = {"singletons": True}
    some_alone = draw_outcome(size=(1, 3))

    def one(what: str, name: str, settings: Numbers, draw: Draw, note: str = "", **options: Any) -> Numbers:
        symbol = f"compute_{name}_advantage"
        return build_group(
            "advantage", what, (CORE, symbol), settings, draw, outcome(symbol, **options), note, tolerance=CLOSE
        )

    by_std, centred = {"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}
    whitened = "R - mean of the group, then (x - mean) * rsqrt(var + 1e-8) over all tokens, var with ddof 1"
    return [
        one("grpo", "grpo_outcome", with_std, draw_outcome(), **by_std),
        one("grpo", "grpo_outcome", {**with_std, **alone}, some_alone, SINGLETON, **by_std),
        one("grpo", "grpo_vectorized_outcome", {**with_std, **alone}, some_alone, SINGLETON, **by_std),
        one("dr_grpo", "grpo_outcome", {}, draw_outcome(), **centred),
        one("rloo", "rloo_outcome", {}, draw_outcome()),
        one("rloo", "rloo_outcome", alone, some_alone, "a group of one keeps its raw reward"),
        one("rloo", "rloo_vectorized_outcome", alone, some_alone, "a group of one gets 0, unlike in rloo_outcome"),
        one("reinforce_pp_baseline", "reinforce_plus_plus_baseline_outcome", {"eps": 1e-8}, draw_outcome(), whitened),
    ]


def token_advantages() -> list[Numbers]:
    def rows(inputs: Numbers) -> dict[str, Tensor]:
        lengths = inputs["lengths"]
        mask, rewards = pad(inputs["mask"], lengths), pad(inputs["token_rewards"], lengths)
        return {"response_mask": mask, "token_level_rewards": rewards}

    def gae(gamma: float, lam: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            values = pad(inputs["values"], lengths)
            whitened, returns = core().compute_gae_advantage_return(values=values, gamma=gamma, lam=lam, **rows(inputs))
            named = {"advantage": returns - values, "returns": returns, "whitened": whitened}
            return {name: unpad(value, lengths) for name, value in named.items()}

        return compute

    def reinforce(gamma: float) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            config = SimpleNamespace(gamma=gamma)
            symbol = core().compute_reinforce_plus_plus_outcome_advantage
            whitened, returns = symbol(config=config, **rows(inputs))
            return {"advantage": unpad(whitened, lengths), "returns": unpad(returns, lengths)}

        return compute

    carried = "lengths count all tokens; at mask 0 the next value and the running advantage are carried, not reset; "
    gae_note = carried + "'advantage' is before whitening (returns - values); nothing has a meaning at mask 0"
    rf_note = carried + "returns and advantage are 0 at mask 0; whitening as in reinforce_pp_baseline"
    groups: list[Numbers] = []
    for gamma, lam in [(1.0, 1.0), (0.99, 0.95)]:
        where, settings = (CORE, "compute_gae_advantage_return"), {"gamma": gamma, "lam": lam, "eps": 1e-8}
        groups.append(
            build_group(
                "advantage", "gae_token", where, settings, draw_steps(), gae(gamma, lam), gae_note, tolerance=CLOSE
            )
        )
    for gamma in (1.0, 0.9):
        where, settings = (CORE, "compute_reinforce_plus_plus_outcome_advantage"), {"gamma": gamma, "eps": 1e-8}
        groups.append(
            build_group(
                "advantage", "reinforce_pp", where, settings, draw_steps(), reinforce(gamma), rf_note, tolerance=CLOSE
            )
        )
    return groups


class Batch:
    """The few things that compute_advantage_for_multi_trajectories asks of a DataProto."""

    def __init__(self, batch: dict[str, Tensor], uid: np.ndarray) -> None:
        self.batch, self.non_tensor_batch = batch, {"uid": uid}

    def __len__(self) -> int:
        return len(self.non_tensor_batch["uid"])

    def select_idxs(self, rows: list[int]) -> Batch:
        return Batch({name: value[rows] for name, value in self.batch.items()}, self.non_tensor_batch["uid"][rows])


def segments() -> Numbers:
    def draw(rng: random.Random) -> Numbers:
        inputs = draw_shape(rng, (2, 3), (2, 3), longest=4)
        counts = [rng.randint(1, 3) for _ in inputs["group"]]
        inputs["trajectory"] = [index for index, count in enumerate(counts) for _ in range(count)]
        inputs["group"] = [inputs["group"][index] for index in inputs["trajectory"]]
        inputs["lengths"] = [rng.randint(1, 4) for _ in inputs["group"]]
        inputs["rewards"] = draw_rewards(rng, inputs["group"])
        return inputs

    def compute(inputs: Numbers) -> Numbers:
        lengths, trajectory = inputs["lengths"], inputs["trajectory"]
        keys = zip(inputs["group"], trajectory, strict=True)
        rows = [f"{group}_{name}_{trajectory[:i].count(name)}" for i, (group, name) in enumerate(keys)]
        data = Batch(
            {"token_level_rewards": last(inputs["rewards"], lengths), "response_mask": ones(lengths)},
            np.array(inputs["group"]),
        )
        function = load("verl.trainer.ppo.v1.utils").compute_advantage_for_multi_trajectories
        result = function(data, rows, adv_estimator=core().AdvantageEstimator.GRPO)
        return {"advantage": unpad(result.batch["advantages"], lengths)}

    note = (
        "group, trajectory, lengths and rewards are per segment; only the last segment's reward counts; "
        "its advantage goes to all its segments"
    )
    where = ("verl/trainer/ppo/v1/utils.py", "compute_advantage_for_multi_trajectories")
    return build_group("advantage", "segments", where, {"eps": 1e-6, "ddof": 1}, draw, compute, note)


def overlong() -> Numbers:
    settings = {"max_length": 64, "buffer": 16, "factor": 0.5}
    buffer = SimpleNamespace(enable=True, len=16, penalty_factor=0.5, log=False)
    config = SimpleNamespace(reward={"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": 64}})

    def penalty(length: int) -> float:
        tensors = {"responses": torch.ones(100, dtype=torch.long), "attention_mask": torch.arange(100) < length}
        plain = {"data_source": "", "reward_model": {"ground_truth": ""}}
        item = SimpleNamespace(batch=tensors, non_tensor_batch=plain)

        async def run() -> Numbers:
            module = load("verl.experimental.reward_loop.reward_manager.dapo")
            tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
            return await module.DAPORewardManager(config, tokenizer, lambda **_: 0.0).run_single([item])

        return float(asyncio.run(run())["reward_score"])

    def compute(inputs: Numbers) -> Numbers:
        return {"penalty": [penalty(length) for length in inputs["lengths"]]}

    note = "-(length - (max_length - buffer)) / buffer * factor, at most 0, with no floor beyond max_length"
    where = ("verl/experimental/reward_loop/reward_manager/dapo.py", "DAPORewardManager.run_single")
    return build_group("reward", "dapo_overlong", where, settings, draw_lengths, compute, note)


def policy(name: str, average: str, clip: Numbers, length: int | None = None) -> Compute:
    """One registered policy loss under verl's own ActorConfig."""

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        config = load("verl.workers.config").ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            global_batch_info={"loss_scale_factor": length},
            **clip,
        )

        def loss(logp: Tensor) -> Tensor:
            value, _ = core().get_policy_loss_fn(name)(
                old_log_prob=pad(inputs["old_logp"], lengths),
                log_prob=logp,
                advantages=pad(inputs["advantage"], lengths),
                response_mask=ones(lengths),
                loss_agg_mode=AVERAGES[average],
                config=config,
            )
            return value

        return differentiate(inputs, loss)

    return compute


def policy_losses() -> list[Numbers]:
    def one(what: str, name: str, average: str, settings: Numbers, note: str = "", **given: Any) -> Numbers:
        known = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "dual_clip": "clip_ratio_c"}
        known |= {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}
        clip = {known[key]: value for key, value in settings.items() if key in known}
        length = settings.get("length")
        draw = given.get("draw") or draw_policy(bounds=[0.8, 1.2, 1.28, 3.0])
        settings = {**settings, "average": average}
        where = (CORE, f"compute_policy_loss_{name}")
        compute = policy(name, average, clip, length)
        tolerance = CLOSE if average == "trajectory_mean" else EXACT
        return build_group(
            "loss",
            what,
            where,
            settings,
            draw,
            compute,
            note,
            safe=given.get("safe", lambda _: True),
            tolerance=tolerance,
        )

    same = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    higher = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    no_lower = {"clip_low": 1.0, "clip_high": 0.28}
    dual = "dual_clip bounds the loss at -dual_clip * advantage where the advantage is negative"
    near, far = {"clip_low": 0.03, "clip_high": 0.04}, {"clip_low": 0.4, "clip_high": 0.4}
    probability = {"clip_low": 0.2, "clip_high": 0.15, "dual_clip": 2.0}
    gmpo = "clips the log ratio per token on one side, by the sign of the advantage; mean over trajectories"
    dppo = "clip_* bound the change of the token's probability; the ratio, truncated at dual_clip, is a constant weight"
    gspo = "the mean log ratio of a trajectory is the ratio of each of its tokens"
    return [
        one("grpo", "vanilla", "trajectory_mean", same, dual),
        one("grpo", "vanilla", "token_mean", higher, dual),
        one("dapo", "vanilla", "token_mean", {**higher, "dual_clip": 10.0}, "dual_clip is out of reach here"),
        one("dr_grpo", "vanilla", "constant", {**same, "length": 16}, dual),
        one(
            "gspo",
            "gspo",
            "trajectory_mean",
            near,
            gspo,
            draw=draw_policy(0.1),
            safe=sequences_clear("logp", "old_logp", [0.97, 1.04]),
        ),
        one("cispo", "cispo", "token_mean", higher, "clipped on both sides"),
        one("cispo", "cispo", "token_mean", no_lower, "clip_low 1 is no lower bound"),
        one("sapo", "sapo", "trajectory_mean", {"tau_positive": 1.0, "tau_negative": 1.05}),
        one("gmpo", "geo_mean", "trajectory_mean", far, gmpo, draw=draw_policy(0.5), safe=log_ratio_is_clear),
        one("dppo", "dppo_tv", "token_mean", probability, dppo, draw=draw_policy(0.8), safe=probability_is_clear),
    ]


def log_ratio_is_clear(inputs: Numbers) -> bool:
    return clear([a - b for a, b in zip(inputs["logp"], inputs["old_logp"], strict=True)], [-0.4, 0.4])


def probability_is_clear(inputs: Numbers) -> bool:
    new, old = np.exp(inputs["logp"]), np.exp(inputs["old_logp"])
    return clear((new - old).tolist(), [-0.2, 0.15]) and clear((new / old).tolist(), [2.0])


def value_loss() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
            return core().compute_value_loss(values, returns, old, mask, cliprange_value=0.2)[0]

        return differentiate_value_loss(inputs, loss)

    settings = {"clip_low": 0.2, "clip_high": 0.2, "average": "token_mean"}
    note = "half the larger of the clipped and the plain squared error; the gradient is by 'values'"
    return build_group("loss", "value_loss", (CORE, "compute_value_loss"), settings, draw_values, compute, note)


def averages() -> list[Numbers]:
    def average(mode: str, length: int | None) -> Compute:
        return partial(
            differentiate_average,
            average=lambda losses, mask: core().agg_loss(losses, mask, mode, loss_scale_factor=length),
        )

    groups: list[Numbers] = []
    for name, mode in AVERAGES.items():
        length = 16 if name == "constant" else None
        settings = {"average": name} | ({"length": 16} if length else {})
        note = f"loss_agg_mode {mode}; weights are d loss / d token_loss; a row is a trajectory"
        groups.append(
            build_group(
                "average", name, (CORE, "agg_loss"), settings, draw_losses, average(mode, length), note, tolerance=CLOSE
            )
        )
    return groups


def kl_estimators() -> list[Numbers]:
    def estimator(name: str) -> Compute:
        return partial(differentiate_kl, estimate=lambda logp, ref, _: core().kl_penalty(logp, ref, name))

    notes = {"k3+": "the value of k3 with the gradient of k2"}
    return [
        build_group("kl", name, (CORE, "kl_penalty"), {}, draw_kl, estimator(name), notes.get(name, ""))
        for name in ("k1", "k2", "k3", "k3+")
    ]


def kl_controller() -> Numbers:
    def draw(rng: random.Random) -> Numbers:
        return {"kl": [number(rng, 0, 1) for _ in range(5)], "steps": [rng.randint(1, 64) for _ in range(5)]}

    def compute(inputs: Numbers) -> Numbers:
        controller = core().AdaptiveKLController(init_kl_coef=0.125, target_kl=0.25, horizon=1000)
        coefs: list[float] = []
        for kl, steps in zip(inputs["kl"], inputs["steps"], strict=True):
            controller.update(kl, steps)
            coefs.append(float(controller.value))
        return {"coef": coefs}

    settings = {"coef": 0.125, "target": 0.25, "horizon": 1000, "clip": 0.2}
    note = "one controller, updated once for each kl and number of steps; the coefficient after each update"
    return build_group("kl", "adaptive_kl", (CORE, "AdaptiveKLController.update"), settings, draw, compute, note)
