"""Several processes that train one policy, called ranks: how they share the work, and which devices do what.

One file = one way to share it: settings alone, which `policy/layouts` carries out. `devices.py`: which devices train
and which sample.
"""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Part


@dataclass
class Parallel(Part, ABC):
    """Base of all ways in which several processes train one policy."""

    divides: ClassVar[bool] = False  # whether ranks share out weights, gradients and moments; else each has them whole

    @property
    def name(self) -> str:
        """As it is chosen."""
        return type(self).__module__.rpartition(".")[2]

    def check_ranks(self, experiment: Any, ranks: int) -> None:
        """Raise ConfigError where so many ranks, more than one, cannot train `experiment` in this way."""
        rollout, updates, sft = experiment.rollout, experiment.trainer, experiment.sft
        counts = {
            f"rollout.prompts_per_step={rollout.prompts_per_step} x rollout.group_size={rollout.group_size}": (
                rollout.prompts_per_step * rollout.group_size
            ),
            f"trainer.minibatch_trajectories={updates.minibatch_trajectories}": updates.minibatch_trajectories or ranks,
            f"sft.batch_size={sft.batch_size}": sft.batch_size if sft.steps else ranks,
        }
        for setting, count in counts.items():
            if count < ranks:
                raise ConfigError(
                    f"{setting}: {count} conversations for {ranks} ranks, of which some would have none; set it to "
                    f"{ranks} or more, or devices.train.num={count}"
                )
        for setting, optimizer in experiment.optimizers.items():
            if self.divides and optimizer.offload:
                raise ConfigError(
                    f"{setting}.offload=true steps whole weights on the host, and parallel={self.name} divides them: "
                    "leave it out, or set parallel=ddp"
                )
            if self.divides and optimizer.kind.value == "adamw_8bit":
                raise ConfigError(
                    f"{setting}.kind=adamw_8bit steps whole weights, which parallel={self.name} divides: set "
                    f"{setting}.kind=adamw, or parallel=ddp"
                )
        if self.divides and experiment.model.quantization.value != "none":
            raise ConfigError(
                f"model.quantization={experiment.model.quantization.value} packs weights, and parallel={self.name} "
                "cannot divide what is packed: set parallel=ddp, or leave it out"
            )
