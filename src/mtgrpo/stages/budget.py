"""How long a run is: what it would take, what it has used, and which limit it has reached."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mtgrpo.config.experiment import LATEST, Experiment, TrainerSettings
from mtgrpo.errors import ConfigError, UnreachableError
from mtgrpo.messages import spoken
from mtgrpo.model import smollm2
from mtgrpo.model.settings import FROM_SCRATCH, SHIPPED
from mtgrpo.parallel.launch import Launch, read_launch
from mtgrpo.parallel.placement import arrange, settle
from mtgrpo.parts import extension
from mtgrpo.record.reading import as_typed, flat
from mtgrpo.runtime.resources import count_gpus
from mtgrpo.runtime.text import printable, shorten
from mtgrpo.stages.checks import begun_from, open_tasks
from mtgrpo.stages.resume import told_of
from mtgrpo.stages.trial import untried
from mtgrpo.types import Group
from mtgrpo.weights.saved import newest_of

if TYPE_CHECKING:
    from mtgrpo.config.compose import Configured

LIMITS = ("steps", "epochs", "total_turns", "wall_time_s")  # of a run's length, in the trainer's settings
GPU_BYTES = 80 * 10**9  # of each GPU that a dry run plans for where there is none


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


def no_better(success: Mapping[int, float], stop: int) -> str:
    """Says that the last `stop` evaluations (0 = never) were no better than one before; "" where they were.

    success: what was measured of held-out tasks, by the step after which it was.
    """
    best = max(success, key=lambda step: (success[step], -step), default=0)
    later = sum(step > best for step in success)
    if not stop or later < stop:
        return ""
    return f"eval.stop={stop}: held-out success has not been above {success[best]:.3f} since step {best}"


def described(command: str, composed: Configured, folder: Path | None) -> str:
    """The verdict of the checks with what a run would take, what it would note, and the options that were chosen.

    folder: of a run that may go on there.
    """
    choices = " ".join(f"{group}={option}" for group, option in composed.choices.items())
    found = begun_from(composed.experiment, folder, verify=False) if command in ("train", "sft") else None
    plan = _planned(command, composed.experiment, found.state if found else {})
    own = untried(composed.experiment, command in ("train", "sft"))
    if composed.experiment.model.lora.targets:
        own += ", nor model.lora.targets compared with the model's layers"
    notes = composed.experiment.notes if command == "train" else []
    noted = " that stops a run (see the notes above)" * composed.noted
    lines = [f"no fault found{noted}, and nothing was run{own}; a run would be {plan}", *notes, choices]
    if found:
        typed = {group: as_typed(option) for group, option in composed.choices.items()}
        now = {**typed, **flat(yaml.safe_load(composed.values)), **extension.digests}
        done = found.state.get("budget", {}).get("steps", 0)  # a warm start counts its own
        over = ": no step is left" * (command == "train" and 0 < composed.experiment.trainer.steps <= done)
        if composed.experiment.resume == LATEST and folder:
            newest = newest_of(folder) or found.path
            over += "; its checksums were not looked at" + f", {newest.name} is damaged" * (newest != found.path)
        lines += [f"it would go on from {found.path}, after step {found.step}{over}", *told_of(found, now)]
    elif composed.experiment.resume and command in ("train", "sft"):
        lines.append(f"there is no checkpoint in {folder} yet: it would begin at the start")
    if command in ("train", "sft"):
        lines += _placed(composed.experiment)
    return "\n".join([*lines, *_first_prompt(composed.experiment), "--cfg job prints every setting"])


def _first_prompt(experiment: Experiment) -> list[str]:
    """What the first training task says to the policy, by role and cut short; [] where only a run can know it."""
    if experiment.task.opens:
        return []
    try:
        task = next(open_tasks(experiment)[0], None)
    except UnreachableError:
        return []
    said = [shorten(printable(spoken(message))) for message in task.messages] if task else []
    return [f"the first of its tasks, {task.id}:", *said] if task else []


def _placed(experiment: Experiment) -> list[str]:
    """Which devices would do what, and what they would need of their memory. ConfigError where it is too much.

    Where there is no GPU, a model of the hub is planned for as many as are asked for, and nothing is refused.
    """
    launch, gpus, name = read_launch(os.environ), count_gpus(), experiment.model.name
    parallel, placement = settle(experiment, launch, gpus)
    if placement.placed:
        return [placement.describe(parallel)]
    if gpus:
        import torch  # noqa: PLC0415  a small model on a machine without a GPU does without

        device_bytes = torch.cuda.get_device_properties(placement.train[0]).total_memory
        return forecast(experiment, launch, gpus, device_bytes)
    here = [placement.describe(parallel)] if placement.several else []
    if name in (*FROM_SCRATCH, SHIPPED, smollm2.NAME) or Path(name).is_dir():
        return here
    devices, train = experiment.devices, experiment.devices.train.count or placement.ranks
    sample, refer = devices.rollout.count, devices.reference.count or 0
    apart = refer + ((train if experiment.rollout.max_staleness else 0) if sample is None else sample)
    try:
        said = forecast(experiment, launch, train + apart, GPU_BYTES)
    except ConfigError as error:
        said = [f"memory: {error}"]
    return [*here, f"no GPU is here; on GPUs of {GPU_BYTES / 1e9:.0f} GB it would be", *said]


def forecast(experiment: Experiment, launch: Launch, gpus: int, device_bytes: int) -> list[str]:
    """Who does what on `gpus` devices, 0 = on a CPU, and what of these bytes they need. ConfigError for too few."""
    from mtgrpo.memory import planned  # noqa: PLC0415  it imports torch, which wrong words do without

    try:
        settled, placement, _ = arrange(experiment, launch, gpus)
        return planned(settled, placement, device_bytes, 0, "cuda" if gpus else "cpu")[1]
    except UnreachableError as error:
        parallel, placement = settle(experiment, launch, gpus)
        return [placement.describe(parallel), f"memory: not planned, for {error}"]


def _planned(command: str, experiment: Experiment, begun: Mapping[str, Any]) -> str:
    """What a run of `command` would sample and train, on a line. begun: the state from which it goes on."""
    rollout, sft, measured, asked = experiment.rollout, experiment.sft, experiment.eval, experiment.collect
    limits = [f"{name}={limit:g}" for name in LIMITS if (limit := getattr(experiment.trainer, name))]
    left = 0 if "stream" in begun else max(0, sft.steps - begun.get("sft", {"step": 0})["step"])
    warm_start = f"{left:,} steps of {sft.batch_size} demonstrations"
    evaluation = f"at most {measured.tasks:,} held-out tasks x {measured.samples} conversations, and a greedy one each"
    training = (
        f"steps of {rollout.prompts_per_step} tasks x {rollout.group_size} conversations up to trainer."
        f"{' or trainer.'.join(limits)}; before and after them {evaluation}"
    )
    plans = {
        "sft": warm_start,
        "train": f"{warm_start}, then {training}" if left else training,
        "eval": evaluation,
        "collect": f"{asked.tasks:,} tasks x {asked.samples} conversations",
    }
    return plans.get(command, "what is asked of it")
