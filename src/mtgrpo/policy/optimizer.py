"""AdamW or Muon, a learning-rate schedule, and gradient clipping."""

import math
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.errors import ConfigError
from mtgrpo.model.load import computes_in
from mtgrpo.model.sharding import elements, part_like
from mtgrpo.policy.settings import Kind, OptimizerSettings, Schedule
from mtgrpo.policy.update_check import Stepped, UpdateCheck
from mtgrpo.profile import Profiler

MIN_LARGE_WEIGHTS = 250_000_000  # of a model whose usual learning rates are small


def note_of_lr(model: nn.Module, lr: float) -> str:
    """What to say of a learning rate that is high for a large model; "" where it is not."""
    adapters = not all(weight.requires_grad for weight in model.parameters())
    usual, high, of = (1e-5, 1e-4, "adapters") if adapters else (1e-6, 1e-5, "all weights")
    count = sum(map(elements, model.parameters()))
    if count < MIN_LARGE_WEIGHTS or lr <= high:
        return ""
    return f"optimizer.lr={lr:g} is high for {of} of a model of {count / 1e9:.2g} billion weights; usual is {usual:g}"


class Optimizer:
    """Scales, clips, steps and schedules. One `step` is one optimiser step of the schedule.

    The loss of a model that computes in float16 is scaled, by as much as its gradients bear. Raises ConfigError for a
    schedule that falls when `total_steps` is 0, that is unknown.
    """

    least_scale = 1.0

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, total_steps: int) -> None:
        if total_steps < 1 and settings.schedule is not Schedule.constant:
            raise ConfigError(
                f"optimizer.schedule={settings.schedule.value} falls until the last step, but the number of steps is "
                "not limited: set the stage's steps above 0 or optimizer.schedule=constant"
            )
        self.changes = 0  # of the weights
        self.profiler = Profiler()  # of the policy
        self._settings = settings
        self._weights = [p for p in model.parameters() if p.requires_grad]
        # Of each weight, what is stepped: the weight itself, or its copy on the host.
        away = {weight for weight in self._weights if settings.offload and _on_gpu(weight)}
        self._stepped = {weight: _on_host(weight) if weight in away else weight for weight in self._weights}
        self._optimizers = make_optimizers(model, settings, self._stepped)
        is_muon = [isinstance(optimizer, torch.optim.Muon) for optimizer in self._optimizers]
        self._lrs = [settings.muon_lr if muon else settings.lr for muon in is_muon]  # before the schedule
        self._steps, self._total_steps = 0, total_steps
        hooks = [w.register_post_accumulate_grad_hook(partial(_offload_grad, self._stepped[w])) for w in away]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self._scaler = torch.amp.GradScaler(model.device.type, enabled=computes_in(model) is torch.float16)
        weights = {copy: weight for weight, copy in self._stepped.items()}
        self.check = UpdateCheck([
            Stepped(weights[copy], copy, optimizer, lr)
            for optimizer, lr in zip(self._optimizers, self._lrs, strict=True)
            for copy in optimizer.param_groups[0]["params"]
        ])  # fmt: skip

    @property
    def stepped(self) -> Iterable[nn.Parameter]:
        """What is stepped, with the gradients: the trained weights, or their copies on the host."""
        return self._stepped.values()

    @property
    def lr(self) -> float:
        """The learning rate the next step uses (of the AdamW part)."""
        return self._lrs[-1] * factor(self._settings, self._steps, self._total_steps)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by now; `least_scale` but in float16."""
        return float(self._scaler.get_scale())

    def catch_up(self, steps: int) -> None:
        """Let the schedule be at least as far as after `steps`, of which some had nothing to train."""
        self._steps = max(self._steps, steps)

    def scaled(self, loss: Tensor) -> Tensor:
        """What to take the gradient of in the place of `loss`."""
        return self._scaler.scale(loss)

    def step(self) -> float:
        """Clip the gradient, update, advance the schedule; returns the gradient norm before clipping, without scale.

        A gradient that is not finite is dropped: weights and optimiser stay as they are. In float16 the scale
        of the loss is halved then. Raises RunError where the update is not the one that the gradient asks for.
        """
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
        with self.profiler.measure("check"):
            self.check.before()
        norm = float(nn.utils.clip_grad_norm_(self.stepped, self._settings.max_grad_norm))
        share = factor(self._settings, self._steps, self._total_steps)
        self.changes += math.isfinite(norm)  # before the weights are: who reads them meanwhile sees it
        for optimizer, lr in zip(self._optimizers, self._lrs, strict=True):
            if math.isfinite(norm):
                optimizer.param_groups[0]["lr"] = lr * share
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._steps += math.isfinite(norm)
        self._scaler.update()
        for weight, stepped in self._stepped.items():
            if stepped is not weight:
                weight.detach().copy_(stepped.detach(), non_blocking=True)
        if math.isfinite(norm):
            with self.profiler.measure("check"):
                self.check.after(min(1.0, self._settings.max_grad_norm / (norm + 1e-6)), share)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, beside weights, gradients and settings."""
        return {
            "states": [optimizer.state_dict()["state"] for optimizer in self._optimizers],
            "steps": self._steps,
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the settings that are given now."""
        self.check.forget()
        for optimizer, saved in zip(self._optimizers, state["states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            parts = {
                number: {  # what is no moment is the same everywhere
                    name: part_like(value, weights[number]) if isinstance(value, Tensor) else value
                    for name, value in moments.items()
                }
                for number, moments in saved.items()
            }
            optimizer.load_state_dict({"state": parts, "param_groups": optimizer.state_dict()["param_groups"]})
        self._steps = state["steps"]
        if state["scaler"]:  # else it was saved in another dtype
            self._scaler.load_state_dict(state["scaler"])


def factor(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """What the learning rate is multiplied by at `step` (0-based) of `total_steps`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    rest = max(1, total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / rest)
    if settings.schedule is Schedule.linear:
        return 1 - progress
    if settings.schedule is Schedule.cosine:
        return 0.5 * (1 + math.cos(math.pi * progress))
    if settings.schedule is Schedule.wsd:
        return min(1.0, (1 - progress) / 0.4)
    return 1.0


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _on_host(weight: Tensor) -> nn.Parameter:
    """A copy in the host's memory; pinned, which the GPU reads and writes at full speed."""
    pinned = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda, requires_grad=False)
    return nn.Parameter(pinned.copy_(weight.detach()))


def _offload_grad(copy: nn.Parameter, weight: Tensor) -> None:
    """A gradient is complete: add it to that of the copy, and free it."""
    assert weight.grad is not None, "it was just accumulated"
    grad = _on_host(weight.grad).detach()
    copy.grad = grad if copy.grad is None else copy.grad.add_(grad)
    weight.grad = None


def make_optimizers(
    model: PreTrainedModel, settings: OptimizerSettings, stepped: Mapping[nn.Parameter, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Those of the weights that are trained, the one with the learning rate `lr` last; they step what is `stepped`."""
    heads = (model.get_output_embeddings(), getattr(model, "value_head", None))
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module in heads]
    outer_weights = {id(parameter) for module in outer for parameter in module.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        hidden_matrix = parameter.dim() == 2 and id(parameter) not in outer_weights
        (matrices if settings.kind is Kind.muon and hidden_matrix else others).append(stepped[parameter])
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay))
    rest: dict[str, Any] = {"lr": settings.lr, "betas": tuple(settings.betas), "weight_decay": settings.weight_decay}
    if others and settings.kind is Kind.adamw_8bit:
        from bitsandbytes.optim.adamw import AdamW8bit  # noqa: PLC0415  an extra

        optimizers.append(AdamW8bit(others, **rest))
    elif others:  # adapters are all matrices
        rest["fused" if others[0].is_cuda else "foreach"] = True
        optimizers.append(torch.optim.AdamW(others, **rest))
    return optimizers
