"""Golden numbers of verl: importance weights and rejection where trainer and engine see different probabilities."""

from __future__ import annotations

import numpy as np
from cases import (
    CLOSE,
    Compute,
    Numbers,
    build_group,
    clear,
    draw_mismatch,
    ones,
    pad,
    sequences_clear,
    trajectory_means,
    unpad,
)
from importing import load

CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"


def build_groups() -> list[Numbers]:
    return [*correction_weights(), *rejection()]


def log_ratios(inputs: Numbers) -> list[float]:
    return [a - b for a, b in zip(inputs["old_logp"], inputs["behaviour_logp"], strict=True)]


def correction_weights() -> list[Numbers]:
    def weights(level: str, threshold: float | str, normalise: bool) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            function = load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights
            log_ratio = pad(log_ratios(inputs), lengths)
            result, _ = function(log_ratio, ones(lengths), level, threshold, rollout_is_batch_normalize=normalise)
            flat = unpad(result, lengths)
            return {"weights": flat, "kept": (flat > 0).long()}

        return compute

    kinds: list[tuple[str, str, float | str, bool, Numbers]] = [
        ("token_tis", "token", 1.5, False, {"high": 1.5}),
        ("token_tis", "token", 1.5, True, {"high": 1.5, "normalise": "token_mean"}),
        ("sequence_tis", "sequence", 2.0, False, {"high": 2.0}),
        ("sequence_tis", "sequence", 2.0, True, {"high": 2.0, "normalise": "trajectory_mean"}),
        ("token_mis", "token", "0.5_2.0", False, {"low": 0.5, "high": 2.0}),
        ("sequence_mis", "sequence", "0.5_2.0", False, {"low": 0.5, "high": 2.0}),
    ]
    where = (CORRECTION, "compute_rollout_correction_weights")
    safe = sequences_clear("old_logp", "behaviour_logp", products=[0.5, 2.0])
    note = "ratio = exp(old_logp - behaviour_logp); 'normalise' divides by the mean weight after truncation"
    return [
        build_group("correction", what, where, settings, draw_mismatch, weights(*how), note, safe=safe, tolerance=CLOSE)
        for what, *how, settings in kinds
    ]


def rejection() -> list[Numbers]:
    def mask(option: str, threshold: str) -> Compute:
        def compute(inputs: Numbers) -> Numbers:
            lengths = inputs["lengths"]
            function = load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_rejection_mask
            kept, _ = function(pad(log_ratios(inputs), lengths), ones(lengths), option, threshold)
            return {"kept": unpad(kept, lengths).long()}

        return compute

    inverse = "bounds apply to exp(behaviour_logp - old_logp), the inverse of the importance ratio"
    kinds = [
        ("token_rejection", "token_k1", "0.5_1.5", {"low": 0.5, "high": 1.5}, inverse),
        ("sequence_rejection", "seq_sum_k1", "0.5_1.5", {"low": 0.5, "high": 1.5}, inverse),
        ("geometric_rejection", "seq_mean_k1", "0.9_1.1", {"low": 0.9, "high": 1.1}, f"mean log ratio; {inverse}"),
        ("k3_rejection", "seq_mean_k3", "0.03", {"high": 0.03}, "mean of ratio - 1 - log(ratio)"),
    ]
    where = (CORRECTION, "compute_rollout_rejection_mask")

    whole = sequences_clear("behaviour_logp", "old_logp", [0.9, 1.1], [0.5, 1.5])

    def safe(inputs: Numbers) -> bool:
        logs = log_ratios(inputs)
        k3 = [np.exp(d) - 1 - d for d in logs]
        tokens = [1 / np.exp(d) for d in logs]
        return whole(inputs) and clear(tokens, [0.5, 1.5]) and clear(trajectory_means(k3, inputs["lengths"]), [0.03])

    return [
        build_group("correction", what, where, settings, draw_mismatch, mask(option, threshold), note, safe=safe)
        for what, option, threshold, settings, note in kinds
    ]
