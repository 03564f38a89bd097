"""Whether an update is what the gradient, the moments and the learning rate make of the weights.

A few weights of a few tensors, others in every step, are computed a second time by the formulas of AdamW, in 64 bits.
Of Muon the momentum is, and the direction of one matrix is compared with it. Moments in 8 bits are not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtgrpo.errors import RunError
from mtgrpo.model.sharding import local_part, whole

TENSORS = 4  # that are looked at in a step
WEIGHTS = 64  # of each
MAX_CHANGE_RATIO = 10.0  # of a change to the largest that the optimiser's formula allows
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass
class Stepped:
    """A tensor of weights, what of it is stepped (the same, or a copy on the host), and by what."""

    weight: nn.Parameter
    copy: nn.Parameter
    optimizer: torch.optim.Optimizer
    lr: float  # of the settings, before the schedule
    places: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # [places] fp64, when it was last looked at

    def __str__(self) -> str:
        return f"a tensor of shape {list(self.weight.shape)}"

    @property
    def settings(self) -> dict[str, Any]:
        """What the optimiser steps it with."""
        return self.optimizer.param_groups[0]

    def read(self) -> dict[str, Tensor]:
        """Its weights, and their moments, at `places`."""
        state = self.optimizer.state.get(self.copy, {})
        tensors = {"weights": self.weight, **{name: state[name] for name in MOMENTS if name in state}}
        return {name: self.at(tensor) for name, tensor in tensors.items()}

    def at(self, tensor: Tensor) -> Tensor:
        """The values of `tensor`, of its own shape, at `places` of what this rank has of it."""
        return local_part(tensor.detach()).reshape(-1)[self.places.to(tensor.device)].double().cpu()

    def largest_change(self, lr: float) -> float:
        """The most by which one update changes a weight; of AdamW by the inequality of Cauchy and Schwarz."""
        if isinstance(self.optimizer, torch.optim.Muon):
            return lr * math.sqrt(max(1.0, self.weight.shape[0] / self.weight.shape[1]))
        if not isinstance(self.optimizer, torch.optim.AdamW):
            return 1.0  # quantised moments
        first, second = self.settings["betas"]
        if first**2 >= second:
            return 1.0
        return lr * max(1.0, (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second)))


class UpdateCheck:
    """Looks at the weights before and after every update."""

    def __init__(self, tensors: Sequence[Stepped]) -> None:
        self._tensors = tensors
        self._steps = 0
        self._looked_at: list[Stepped] = []
        self._matrix: tuple[Stepped, Tensor, Tensor] | None = None  # one that Muon steps; before: weight, gradient
        self._largest = math.nan  # weight, before the last update
        self._largest_change = max((tensor.largest_change(tensor.lr) for tensor in tensors), default=0.0)

    def forget(self) -> None:
        """The optimiser's state is another one."""
        self._looked_at, self._largest = [], math.nan

    @torch.no_grad()
    def check_unchanged(self) -> None:
        """Raise RunError where weights or moments are not those that the last update left."""
        for tensor in self._looked_at:
            for name, now in tensor.read().items():
                if not torch.equal(now, tensor.seen[name]):
                    raise RunError(
                        f"the {name} of {tensor} changed between two updates, by "
                        f"{(now - tensor.seen[name]).abs().max().item():.3g}: nothing but an update may change them"
                    )
        parts = [local_part(tensor.weight) for tensor in self._tensors]
        largest = float(nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf))
        if largest > 1.01 * self._largest + MAX_CHANGE_RATIO * self._largest_change:
            raise RunError(
                f"the largest weight was {self._largest:.3g} before the last update and is {largest:.3g} now, and an "
                f"update changes a weight by {self._largest_change:.3g} at most: something else has changed it"
            )
        self._largest = largest

    @torch.no_grad()
    def before(self) -> None:
        """The gradients are complete, and not clipped yet. Raises RunError as `check_unchanged` does."""
        self.check_unchanged()
        count = len(self._tensors)
        chosen = {(self._steps * TENSORS + n) % count for n in range(min(TENSORS, count))}
        self._steps += 1
        self._looked_at, self._matrix = [], None
        for tensor in (self._tensors[n] for n in sorted(chosen)):
            if (gradient := tensor.copy.grad) is None:
                continue
            if self._matrix is None and isinstance(tensor.optimizer, torch.optim.Muon):  # all ranks gather the same
                self._matrix = tensor, whole(tensor.copy.detach()).clone(), whole(gradient).clone()
            if not (size := local_part(tensor.weight).numel()):
                continue
            tensor.places = torch.arange(min(WEIGHTS, size)) * 2_654_435_761 % size  # no two neighbours
            tensor.seen = {"gradient": tensor.at(gradient), **tensor.read()}
            self._looked_at.append(tensor)

    @torch.no_grad()
    def after(self, clipped: float, schedule: float) -> None:
        """The update has been made, by gradients `clipped` times those of `before`. Raises RunError if it is wrong.

        schedule: what the learning rate of the settings is multiplied by.
        """
        for tensor in self._looked_at:
            before, now, lr = tensor.seen, tensor.read(), tensor.lr * schedule
            most, unit = MAX_CHANGE_RATIO * tensor.largest_change(lr), torch.finfo(tensor.weight.dtype).eps
            rounding = 4 * unit * before["weights"].abs()
            change = (now["weights"] - before["weights"] * (1 - lr * tensor.settings["weight_decay"])).abs()
            if not bool((change <= most + rounding).all()):
                raise RunError(
                    f"an update changed a weight of {tensor} by {change.max().item():.3g}, and a learning rate of "
                    f"{lr:.3g} explains {most / MAX_CHANGE_RATIO:.3g}: the optimiser's moments are not those of the "
                    "gradients"
                )
            expected, tolerance = _expected(tensor, clipped * before["gradient"], lr)
            for name, value in expected.items():
                apart = (now[name] - value).abs()
                allowed = rounding + tolerance if name == "weights" else max(1e-4, 16 * unit) * value.abs().max()
                if not bool((apart <= allowed).all()):
                    raise RunError(
                        f"an update moved the {name} of {tensor} up to {apart.max().item():.3g} away from where "
                        "gradient, moments and learning rate move them: it is not the update of this gradient"
                    )
            tensor.seen = now
            if tensor.copy.grad is not None:
                raise RunError(f"the gradient of {tensor} was kept after its update, and would be used again")
        if self._matrix is not None:
            _check_direction(*self._matrix, clipped, self._matrix[0].lr * schedule)
            self._matrix = None


def _expected(tensor: Stepped, gradient: Tensor, lr: float) -> tuple[dict[str, Tensor], float]:
    """What the update makes of what was read before it, and how far its weights may be off."""
    before, group, nothing = tensor.seen, tensor.settings, torch.zeros_like(gradient)
    if isinstance(tensor.optimizer, torch.optim.Muon):
        return {"momentum_buffer": before.get("momentum_buffer", nothing).lerp(gradient, 1 - group["momentum"])}, 0.0
    if not isinstance(tensor.optimizer, torch.optim.AdamW):
        return {}, 0.0
    (first, second), steps = group["betas"], float(tensor.optimizer.state[tensor.copy].get("step", 1.0))
    mean = before.get("exp_avg", nothing).lerp(gradient, 1 - first)
    square = before.get("exp_avg_sq", nothing).lerp(gradient.square(), 1 - second)
    step = mean / (1 - first**steps) / ((square / (1 - second**steps)).sqrt() + group["eps"])
    tolerance = max(1e-3, 16 * torch.finfo(tensor.weight.dtype).eps) * tensor.largest_change(lr)
    return {"weights": before["weights"] * (1 - lr * group["weight_decay"]) - lr * step}, tolerance


def _check_direction(tensor: Stepped, weight: Tensor, gradient: Tensor, clipped: float, lr: float) -> None:
    """Muon's matrix has moved against its momentum, which Newton and Schulz' iteration does not turn."""
    weight = weight.double()
    momentum = whole(tensor.optimizer.state[tensor.copy]["momentum_buffer"]).double()
    change = whole(tensor.copy.detach()).double() - weight * (1 - lr * tensor.settings["weight_decay"])
    against = (clipped * gradient.double()).lerp(momentum, tensor.settings["momentum"])
    rounding = 4 * torch.finfo(tensor.weight.dtype).eps * (weight * against).abs().sum()
    if (change * against).sum() > rounding:
        raise RunError(f"an update moved {tensor} along its gradient, not against it")
