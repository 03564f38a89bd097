"""Golden numbers of TRL: methods of its trainers, run on an object that has only the attributes they read."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cases import (
    CLOSE,
    EXACT,
    Compute,
    Draw,
    Numbers,
    build_group,
    clear,
    differentiate,
    draw_lengths,
    draw_mismatch,
    draw_outcome,
    draw_policy,
    draw_rewards,
    number,
    ones,
    pad,
    sequences_clear,
    split,
    trajectory_means,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "trl"
VERSION = "1.16.0"
STAND_INS: list[str] = []
GRPO = "trl/trainer/grpo_trainer.py"
SCORE, LOSS = "GRPOTrainer._generate_and_score_completions", "GRPOTrainer._compute_loss"
BOUNDS = [0.8, 1.2, 1.28, 1.5]


def build_groups() -> list[Numbers]:
    return [*advantages(), *losses(), *with_kl(), *corrections(), off_policy_mask(), top_entropy(), overlong()]


def grpo_trainer() -> Any:
    return load("trl.trainer.grpo_trainer").GRPOTrainer


def trainer(**given: Any) -> SimpleNamespace:
    """An object with what the two methods read of a trainer."""

    def unchanged(tensor: Tensor, **_: Any) -> Tensor:
        return tensor

    itself = SimpleNamespace(
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            gather=unchanged,
            reduce=unchanged,
            pad_across_processes=unchanged,
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            use_bias_correction_kl=given.pop("use_bias_correction_kl", False),
            delta=given.pop("delta", None),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=1,
            gradient_checkpointing_kwargs=None,
        ),
        current_gradient_accumulation_steps=1,
        num_iterations=2,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        reward_clip_range=None,
        normalize_advantages=False,
        log_multimodal=False,
        ref_model=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        reward_func_names=["reward"],
        reward_funcs=[None],
        reward_weights=torch.ones(1, dtype=torch.float64),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    vars(itself).update(given)
    itself.get_high_entropy_mask = partial(grpo_trainer().get_high_entropy_mask, itself)
    itself.get_off_policy_mask, itself.get_gamma_weights = (
        grpo_trainer().get_off_policy_mask,
        grpo_trainer().get_gamma_weights,
    )
    return itself


# Groups of one size, as TRL wants them.
draw_generations = draw_outcome(same_size=True)


def score(inputs: Numbers, kind: str = "grpo", **options: Any) -> dict[str, Tensor]:
    """Runs the method that turns completions and rewards into the inputs of the loss."""
    lengths = inputs["lengths"]
    rewards = torch.tensor(inputs.get("rewards", [0.0] * len(lengths)), dtype=torch.float64).view(len(lengths), -1)
    old = pad(inputs.get("old_logp", [0.0] * sum(lengths)), lengths)
    sampling = list(split(inputs["behaviour_logp"], lengths)) if "behaviour_logp" in inputs else None
    completion_ids = [[5] * length for length in lengths]
    texts = [""] * len(lengths)
    generated: tuple[Any, ...] = ([[5]] * len(lengths), completion_ids, texts)
    if kind == "grpo":
        generated = ([[5]] * len(lengths), completion_ids, None, texts, sampling, {}, None, None)
    itself = trainer(
        num_generations=inputs["group"].count(0) if "rewards" in inputs else 1,
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
        **options,
    )
    if rewards.shape[1] > 1:
        itself.reward_weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
        itself.reward_funcs, itself.reward_func_names = [None, None], ["first", "second"]
    prompts = [{"prompt": f"{name}"} for name in inputs["group"]]
    module = load(f"trl.trainer.{kind}_trainer")
    method = getattr(module, f"{kind.upper()}Trainer")._generate_and_score_completions
    return method(itself, prompts)


def advantages() -> list[Numbers]:
    def one(what: str, settings: Numbers, note: str = "", draw: Draw = draw_generations, **options: Any) -> Numbers:
        kind = options.get("kind", "grpo")

        def compute(inputs: Numbers) -> Numbers:
            per_trajectory = score(inputs, **options)["advantages"].tolist()
            pairs = zip(per_trajectory, inputs["lengths"], strict=True)
            return {"advantage": [advantage for advantage, length in pairs for _ in range(length)]}

        where = (GRPO.replace("grpo", kind), SCORE.replace("GRPO", kind.upper()))
        tolerance = CLOSE if "eps" in settings else EXACT
        return build_group("advantage", what, where, settings, draw, compute, note, tolerance=tolerance)

    def draw_two(rng: random.Random) -> Numbers:
        inputs = draw_generations(rng)
        second = draw_rewards(rng, inputs["group"])
        return {**inputs, "rewards": [list(pair) for pair in zip(inputs["rewards"], second, strict=True)]}

    std = {"eps": 1e-4, "ddof": 1}
    batch = "mean of the group, std of the rewards of the whole batch"
    gdpo = (
        "rewards: [component, component] per trajectory; each is normalised in its group, summed with the weights, "
        "then the mean of the batch is taken off and the sum divided by its std + eps"
    )
    options = {"multi_objective_aggregation": "normalize_then_sum"}
    return [
        one("grpo", std),
        one("grpo_batch_std", std, batch, scale_rewards="batch"),
        one("dr_grpo", {}, scale_rewards="none"),
        one("rloo", {}, kind="rloo"),
        one("gdpo", {**std, "weights": [1.0, 0.5]}, gdpo, draw_two, **options),
    ]


def loss_of(loss_type: str, **options: Any) -> Callable[[Numbers], Callable[[Tensor], Tensor]]:
    def of_inputs(inputs: Numbers) -> Callable[[Tensor], Tensor]:
        lengths = inputs["lengths"]
        mask = ones(lengths)
        batch = {
            "prompt_ids": torch.ones(len(lengths), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(lengths), 1, dtype=torch.long),
            "completion_ids": mask.long(),
            "completion_mask": mask,
            "advantages": pad(inputs["advantage"], lengths),
            "old_per_token_logps": pad(inputs["old_logp"], lengths),
            "num_items_in_batch": mask.sum(),
        }
        if "ref_logp" in inputs:
            batch["ref_per_token_logps"] = pad(inputs["ref_logp"], lengths)
        entropy = pad(inputs["entropy"], lengths) if "entropy" in inputs else torch.zeros_like(mask)

        def loss(logp: Tensor) -> Tensor:
            itself = trainer(
                loss_type=loss_type,
                _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
                **options,
            )
            return grpo_trainer()._compute_loss(itself, itself.model, batch)

        return loss

    return of_inputs


def one_loss(
    what: str, loss_type: str, settings: Numbers, draw: Draw | None = None, note: str = "", **given: Any
) -> Numbers:
    known = {"clip_low": "epsilon_low", "clip_high": "epsilon_high", "length": "max_completion_length"}
    known |= {"max_ratio": "delta", "beta": "beta"}
    options = {known[key]: value for key, value in settings.items() if key in known}
    safe = given.pop("safe", lambda _: True)
    of_inputs = loss_of(loss_type, **options, **given)

    def compute(inputs: Numbers) -> Numbers:
        return differentiate(inputs, of_inputs(inputs))

    draw = draw or draw_policy(bounds=BOUNDS)
    tolerance = CLOSE if what == "sapo" else EXACT
    return build_group("loss", what, (GRPO, LOSS), settings, draw, compute, note, safe=safe, tolerance=tolerance)


def losses() -> list[Numbers]:
    clip, higher = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
    token, trajectory = {"average": "token_mean"}, {"average": "trajectory_mean"}
    two_sided = "the unclipped ratio is held below max_ratio, whatever the sign of the advantage"
    cispo = "the bound is clip_high itself, not 1 + clip_high; there is no lower bound"
    luspo = "GSPO's clipped loss of a trajectory times its number of tokens, mean over trajectories"
    vespo = "weight exp(lambda + k log w - lambda w) of the trajectory's ratio w, a constant; (k, lambda) by the sign"
    near = draw_policy(0.1)

    narrow = {"clip_low": 0.03, "clip_high": 0.04}
    by_sequence = {"importance_sampling_level": "sequence", "safe": sequences_clear("logp", "old_logp", [0.97, 1.04])}
    taus = {"tau_positive": 1.0, "tau_negative": 1.05}
    weights = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    return [
        one_loss("grpo", "grpo", {**clip, **trajectory}),
        one_loss("grpo", "bnpo", {**higher, "max_ratio": 1.5, **token}, None, two_sided),
        one_loss("dapo", "dapo", {**higher, **token}),
        one_loss("dr_grpo", "dr_grpo", {**clip, "average": "constant", "length": 16}),
        one_loss("gspo", "grpo", {**narrow, **trajectory}, near, **by_sequence),
        one_loss("luspo", "luspo", {**narrow, "average": "trajectory_sum"}, near, luspo, **by_sequence),
        one_loss("cispo", "cispo", {"clip_high": 1.5, **token}, None, cispo),
        one_loss("sapo", "sapo", {**taus, **trajectory}),
        one_loss("vespo", "vespo", {**weights, **token}, None, vespo),
    ]


def with_kl() -> list[Numbers]:
    settings = {"clip_low": 0.2, "clip_high": 0.2, "average": "token_mean", "beta": 0.5}
    note = "the clipped loss plus beta * k3 of (logp, ref_logp)"
    corrected = f"{note}, and k3 is multiplied by logp's ratio to old_logp, through which gradient flows"
    draw = draw_policy(bounds=BOUNDS, extra=["ref_logp"])
    return [
        one_loss("grpo_with_k3", "dapo", settings, draw, note),
        one_loss("grpo_with_corrected_k3", "dapo", settings, draw, corrected, use_bias_correction_kl=True),
    ]


def corrections() -> list[Numbers]:
    def weights(mode: str, low: float | None, high: float) -> Compute:
        options = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}

        def compute(inputs: Numbers) -> Numbers:
            batch = score(inputs, use_vllm=True, vllm_importance_sampling_mode=mode, **options)
            ratio = batch["importance_sampling_ratio"].expand(-1, max(inputs["lengths"]))
            flat = unpad(ratio, inputs["lengths"])
            return {"weights": flat, "kept": (flat > 0).long()}

        return compute

    safe = sequences_clear("old_logp", "behaviour_logp", products=[1.5, 2.0])
    kinds: list[tuple[str, str, float | None, float]] = [
        ("token_tis", "token_truncate", None, 1.5),
        ("token_tis", "token_truncate", 0.5, 1.5),
        ("sequence_tis", "sequence_truncate", None, 2.0),
        ("token_mis", "token_mask", 0.5, 1.5),
        ("sequence_mis", "sequence_mask", None, 1.5),
    ]
    note = "ratio = exp(old_logp - behaviour_logp); the ratio of a sequence is the product over its tokens"
    groups: list[Numbers] = []
    for what, mode, low, high in kinds:
        settings = ({} if low is None else {"low": low}) | {"high": high}
        compute = weights(mode, low, high)
        groups.append(build_group("correction", what, (GRPO, SCORE), settings, draw_mismatch, compute, note, safe=safe))
    return groups


def off_policy_mask() -> Numbers:
    def mean_kl(inputs: Numbers) -> list[float]:
        logs = [a - b for a, b in zip(inputs["old_logp"], inputs["logp"], strict=True)]
        return trajectory_means(logs, inputs["lengths"])

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        tensors = [pad(inputs[name], lengths) for name in ("advantage", "logp", "old_logp")]
        keep = grpo_trainer().get_off_policy_mask(tensors[0][:, :1], tensors[1], tensors[2], ones(lengths), 0.05)
        return {"kept": keep.expand(-1, max(lengths))[ones(lengths).bool()].long()}

    def safe(inputs: Numbers) -> bool:
        return clear(mean_kl(inputs), [0.05])

    note = "a trajectory is dropped if its advantage is negative and the mean of old_logp - logp is above 'high'"
    where = (GRPO, "GRPOTrainer.get_off_policy_mask")
    return build_group(
        "correction", "off_policy_sequence_mask", where, {"high": 0.05}, draw_policy(0.3), compute, note, safe=safe
    )


def top_entropy() -> Numbers:
    quantile = 0.8

    def draw(rng: random.Random) -> Numbers:
        inputs = draw_policy()(rng)
        tokens = sum(inputs["lengths"])
        return {"group": inputs["group"], "lengths": inputs["lengths"], "entropy": rng_entropy(rng, tokens)}

    def rng_entropy(rng: random.Random, tokens: int) -> list[float]:
        return [number(rng, 0, 4) for _ in range(tokens)]

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        entropy = pad(inputs["entropy"], lengths)
        kept = trainer().get_high_entropy_mask(entropy, ones(lengths), quantile)
        return {"kept": unpad(kept, lengths).long()}

    def safe(inputs: Numbers) -> bool:
        place = quantile * (len(inputs["entropy"]) - 1)
        return abs(place - round(place)) > 1e-3

    note = "top_entropy_quantile 0.2: kept from the 0.8 quantile on, linearly interpolated (in 32 bits) between tokens"
    where = (GRPO, "GRPOTrainer.get_high_entropy_mask")
    return build_group("entropy", "top_entropy", where, {"fraction": 0.2}, draw, compute, note, safe=safe)


def overlong() -> Numbers:
    def compute(inputs: Numbers) -> Numbers:
        penalty = load("trl.rewards").get_soft_overlong_punishment(64, 16)
        return {"penalty": penalty([[0] * length for length in inputs["lengths"]])}

    where = ("trl/rewards/other_rewards.py", "get_soft_overlong_punishment")
    settings = {"max_length": 64, "buffer": 16}
    return build_group("reward", "dapo_overlong", where, settings, draw_lengths, compute, "-1 beyond max_length")
