"""Every rank has a part of each weight, of its gradient and of its moments: DeepSpeed's ZeRO-3.

Weights are gathered for each pass of a module and given back after it, and every backward pass sums the gradient, so
that ranks make their passes in one order (`batch/word.py`). DeepSpeed clips and steps too, in fp32.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from mtgrpo.batch.packing import MicroBatch, Packing
from mtgrpo.batch.word import Pass
from mtgrpo.model.prefix import Prefix, aligned_passes
from mtgrpo.model.rounding import Reference
from mtgrpo.model.scorer import AllWeightsScorer, Scorer, Scores
from mtgrpo.policy.layouts import SeveralRanks
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import OptimizerSettings
from mtgrpo.policy.update_check import UpdateCheck

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedSharded(SeveralRanks):
    """See above. settings: DeepSpeed's own, of the user."""

    aligned = True

    def __init__(self, rank: int, ranks: int, settings: Mapping[str, Any]) -> None:
        super().__init__(rank, ranks)
        self._settings = settings
        self._door: nn.Module | None = None
        self._engine: Any = None  # of the present stage
        self._left = 0  # backward passes of the update

    def wrap(self, model: PreTrainedModel) -> Scorer:
        self._door = self._door or _Door(model)
        return _ThroughDoor(model, self._call)

    def _call(self, *call: Any) -> Any:
        forward: Any = self._engine or self._door
        return forward(*call)

    def make_optimizer(self, model: PreTrainedModel, settings: OptimizerSettings, steps: int) -> Optimizer:
        if self._engine is not None:
            self._engine.destroy()
        optimizer = _Optimizer(model, settings, steps, self.ranks)
        own: dict[str, Any] = {
            "train_batch_size": self.ranks,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": settings.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        zero = {"stage3_param_persistence_threshold": 0, **self._settings.get("zero_optimization", {}), "stage": 3}
        config = {**self._settings, **own, "zero_optimization": zero}
        deepspeed = _import_deepspeed(model.device.type)
        self._engine = optimizer.engine = deepspeed.initialize(
            model=self._door, optimizer=optimizer.adamw, config=config
        )[0]
        return optimizer

    def passes(self, packings: Sequence[Packing]) -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
        def all_passes() -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
            return aligned_passes([packing.micro_batches for packing in packings], self.rank)

        self._left = sum(step is Pass.backward for *_, step in all_passes())
        return all_passes()

    def backward(self, prefix: Prefix) -> None:
        roots = zip(*prefix.take_roots(), strict=True)
        total = sum(root if gradient is None else (root * gradient).sum() for root, gradient in roots)
        self._left -= 1
        self._engine.set_gradient_accumulation_boundary(self._left == 0)
        self._engine.optimizer.clear_backward_seen_flag()  # else only a forward pass lets the next gradient be added
        self._engine.backward(total)


class _Optimizer(Optimizer):
    """What is stepped is DeepSpeed's: flat tensors of the parts that this rank has, several weights in each."""

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, total_steps: int, ranks: int) -> None:
        super().__init__(model, settings, total_steps)
        self.least_scale = float(ranks)  # for gradients are averaged
        (self.adamw,) = self._optimizers
        self.check = UpdateCheck([])  # it would look at whole weights
        self.engine: Any = None

    @property
    def scale(self) -> float:
        return self.least_scale

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def step(self) -> float:
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.engine.step()
        self.engine.optimizer.grad_partitions_flat_buffer.zero_()  # else a weight that no pass reaches keeps the last
        norm = float(self.engine.get_global_grad_norm())  # inf where it is not finite: the step was left out
        self.changes += math.isfinite(norm)
        self._steps += math.isfinite(norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """As of one process; the first rank's counts, all ranks gather."""
        whole, keeps = import_module("deepspeed.utils").safe_get_full_optimizer_state, dist.get_rank() == 0
        moments: dict[int, dict[str, Tensor]] = {}
        for number, weight in enumerate(self._weights if self.adamw.state else []):
            moments[number] = {"step": self._states[0]["step"].clone()}
            for name in MOMENTS:
                full = whole(weight, name)
                moments[number][name] = full.cpu() if keeps else torch.empty(0)
        return {"states": [moments], "steps": self._steps, "scaler": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (moments,), put = state["states"], import_module("deepspeed.utils").safe_set_local_optimizer_state
        for mine in self._states if moments else []:
            mine["step"].fill_(max(float(one["step"]) for one in moments.values()))
        for number, one in moments.items():
            weight: Any = self._weights[number]
            size = weight.ds_tensor.numel()  # the last ranks' parts are padded
            for name in MOMENTS:
                part = one[name].flatten()[dist.get_rank() * size :][:size]
                put(weight, nn.functional.pad(part, (0, size - len(part))), name)
        self._steps = state["steps"]

    @property
    def _states(self) -> list[dict[str, Tensor]]:
        """Of each flat tensor, made where there is none yet as AdamW makes it."""
        states: list[dict[str, Tensor]] = []
        for flat in self.engine.optimizer.fp32_partitioned_groups_flat:
            states.append(self.adamw.state[flat])
            if not states[-1]:
                step = torch.zeros((), device=flat.device if self.adamw.defaults["fused"] else "cpu")
                states[-1].update({"step": step, **{name: torch.zeros_like(flat) for name in MOMENTS}})
        return states


class _Door(nn.Module):
    """A scorer, whose methods all are forward passes: DeepSpeed gathers what these read."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.scorer = AllWeightsScorer(model)

    def forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self.scorer, name)(*arguments)


class _ThroughDoor(Scorer):
    """Its methods go through `call`."""

    def __init__(self, model: PreTrainedModel, call: Callable[..., Any]) -> None:
        super().__init__(model)
        self._call = call

    def forward(self, micro: MicroBatch, temperature: float, prefix: Prefix | None = None) -> Scores:
        return self._call("forward", micro, temperature, prefix)

    def next_logprobs(self, micro: MicroBatch, positions: Tensor, prefix: Prefix | None = None) -> Tensor:
        return self._call("next_logprobs", micro, positions, prefix)

    def reference(self, context: Sequence[int] | Tensor, first: int = 0) -> Reference:
        return self._call("reference", context, first)

    def hidden(self, micro: MicroBatch, positions: Tensor, prefix: Prefix | None = None) -> Tensor:
        return self._call("hidden", micro, positions, prefix)


def _import_deepspeed(device: str) -> Any:
    """On a CPU without its own operators, which would be compiled first."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device == "cpu":
        deepspeed.ops.__compatible_ops__.update({"deepspeed_shm_comm": False, "shm_comm": False})
    return deepspeed
