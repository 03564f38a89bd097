"""Random ragged inputs, their padded form, and the layout of the stored groups.

Every drawn number is a multiple of 1/64, so that it is the same number in 32 and 64 bits and in the stored text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = dict[str, Any]
Draw = Callable[[random.Random], Numbers]
Compute = Callable[[Numbers], Numbers]
Safe = Callable[[Numbers], bool]

EXACT = 1e-10  # nothing but the rounding of the stored digits
CLOSE = 1e-7  # the peer adds 1e-8 to counts or has a constant in 32 bits
SINGLE = 3e-6  # the peer goes through 32 bits


def build_group(
    kind: str,
    what: str,
    where: tuple[str, str],
    settings: Numbers,
    draw: Draw,
    compute: Compute,
    note: str = "",
    count: int = 20,
    safe: Safe = lambda _: True,
    tolerance: float = EXACT,
) -> Numbers:
    """One group of `count` cases; inputs for which `safe` is false are drawn again.

    `kind` (advantage, loss, average, kl, correction, entropy, reward) and `what` name the quantity, `where` is
    (file, symbol), `tolerance` is how closely the bare formula in 64 bits should agree.
    """
    rng = random.Random(f"{kind} {what} {where} {sorted(settings.items())}")
    cases: list[Numbers] = []
    while len(cases) < count:
        inputs = draw(rng)
        if safe(inputs):
            outputs = {name: rounded(value) for name, value in compute(inputs).items()}
            cases.append({"inputs": inputs, "outputs": outputs})
    return {
        "kind": kind,
        "what": what,
        "file": where[0],
        "symbol": where[1],
        "note": note,
        "settings": settings,
        "tolerance": tolerance,
        "cases": cases,
    }


def rounded(value: Any) -> Any:
    """Tensors become lists, floats keep 12 significant digits."""
    if isinstance(value, Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.12g}") + 0.0 if isinstance(value, float) else value


def number(rng: random.Random, low: float, high: float) -> float:
    return rng.randint(math.ceil(low * 64), math.floor(high * 64)) / 64


def draw_shape(
    rng: random.Random,
    groups: tuple[int, int] = (2, 4),
    size: tuple[int, int] = (2, 5),
    longest: int = 7,
    same_size: bool = False,
) -> Numbers:
    """Groups of trajectories of unequal numbers of tokens; `size` is (fewest, most) trajectories in a group."""
    sizes = [rng.randint(*size) for _ in range(rng.randint(*groups))]
    if same_size:
        sizes = [sizes[0]] * len(sizes)
    group = [index for index, count in enumerate(sizes) for _ in range(count)]
    return {"group": group, "lengths": [rng.randint(1, longest) for _ in group]}


def draw_rewards(rng: random.Random, group: Sequence[int]) -> list[float]:
    """Per trajectory: groups of 0 and 1, groups of any value, groups in which all are equal."""
    rewards: list[float] = []
    for name in sorted(set(group)):
        count = group.count(name)
        kind = rng.choice(["binary", "any", "any", "equal"])
        same = number(rng, -1, 2)
        if kind == "binary":
            rewards += [float(rng.random() < 0.5) for _ in range(count)]
        elif kind == "any":
            rewards += [number(rng, -1, 2) for _ in range(count)]
        else:
            rewards += [same] * count
    return rewards


def draw_outcome(size: tuple[int, int] = (2, 5), same_size: bool = False) -> Draw:
    """Trajectories with one reward each, in groups of one size or of several."""

    def draw(rng: random.Random) -> Numbers:
        inputs = draw_shape(rng, (2, 4), size, 4, same_size)
        return {**inputs, "rewards": draw_rewards(rng, inputs["group"])}

    return draw


def draw_mask(rng: random.Random, length: int) -> list[int]:
    """1 for sampled tokens and 0 for runs of observation tokens in between; the first token is always sampled."""
    mask = [1]
    while len(mask) < length:
        mask.append(mask[-1] if rng.random() < 0.6 else 1 - mask[-1])
    return mask


def draw_log_ratio(rng: random.Random, spread: float, bounds: Sequence[float]) -> float:
    """log(new / old) of one token; the ratio keeps 1e-3 away from every bound, and now and then it is far from 1."""
    while True:
        wide = 4 * spread if rng.random() < 0.15 else spread
        log_ratio = number(rng, -wide, wide)
        if clear([math.exp(log_ratio)], bounds):
            return log_ratio


def draw_pair(rng: random.Random, spread: float, bounds: Sequence[float]) -> tuple[float, float]:
    """(new, old) log-probabilities of one token, both below 0."""
    while True:
        old = number(rng, -3, -1 / 64)
        new = old + draw_log_ratio(rng, spread, bounds)
        if new < 0:
            return new, old


def draw_other(rng: random.Random, old: float, spread: float, bounds: Sequence[float]) -> float:
    """A log-probability below 0 under another policy, which gives `old` a ratio clear of the bounds."""
    while True:
        other = old - draw_log_ratio(rng, spread, bounds)
        if other < 0:
            return other


def clear(values: Sequence[float], bounds: Sequence[float], distance: float = 1e-3) -> bool:
    return all(abs(value - bound) > distance for value in values for bound in bounds)


def draw_policy(
    spread: float = 0.4,
    bounds: Sequence[float] = (),
    extra: Sequence[str] = (),
    size: tuple[int, int] = (1, 2),
    longest: int = 5,
) -> Draw:
    """Tokens with log-probabilities under two policies and one advantage per trajectory, repeated on its tokens.

    `extra` names further policies ("ref_logp", "behaviour_logp") as far from the old policy as the new one is; the
    ratio old / other keeps clear of the bounds too.
    """

    def draw(rng: random.Random) -> Numbers:
        inputs = draw_shape(rng, (2, 3), size, longest)
        pairs = [draw_pair(rng, spread, bounds) for _ in range(sum(inputs["lengths"]))]
        inputs["logp"] = [new for new, _ in pairs]
        inputs["old_logp"] = [old for _, old in pairs]
        for name in extra:
            inputs[name] = [draw_other(rng, old, spread, bounds) for _, old in pairs]
        advantages = [rng.choice([0.0, *(number(rng, -2, 2) for _ in range(6))]) for _ in inputs["lengths"]]
        inputs["advantage"] = [a for a, n in zip(advantages, inputs["lengths"], strict=True) for _ in range(n)]
        return inputs

    return draw


def pad(
    flat: Sequence[float], lengths: Sequence[int], dtype: torch.dtype = torch.float64, value: float = 0.0
) -> Tensor:
    """[rows, longest row], padded on the right."""
    rows = torch.full((len(lengths), max(lengths)), value, dtype=dtype)
    for row, part in enumerate(split(flat, lengths)):
        rows[row, : len(part)] = torch.tensor(part, dtype=dtype)
    return rows


def split(flat: Sequence[Any], lengths: Sequence[int]) -> Iterator[list[Any]]:
    start = 0
    for length in lengths:
        yield list(flat[start : start + length])
        start += length


def unpad(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of `pad`."""
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def ones(lengths: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """The mask of rows in which every token was sampled by the policy."""
    return pad([1.0] * sum(lengths), lengths, dtype)


def last(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """One value per row, placed on the last token of the row."""
    rows = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
        rows[row, length - 1] = value
    return rows


def trajectory_means(flat: Sequence[float], lengths: Sequence[int]) -> list[float]:
    return [sum(part) / len(part) for part in split(flat, lengths)]


def differentiate(inputs: Numbers, loss: Callable[[Tensor], Tensor]) -> Numbers:
    """The loss as a function of the padded log-probabilities, and its gradient token by token."""
    logp = pad(inputs["logp"], inputs["lengths"]).requires_grad_()
    value = loss(logp)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, logp)
    else:
        gradient = torch.zeros_like(logp)
    return {"loss": value.double(), "gradient": unpad(gradient, inputs["lengths"])}


def sequence_ratios(inputs: Numbers, new: str, old: str) -> list[float]:
    """exp of the mean of new - old over each trajectory's tokens."""
    logs = [a - b for a, b in zip(inputs[new], inputs[old], strict=True)]
    return [math.exp(mean) for mean in trajectory_means(logs, inputs["lengths"])]


def product_ratios(inputs: Numbers, new: str, old: str) -> list[float]:
    """exp of the sum of new - old over each trajectory's tokens."""
    logs = [a - b for a, b in zip(inputs[new], inputs[old], strict=True)]
    return [math.exp(sum(part)) for part in split(logs, inputs["lengths"])]


def sequences_clear(new: str, old: str, means: Sequence[float] = (), products: Sequence[float] = ()) -> Safe:
    """The ratios of whole trajectories keep away from these bounds."""

    def safe(inputs: Numbers) -> bool:
        mean, product = sequence_ratios(inputs, new, old), product_ratios(inputs, new, old)
        return clear(mean, means) and clear(product, products)

    return safe


def draw_steps(observations: bool = True) -> Draw:
    """Rows with a value for every token, a reward now and then and, if asked for, observation tokens in between."""

    def draw(rng: random.Random) -> Numbers:
        inputs = draw_shape(rng, (2, 3), (1, 2), longest=8)
        mask = [m for n in inputs["lengths"] for m in (draw_mask(rng, n) if observations else [1] * n)]
        rewards = [number(rng, -1, 1) if m and rng.random() < 0.4 else 0.0 for m in mask]
        values = [number(rng, -1, 1) for _ in mask]
        return {**inputs, "mask": mask, "token_rewards": rewards, "values": values}

    return draw


def draw_kl(rng: random.Random) -> Numbers:
    """Four tokens under three policies."""
    pairs = [draw_pair(rng, 0.5, []) for _ in range(4)]
    old = [draw_other(rng, new, 0.3, []) for new, _ in pairs]
    return {"logp": [new for new, _ in pairs], "ref_logp": [ref for _, ref in pairs], "old_logp": old}


def draw_mismatch(rng: random.Random) -> Numbers:
    """Log-probabilities of the same tokens in the trainer and in the engine that sampled them."""
    inputs = draw_shape(rng, (1, 2), (2, 3), longest=4)
    pairs = [draw_pair(rng, 0.3, [0.5, 1.5, 2.0]) for _ in range(sum(inputs["lengths"]))]
    return {**inputs, "old_logp": [old for old, _ in pairs], "behaviour_logp": [behaviour for _, behaviour in pairs]}


def draw_losses(rng: random.Random) -> Numbers:
    """Per-token losses of groups of trajectories."""
    inputs = draw_shape(rng, (2, 3), (1, 2))
    return {**inputs, "token_loss": [number(rng, -2, 2) for _ in range(sum(inputs["lengths"]))]}


def draw_values(rng: random.Random) -> Numbers:
    """Predicted values before and after an update, and the returns they should predict."""
    while True:
        inputs = draw_shape(rng, (2, 3), (1, 2))
        old = [number(rng, -1, 1) for _ in range(sum(inputs["lengths"]))]
        inputs |= {"old_values": old, "returns": [number(rng, -2, 2) for _ in old]}
        inputs["values"] = [v + number(rng, -0.5, 0.5) for v in old]
        if clear([a - b for a, b in zip(inputs["values"], old, strict=True)], [-0.2, 0.2]):
            return inputs


def draw_lengths(rng: random.Random) -> Numbers:
    """Numbers of tokens before, in and beyond a buffer of 16 up to 64."""
    return {"lengths": [rng.randint(30, 90) for _ in range(4)]}


def differentiate_average(inputs: Numbers, average: Callable[[Tensor, Tensor], Tensor]) -> Numbers:
    """An average of (padded losses, mask), and the weight it gives to each token."""
    losses = pad(inputs["token_loss"], inputs["lengths"]).requires_grad_()
    loss = average(losses, ones(inputs["lengths"]))
    (weights,) = torch.autograd.grad(loss, losses)
    return {"loss": loss, "weights": unpad(weights, inputs["lengths"])}


def differentiate_kl(inputs: Numbers, estimate: Callable[..., Tensor]) -> Numbers:
    """An estimate of (logp, ref_logp, old_logp) for each token, and its gradient by logp."""
    logp, ref, old = (torch.tensor(inputs[key], dtype=torch.float64) for key in ("logp", "ref_logp", "old_logp"))
    logp.requires_grad_()
    value = estimate(logp, ref, old)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return {"kl": value, "gradient": gradient}


def differentiate_value_loss(
    inputs: Numbers, value_loss: Callable[..., Tensor], dtype: torch.dtype = torch.float64
) -> Numbers:
    """A loss of (values, old values, returns, mask), all padded, and its gradient by the values."""
    lengths = inputs["lengths"]
    values, old, returns = (pad(inputs[name], lengths, dtype) for name in ("values", "old_values", "returns"))
    values.requires_grad_()
    loss = value_loss(values, old, returns, ones(lengths, dtype))
    (gradient,) = torch.autograd.grad(loss, values)
    return {"loss": loss, "gradient": unpad(gradient, lengths)}
