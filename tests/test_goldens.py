"""Golden numbers: what other libraries compute, executed there (see goldens/README.md), against what this one does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.gae import GAE
from mtgrpo.advantages.gigpo import GiGPO
from mtgrpo.advantages.return_to_go import ReturnToGo
from mtgrpo.advantages.rewards import Level, Rewards
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms import Algorithm, Tokens
from mtgrpo.algorithms.average import Average, token_weights
from mtgrpo.algorithms.cispo import CISPO
from mtgrpo.algorithms.correction import Correction, Reject, Weight, interpolate
from mtgrpo.algorithms.dapo import DAPO
from mtgrpo.algorithms.dppo import DPPO
from mtgrpo.algorithms.dr_grpo import DrGRPO
from mtgrpo.algorithms.gmpo import GMPO
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.gspo import GSPO
from mtgrpo.algorithms.kl import KL, Estimator, estimate
from mtgrpo.algorithms.ppo import PPO
from mtgrpo.algorithms.reinforce_pp import ReinforcePP, whiten
from mtgrpo.algorithms.rloo import RLOO
from mtgrpo.algorithms.sapo import SAPO
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TOLERANCE = 1e-6
MANY = 1e9
Values = Mapping[str, Any]
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Golden:
    """Cases that one function of a peer computed."""

    peer: str
    what: str
    symbol: str
    settings: Values
    cases: Sequence[Values]

    @property
    def name(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.peer}-{self.what}-{self.symbol.rpartition('.')[2]}-{settings}"


def read() -> list[Golden]:
    found: list[Golden] = []
    for path in sorted(Path(__file__).with_name("goldens").glob("*.json")):
        content = json.loads(path.read_text())
        for group in content["cases"]:
            found.append(Golden(content["peer"], group["what"], group["symbol"], group["settings"], group["cases"]))
    return found


GOLDENS = read()

# What peers compute and this library does not offer, and why.
NOT_OFFERED: dict[str, Callable[[Golden], bool]] = {
    "the biased standard deviation": lambda g: g.settings.get("ddof") == 0,
    "other baselines": lambda g: g.what in ("grpo_batch_std", "gdpo", "max_rl", "grpo_length_penalty"),
    "other losses": lambda g: g.what in ("luspo", "vespo", "ipo", "trajectory_sum", "k3+", "off_policy_sequence_mask"),
    "a bound on the unclipped ratio whatever the sign of the advantage": lambda g: "max_ratio" in g.settings,
    "weights bounded from below": lambda g: g.what.endswith("token_tis") and "low" in g.settings,
    "weights divided by their mean": lambda g: "normalise" in g.settings,
    "the geometric mean as a weight": lambda g: g.what == "geometric_tis",
    "rejection by k3": lambda g: g.what == "k3_rejection",
    "a DPPO whose ratio is a constant weight": lambda g: g.what == "dppo" and "dual_clip" in g.settings,
    "a linear mean of probabilities": lambda g: g.settings.get("method") == "linear",
    "statistics over turns, where a longer trajectory counts more often": lambda g: (
        g.settings.get("baseline") == "turns"
    ),
}


def offered(golden: Golden) -> bool:
    return not any(reason(golden) for reason in NOT_OFFERED.values())


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(lengths: Sequence[int]) -> Tensor:
    """Which row each token belongs to."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def rewards(inputs: Values, outcome: Tensor | None = None, turn: Tensor | None = None) -> Rewards:
    """Rows are trajectories; where `turn` [tokens] does not say otherwise, of one turn each."""
    row = numbers(inputs["lengths"])
    rows = len(inputs["lengths"])
    trajectory = torch.arange(rows) if turn is None else row[torch.cat([torch.ones(1) > 0, turn.diff() != 0])]
    turns = len(trajectory)
    return Rewards(
        outcome=torch.zeros(rows, dtype=torch.float64) if outcome is None else outcome,
        group=torch.tensor(inputs["group"]),
        trained=torch.ones(rows, dtype=torch.bool),
        per_turn=torch.zeros(turns, dtype=torch.float64),
        trajectory=trajectory,
        position=torch.zeros(turns, dtype=torch.long),
        anchor=torch.zeros(turns, dtype=torch.long),
        per_token=torch.zeros(len(row), dtype=torch.float64),
        turn=row if turn is None else turn,
    )


# --- advantages ---


def compared(algorithm: Algorithm) -> Callable[[Golden, Values, Values], tuple[Found, Found]]:
    """The advantages of trajectories' rewards; where a peer does something else with a group of one, of the others."""

    def run(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
        if "eps" in golden.settings and hasattr(algorithm, "epsilon"):
            algorithm.epsilon = golden.settings["eps"]  # pyright: ignore[reportAttributeAccessIssue]
        paid = rewards(inputs, double(inputs["rewards"]))
        advantage = WholeTrajectory().assign(paid, algorithm).advantage
        if isinstance(algorithm, ReinforcePP):
            advantage = algorithm.normalise(advantage)
        group = paid.of_tokens(paid.group)
        wanted = double(outputs["advantage"])
        if len(wanted) == len(inputs["lengths"]):  # some are of trajectories
            wanted = paid.of_tokens(wanted)
        alone = paid.of_tokens(torch.tensor([inputs["group"].count(g) == 1 for g in inputs["group"]]))
        assert not alone.any() or (advantage[alone] == 0).all() or isinstance(algorithm, ReinforcePP)
        peer_differs = golden.settings.get("singletons") and golden.peer in ("verl", "SkyRL")
        chosen = ~alone if peer_differs else torch.ones_like(group, dtype=torch.bool)
        return {"advantage": advantage[chosen]}, {"advantage": wanted[chosen]}

    return run


def segments(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    """Rows are segments of trajectories."""
    trajectory = torch.tensor(inputs["trajectory"])
    last = torch.cat([trajectory.diff() != 0, torch.ones(1) > 0])
    row = numbers(inputs["lengths"])
    group = torch.tensor(inputs["group"])[last]
    paid = Rewards(
        outcome=double(inputs["rewards"])[last],
        group=group,
        trained=torch.ones(len(group), dtype=torch.bool),
        per_turn=torch.zeros(len(trajectory), dtype=torch.float64),
        trajectory=trajectory,
        position=torch.zeros_like(trajectory),
        anchor=torch.zeros_like(trajectory),
        per_token=torch.zeros(len(row), dtype=torch.float64),
        turn=row,
    )
    found = WholeTrajectory().assign(paid, GRPO(epsilon=golden.settings["eps"])).advantage
    several = torch.tensor([inputs["group"][i] for i in range(len(row))] if False else inputs["group"])[row]
    counts = group.bincount(minlength=int(several.max()) + 1)
    chosen = counts[several] > 1
    return {"advantage": found[chosen]}, {"advantage": double(outputs["advantage"])[chosen]}


def per_step(credit: AdvantageEstimator, inputs: Values) -> tuple[Tensor, Rewards, Tensor]:
    """Rewards of single tokens, of which those at mask 0 were not sampled."""
    sampled = torch.tensor(inputs["mask"]) == 1
    row = numbers(inputs["lengths"])
    if "turn" in inputs:
        pairs = torch.stack([row, torch.tensor(inputs["turn"])], dim=1)[sampled]
        _, turn = torch.unique_consecutive(pairs, dim=0, return_inverse=True)
    else:
        _, turn = torch.unique_consecutive(row[sampled], return_inverse=True)
    rows = row[sampled]
    first = torch.cat([torch.ones(1) > 0, turn.diff() != 0])
    _, trajectory = torch.unique_consecutive(rows, return_inverse=True)
    turns = int(turn.max()) + 1
    kept = rows.unique_consecutive()
    paid = Rewards(
        outcome=torch.zeros(len(kept), dtype=torch.float64),
        group=torch.tensor(inputs["group"])[kept],
        trained=torch.ones(len(kept), dtype=torch.bool),
        per_turn=torch.zeros(turns, dtype=torch.float64),
        trajectory=trajectory[first],
        position=torch.zeros(turns, dtype=torch.long),
        anchor=torch.zeros(turns, dtype=torch.long),
        per_token=double(inputs["token_rewards"])[sampled],
        turn=turn,
    )
    return sampled, paid, double(inputs["values"])[sampled]


def estimated(level: Level) -> Callable[[Golden, Values, Values], tuple[Found, Found]]:
    def run(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
        credit = GAE(level=level, gamma=golden.settings["gamma"], lam=golden.settings["lam"])
        sampled, paid, values = per_step(credit, inputs)
        assigned = credit.assign(paid, PPO(), values)
        assert assigned.target is not None
        states = assigned.target.isfinite()
        found = {"advantage": assigned.advantage, "returns": assigned.target[states]}
        wanted = {
            "advantage": double(outputs["advantage"])[sampled],
            "returns": double(outputs["returns"])[sampled][states],
        }
        if "whitened" in outputs:
            found["whitened"] = PPO().normalise(assigned.advantage)
            wanted["whitened"] = double(outputs["whitened"])[sampled]
        return found, wanted

    return run


def reinforce_pp(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    credit = ReturnToGo(level=Level.token, gamma=golden.settings["gamma"])
    sampled, paid, _ = per_step(credit, inputs)
    returns = credit.assign(paid, ReinforcePP()).advantage
    found = {"returns": returns, "advantage": whiten(returns)}
    wanted = {name: double(values)[sampled] for name, values in outputs.items()}
    return {name: found[name] for name in wanted}, wanted


def gigpo(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    """Rows are turns."""
    trajectory = torch.tensor(inputs["trajectory"])
    last = torch.cat([trajectory.diff() != 0, torch.ones(1) > 0])
    names = [f"{g}/{a}" for g, a in zip(inputs["group"], inputs["anchor"], strict=True)]
    row = numbers(inputs["lengths"])
    settings = golden.settings
    with_std = settings["mode"] == "mean_std_norm"
    algorithm = GRPO(divide_by_std=with_std, epsilon=settings.get("eps", 1e-6))
    # There the reward of the trajectory is no part of the turns' returns, and those are given by themselves.
    credit = GiGPO(gamma=settings["gamma"], turn_coef=settings["turn_weight"])
    group = torch.tensor(inputs["group"])[last]
    paid = Rewards(
        outcome=torch.zeros(len(group), dtype=torch.float64),
        group=group,
        trained=torch.ones(len(group), dtype=torch.bool),
        per_turn=double(inputs["turn_rewards"]),
        trajectory=trajectory,
        position=torch.zeros_like(trajectory),
        anchor=torch.tensor([sorted(set(names)).index(name) for name in names]),
        per_token=torch.zeros(len(row), dtype=torch.float64),
        turn=row,
    )
    of_turns = credit.assign(paid, algorithm).advantage
    of_outcome = algorithm.baseline(double(inputs["rewards"])[last], group).advantage(double(inputs["rewards"])[last])
    sums = paid.totals()
    of_sums = algorithm.baseline(sums, group).advantage(sums)
    found = of_turns + (of_outcome - of_sums)[trajectory[row]]
    alone = torch.tensor([names.count(name) == 1 for name in names])[row]
    single = torch.tensor([group.tolist().count(g) == 1 for g in inputs["group"]])[row]
    chosen = ~(alone | single)
    return {"advantage": found[chosen]}, {"advantage": double(outputs["advantage"])[chosen]}


# --- losses ---


def averaged(golden: Golden, inputs: Values) -> Tensor:
    row = numbers(inputs["lengths"])
    trajectory = torch.tensor(inputs.get("trajectory", range(len(inputs["lengths"]))))[row]
    members = trajectory, torch.tensor(inputs["group"])[row], row
    return token_weights(Average[golden.settings["average"]], *members, golden.settings.get("length", 1))


def mean_of_trajectories(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.stack([part.mean() for part in values.split(list(lengths))])[numbers(lengths)]


def lost(build: Callable[[Golden], Algorithm]) -> Callable[[Golden, Values, Values], tuple[Found, Found]]:
    """Loss and gradient; with what corrects it and what is added to it."""

    def run(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
        algorithm, settings = build(golden), golden.settings
        logp, advantage = double(inputs["logp"]).requires_grad_(), double(inputs["advantage"])
        old = (
            double(inputs["behaviour_logp" if algorithm.uses_behaviour_policy else "old_logp"])
            if not (algorithm.uses_behaviour_policy and "behaviour_logp" not in inputs)
            else double(inputs["old_logp"])
        )
        sequence = None
        if algorithm.needs_sequence_ratio:
            term = algorithm.sequence_term((logp - old).detach(), advantage)
            sequence = mean_of_trajectories(term, inputs["lengths"])
        per_token = algorithm.loss(Tokens(logp, old, advantage, sequence)).loss
        if "behaviour_logp" in inputs and not algorithm.uses_behaviour_policy:
            per_token = per_token * corrected(golden, inputs)
        if "ref_logp" in inputs:
            kl = KL(1.0, Estimator.k3, unbiased=golden.what == "grpo_with_corrected_k3")
            per_token = per_token + settings["beta"] * kl.penalty(logp, old, double(inputs["ref_logp"]))
        loss = (per_token * averaged(golden, inputs)).sum()
        loss.backward()
        assert logp.grad is not None
        return {"loss": loss.detach(), "gradient": logp.grad}, {name: double(v) for name, v in outputs.items()}

    return run


def clipped(cls: type[Any]) -> Callable[[Golden], Algorithm]:
    def build(golden: Golden) -> Algorithm:
        names = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
        fields = {name: golden.settings[name] for name in names if name in golden.settings}
        if golden.what == "cispo":
            fields.pop("dual_clip", None)
            if golden.peer == "trl":
                fields = {"clip_high": fields["clip_high"] - 1}
        if golden.what == "dppo":
            fields["kl_coef"] = golden.settings.get("beta", 0.0)
        return cls(**fields)

    return build


def value_loss(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    values = double(inputs["values"]).requires_grad_()
    algorithm = PPO(value_coef=1.0, value_clip=golden.settings["clip_low"])
    per_token = algorithm.value_loss(values, double(inputs["old_values"]), double(inputs["returns"]))
    loss = (per_token * averaged(golden, inputs)).sum()
    loss.backward()
    assert values.grad is not None
    return {"loss": loss.detach(), "gradient": values.grad}, {name: double(v) for name, v in outputs.items()}


def average(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    weights = averaged(golden, inputs)
    found = {"weights": weights, "loss": (weights * double(inputs["token_loss"])).sum()}
    return found, {name: double(v) for name, v in outputs.items()}


# --- KL, corrections, the rest ---


def penalty(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    corrected_form = golden.what in ("k3_corrected", "k3_unbiased")
    kl = KL(1.0, Estimator[golden.what[:2]], unbiased=golden.what != "k2")
    logp, old, ref = (double(inputs[name]) for name in ("logp", "old_logp", "ref_logp"))
    logp.requires_grad_()
    found = kl.penalty(logp, old, ref) if corrected_form else estimate(kl.estimator, logp, ref)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    wanted = {name: double(v) for name, v in outputs.items()}
    if golden.what == "k3_unbiased":  # there the value is k3's and the gradient that of the product
        return {"gradient": gradient}, {"gradient": wanted["gradient"]}
    return {"kl": found.detach(), "gradient": gradient}, wanted


def adaptive(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    coef = golden.settings["coef"]
    found: list[float] = []
    for measured, steps in zip(inputs["kl"], inputs["steps"], strict=True):
        kl = KL(coef, target=golden.settings["target"], adaptation=steps / golden.settings["horizon"])
        coef = kl.adapt(coef, measured)
        found.append(coef)
    return {"coef": double(found)}, {"coef": double(outputs["coef"])}


def correction_of(golden: Golden) -> Correction:
    low, high = golden.settings.get("low", 0.0), golden.settings.get("high", MANY)
    if golden.what.endswith("rejection") and golden.peer == "verl":  # its bounds are for 1 / rho
        low, high = 1 / high, 1 / low
    kind = golden.what.removeprefix("grpo_with_")
    return {
        "token_tis": Correction(weight=Weight.token, cap=high),
        "sequence_tis": Correction(weight=Weight.sequence, cap=high),
        "token_mis": Correction(weight=Weight.token, cap=MANY, reject=Reject.token, low=low, high=high),
        "sequence_mis": Correction(weight=Weight.sequence, cap=MANY, reject=Reject.sequence, low=low, high=high),
        "geometric_mis": Correction(weight=Weight.token, cap=MANY, reject=Reject.geometric, low=low, high=high),
        "token_rejection": Correction(reject=Reject.token, low=low, high=high),
        "sequence_rejection": Correction(reject=Reject.sequence, low=low, high=high),
        "geometric_rejection": Correction(reject=Reject.geometric, low=low, high=high),
        "veto": Correction(veto=low),
    }[kind]


def corrected(golden: Golden, inputs: Values) -> Tensor:
    old, behaviour = double(inputs["old_logp"]), double(inputs["behaviour_logp"])
    return correction_of(golden).weights(old, behaviour, numbers(inputs["lengths"]))


def weighted(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    weights = corrected(golden, inputs)
    kept = double(outputs["kept"])
    if len(kept) == len(inputs["lengths"]) != len(weights):
        kept = kept[numbers(inputs["lengths"])]
    found, wanted = {"kept": (weights != 0).double()}, {"kept": kept}
    if "weights" in outputs and golden.what != "geometric_mis":  # there the mean itself is the weight
        of_peer = double(outputs["weights"])
        found["weights"] = weights
        wanted["weights"] = of_peer if len(of_peer) == len(weights) else of_peer[numbers(inputs["lengths"])]
    return found, wanted


def a3po(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    found = interpolate(
        double(inputs["behaviour_logp"]),
        double(inputs["logp"]),
        torch.tensor(inputs["version"]),
        golden.settings["current_version"],
    )
    return {"proximal_logp": found}, {"proximal_logp": double(outputs["proximal_logp"])}


def overlong(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    settings = golden.settings
    algorithm = DAPO(overlong_tokens=settings["max_length"], overlong_buffer=settings["buffer"])
    factor = settings.get("factor", 1.0)
    task = Task("golden", (Message("user", "?"),))
    found: list[float] = []
    for length in inputs["lengths"]:
        turn = Turn([1], [1] * length, [0.0] * length, [0] * length, Finish.STOP, Message("assistant"))
        found.append(factor * algorithm.shaped_reward(Trajectory(task, turns=[turn])))
    within = double(inputs["lengths"]) <= settings["max_length"]
    chosen = within if golden.peer in ("verl", "AReaL") else torch.ones_like(within)  # those two have no floor
    return {"penalty": double(found)[chosen]}, {"penalty": double(outputs["penalty"])[chosen]}


def top_entropy(golden: Golden, inputs: Values, outputs: Values) -> tuple[Found, Found]:
    entropy = double(inputs["entropy"])
    kept = entropy >= torch.quantile(entropy, 1 - golden.settings["fraction"])
    return {"kept": kept.double()}, {"kept": double(outputs["kept"])}


CHECKS: dict[str, Callable[[Golden, Values, Values], tuple[Found, Found]]] = {
    "gae_token": estimated(Level.token),
    "gae_turn": estimated(Level.turn),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": compared(ReinforcePP(group_baseline=True)),
    "gigpo": gigpo,
    "segments": segments,
    "value_loss": value_loss,
    "adaptive_kl": adaptive,
    "a3po": a3po,
    "dapo_overlong": overlong,
    "top_entropy": top_entropy,
    "gspo": lost(clipped(GSPO)),
    "cispo": lost(clipped(CISPO)),
    "sapo": lost(clipped(SAPO)),
    "gmpo": lost(clipped(GMPO)),
    "dppo": lost(clipped(DPPO)),
    "dapo": lost(clipped(DAPO)),
    **{name: penalty for name in ("k1", "k2", "k3", "k3_corrected", "k3_unbiased")},
    **{name: average for name in ("token_mean", "trajectory_mean", "prompt_mean", "constant")},
    **{f"{kind}_{how}": weighted for kind in ("token", "sequence", "geometric") for how in ("tis", "mis", "rejection")},
    "veto": weighted,
    **{
        f"grpo_with_{how}": lost(clipped(GRPO))
        for how in ("k3", "corrected_k3", "token_tis", "token_mis", "geometric_mis")
    },
}
COMPARED: dict[str, Callable[[Golden, Values, Values], tuple[Found, Found]]] = {
    "grpo": compared(GRPO()),
    "dr_grpo": compared(DrGRPO()),
    "rloo": compared(RLOO()),
}


def check_of(golden: Golden) -> Callable[[Golden, Values, Values], tuple[Found, Found]]:
    if golden.what in COMPARED and "gradient" not in golden.cases[0]["outputs"]:
        return COMPARED[golden.what]
    return {"grpo": lost(clipped(GRPO)), "dr_grpo": lost(clipped(DrGRPO)), **CHECKS}[golden.what]


@pytest.mark.parametrize("golden", [g for g in GOLDENS if offered(g)], ids=lambda golden: golden.name)
def test_golden_numbers(golden: Golden) -> None:
    check = check_of(golden)
    assert len(golden.cases) >= 20
    seen = 0
    for case in golden.cases:
        found, wanted = check(golden, case["inputs"], case["outputs"])
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            assert values.shape == wanted[name].shape
            assert torch.allclose(values, wanted[name], rtol=TOLERANCE, atol=TOLERANCE), (golden.name, name)
            seen += values.numel()
    assert seen >= 20


def test_every_algorithm_has_golden_numbers_of_four_peers_or_more() -> None:
    used = [golden for golden in GOLDENS if offered(golden)]
    assert len({golden.peer for golden in used}) >= 4
    whats = {golden.what for golden in used}
    losses = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "dppo", "value_loss"}
    assert losses | {"rloo", "reinforce_pp", "reinforce_pp_baseline", "gae_token", "gae_turn", "gigpo"} <= whats


def test_the_reasons_to_leave_something_out_are_needed() -> None:
    for reason, applies in NOT_OFFERED.items():
        assert any(map(applies, GOLDENS)), reason
