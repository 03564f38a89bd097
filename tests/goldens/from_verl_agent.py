"""Golden numbers of verl-agent (GiGPO)."""

from __future__ import annotations

import contextlib
import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import (
    EXACT,
    SINGLE,
    Numbers,
    build_group,
    draw_rewards,
    last,
    number,
    ones,
    unpad,
)
from importing import load
from torch import Tensor

PEER = "verl-agent"
VERSION = "d0b97244c50f17fb43a6ef0a15bca0e95a044ff7"
STAND_INS = ["verl"]
FILE = "gigpo/core_gigpo.py"


def build_groups() -> list[Numbers]:
    return [
        group("mean_norm", 0.95, over_steps=True),
        group("mean_std_norm", 0.5, over_steps=True),
        group("mean_norm", 0.95, over_steps=False),
        group("mean_std_norm", 0.5, over_steps=False),
    ]


def draw(rng: random.Random) -> Numbers:
    """Trajectories of several turns; a row is a turn, made in one of a few states of the environment."""
    sizes = [rng.randint(2, 4) for _ in range(rng.randint(2, 3))]
    groups = [index for index, size in enumerate(sizes) for _ in range(size)]
    rewards = draw_rewards(rng, groups)
    turns = [rng.randint(1, 4) for _ in groups]
    trajectory = [index for index, count in enumerate(turns) for _ in range(count)]
    return {
        "group": [groups[index] for index in trajectory],
        "trajectory": trajectory,
        "lengths": [rng.randint(1, 3) for _ in trajectory],
        "rewards": [rewards[index] for index in trajectory],
        "turn_rewards": [number(rng, -1, 1) for _ in trajectory],
        "anchor": [rng.choice("abc") for _ in trajectory],
    }


def returns(inputs: Numbers, gamma: float) -> Tensor:
    arrays = {
        "rewards": np.array(inputs["turn_rewards"]),
        "traj_uid": np.array(inputs["trajectory"]),
        "active_masks": np.ones(len(inputs["trajectory"])),
    }
    batch = SimpleNamespace(non_tensor_batch=arrays, batch={"input_ids": torch.zeros(1)})
    return load("gigpo.core_gigpo").compute_step_discounted_returns(batch, gamma).double()


def group(mode: str, gamma: float, over_steps: bool) -> Numbers:
    def compute_whole(common: dict[str, Any], step: Tensor, inputs: Numbers) -> Tensor:
        advantage, _ = load("gigpo.core_gigpo").compute_gigpo_outcome_advantage(
            step_rewards=step, anchor_obs=np.array(inputs["anchor"], dtype=object), mode=mode, **common
        )
        return advantage

    def compute_parts(common: dict[str, Any], step: Tensor, inputs: Numbers) -> Tensor:
        peer, plain = load("gigpo.core_gigpo"), mode == "mean_norm"
        episode = peer.episode_norm_reward(**common, remove_std=plain, compute_mean_std_cross_steps=False)
        anchors = peer.build_step_group(np.array(inputs["anchor"], dtype=object), common["index"])
        return episode + peer.step_norm_reward(step, common["response_mask"], anchors, remove_std=plain)

    compute_advantage = compute_whole if over_steps else compute_parts

    def compute(inputs: Numbers) -> Numbers:
        lengths = inputs["lengths"]
        common = {
            "token_level_rewards": last(inputs["rewards"], lengths),
            "response_mask": ones(lengths),
            "index": np.array(inputs["group"]),
            "traj_index": np.array(inputs["trajectory"]),
        }
        step = returns(inputs, gamma)
        with contextlib.redirect_stdout(io.StringIO()):
            advantage = compute_advantage(common, step, inputs)
        return {"turn_returns": step, "advantage": unpad(advantage, lengths)}

    baseline = "turns" if over_steps else "trajectories"
    settings: Numbers = {"gamma": gamma, "turn_weight": 1.0, "mode": mode, "baseline": baseline}
    if mode == "mean_std_norm":
        settings |= {"eps": 1e-6, "ddof": 1}
    note = (
        "a row is a turn; 'rewards' repeats the trajectory's reward on each of its rows. advantage = (reward, relative "
        "to its group) + turn_weight * (turn_returns, relative to the rows of the group with the same anchor); an "
        "anchor met once gives 0. Baseline 'turns' (what the peer does by default) takes mean and std of the group's "
        "rewards over rows, so that long trajectories weigh more; 'trajectories' counts each trajectory once"
    )
    symbol = "compute_gigpo_outcome_advantage" if over_steps else "episode_norm_reward + step_norm_reward"
    tolerance = EXACT if gamma == 0.5 else SINGLE
    return build_group("advantage", "gigpo", (FILE, symbol), settings, draw, compute, note, tolerance=tolerance)
