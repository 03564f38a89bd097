"""Weights, gradients and moments are divided, by DeepSpeed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.parallel import Parallel
from mtgrpo.parts import File
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.plain_yaml import parse_yaml, read_bounded

# What a file may not say but as mtgrpo does, since mtgrpo says it: the settings that do, and values that say nothing.
OURS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "optimizer": ("optimizer.kind and optimizer.lr", ()),
    "scheduler": ("optimizer.schedule", ()),
    "train_batch_size": ("rollout.prompts_per_step and rollout.group_size", ("auto",)),
    "train_micro_batch_size_per_gpu": ("batch.token_budget", ("auto", 1)),
    "gradient_accumulation_steps": ("batch.token_budget", ("auto", 1)),
    "gradient_clipping": ("optimizer.max_grad_norm", ("auto",)),
    "bf16": ("model.dtype=bfloat16", ({"enabled": "auto"}, {"enabled": False})),
    "fp16": ("model.dtype=float16", ({"enabled": "auto"}, {"enabled": False})),
    "activation_checkpointing": ("model.checkpointing=true", ()),
}


@dataclass
class Zero3(Parallel):
    """Weights, gradients and moments are divided among the ranks, by DeepSpeed (ZeRO-3, arXiv:1910.02054)."""

    divides = True

    deepspeed_config: File = ""  # a file of DeepSpeed's own settings of stage 3; "": its defaults, or accelerate's file

    def check_ranks(self, experiment: Any, ranks: int) -> None:
        """See `Parallel.check_ranks`; DeepSpeed and the file of its settings must be there."""
        super().check_ranks(experiment, ranks)
        self.settings()
        refuse_without_package("deepspeed", "parallel=zero3")
        muon = [f"{setting}.kind=muon" for setting, of in experiment.optimizers.items() if of.kind.value == "muon"]
        refused = dict.fromkeys(muon, "steps whole matrices, which DeepSpeed flattens")
        if experiment.kl.coef and not experiment.devices.reference.count:
            refused[f"kl.coef={experiment.kl.coef:g}"] = (
                "compares with a reference, which must be on devices of its own (devices.reference.num=1)"
            )
        if (dtype := experiment.model.dtype.value) in ("float16", "float64"):
            refused[f"model.dtype={dtype}"] = "is not kept: DeepSpeed steps in float32, and the loss is not scaled"
        for setting, why in refused.items():
            raise ConfigError(f"{setting} {why} with parallel=zero3: set another, or parallel=fsdp2, which divides too")

    def offloads(self, part: str) -> bool:
        """Whether "optimizer", with the gradients, or "param" is in the host's memory, or on its disk."""
        kept = self.settings().get("zero_optimization", {}).get(f"offload_{part}")
        return isinstance(kept, dict) and cast("dict[str, Any]", kept).get("device") in ("cpu", "nvme")

    def settings(self) -> dict[str, Any]:
        """What is taken of the file: all but what mtgrpo says itself. Raises ConfigError where that contradicts."""
        named, path = f"parallel.deepspeed_config={self.deepspeed_config}", Path(self.deepspeed_config).expanduser()
        if not self.deepspeed_config:
            return {}
        if not path.is_file():
            raise ConfigError(f"{named}: there is no such file")
        read = parse_yaml(read_bounded(path), path)  # which JSON is, too
        held = cast("dict[str, Any]", read if isinstance(read, dict) else {})
        zero: Any = held.get("zero_optimization")
        stage: Any = cast("dict[str, Any]", zero).get("stage") if isinstance(zero, dict) else None
        if stage != 3:
            raise ConfigError(f"{named} must say zero_optimization.stage: 3, and says {stage}: change it, or parallel")
        for key, (ours, empty) in OURS.items():
            if key in held and held[key] not in empty:
                shown = json.dumps(held[key])
                raise ConfigError(f"{named} says {key}: {shown:.80}, which {ours} says here: leave it out there")
        return _said({key: value for key, value in held.items() if key not in OURS})


def _said(value: Any) -> Any:
    """Without entries that leave it to DeepSpeed, or to who starts it."""
    if not isinstance(value, dict):
        return value
    return {key: _said(inner) for key, inner in cast("dict[str, Any]", value).items() if inner != "auto"}
