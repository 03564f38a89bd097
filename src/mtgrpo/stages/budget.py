"""How long a run is: what it would take, what it has used, and which limit it has reached."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mtgrpo.config.experiment import Experiment, TrainerSettings
from mtgrpo.errors import UnreachableError
from mtgrpo.parallel.launch import read_launch
from mtgrpo.parallel.placement import settle
from mtgrpo.runtime.resources import count_gpus
from mtgrpo.stages.trial import untried
from mtgrpo.types import Group

if TYPE_CHECKING:
    from mtgrpo.config.compose import Composed


LIMITS = ("steps", "epochs", "total_turns", "wall_time_s")  # of a run's length, in the trainer's settings


@dataclass
class Budget:
    """Counts what a run has used, and says which limit it has reached."""

    settings: TrainerSettings
    steps: int = 0
    turns: int = 0
    seconds: float = 0.0
    idle: int = 0  # steps in a row with nothing to learn from

    def count(self, groups: Sequence[Group], seconds: float, idle: bool) -> None:
        """One more step is done; idle: there was nothing to learn from."""
        self.idle = self.idle + 1 if idle else 0
        self.steps += 1
        self.turns += sum(len(t.turns) for group in groups for t in group.trajectories)
        self.seconds += seconds

    def reached(self, epoch: int) -> str:
        """The first limit that is reached, as the user would write it; "" while there is none."""
        for name, value in zip(LIMITS, (self.steps, epoch, self.turns, self.seconds), strict=True):
            limit = getattr(self.settings, name)
            if limit and value >= limit:
                return f"trainer.{name}={limit}"
        most = self.settings.idle_steps
        return f"trainer.idle_steps={most}: there was nothing to learn from" if most and self.idle >= most else ""


def described(command: str, composed: Composed) -> str:
    """The verdict of the checks with what a run would take, what it would note, and the options that were chosen."""
    choices = " ".join(f"{group}={option}" for group, option in composed.choices.items())
    plan, own = _planned(command, composed.experiment), untried(composed.experiment)
    notes = composed.experiment.notes if command == "train" else []
    lines = [f"no fault found, and nothing was run{own}; a run would be {plan}", *notes, choices]
    if command in ("train", "sft"):
        lines += _placed(composed.experiment)
    return "\n".join([*lines, "--cfg job prints every setting"])


def _placed(experiment: Experiment) -> list[str]:
    """Which devices would do what, and what they would need of their memory. ConfigError where it is too much."""
    gpus = count_gpus()
    parallel, placement = settle(experiment, read_launch(os.environ), gpus)
    if not gpus:
        return [placement.describe(parallel)] if placement.several else []
    import torch  # noqa: PLC0415  a machine without a GPU does without

    from mtgrpo.memory import planned  # noqa: PLC0415

    try:
        engine = experiment.engine.chosen(experiment.model)[0].placed(placement.rollout, placement.shared)
        experiment = replace(experiment, parallel=parallel, engine=engine)
        return planned(experiment, placement, torch.cuda.get_device_properties(placement.train[0]).total_memory)[1]
    except UnreachableError as error:
        return [placement.describe(parallel), f"memory: not planned, for {error}"]


def _planned(command: str, experiment: Experiment) -> str:
    """What a run of `command` would sample and train, on a line."""
    rollout, sft, measured, asked = experiment.rollout, experiment.sft, experiment.eval, experiment.collect
    limits = [f"{name}={limit:g}" for name in LIMITS if (limit := getattr(experiment.trainer, name))]
    warm_start = f"{sft.steps:,} steps of {sft.batch_size} demonstrations"
    evaluation = f"at most {measured.tasks:,} held-out tasks x {measured.samples} conversations, and a greedy one each"
    training = (
        f"steps of {rollout.prompts_per_step} tasks x {rollout.group_size} conversations up to trainer."
        f"{' or trainer.'.join(limits)}; before and after them {evaluation}"
    )
    plans = {
        "sft": warm_start,
        "train": f"{warm_start}, then {training}" if sft.steps else training,
        "eval": evaluation,
        "collect": f"{asked.tasks:,} tasks x {asked.samples} conversations",
    }
    return plans.get(command, "what is asked of it")
