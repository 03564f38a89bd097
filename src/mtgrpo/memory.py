"""The memory plan: what a run needs of its device, before anything is loaded.

A run holds different things while it samples, while a micro-batch goes forward and backward, and while the optimiser
steps. The peak is the largest of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch

from mtgrpo.config.experiment import Experiment
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.decoder import copy_bytes
from mtgrpo.errors import ConfigError
from mtgrpo.model.settings import FROM_SCRATCH
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.policy.optimizer import make_optimizers

USABLE = 0.95  # of the device's memory; the rest is lost between the blocks of the allocator
LIBRARIES = {"cpu": 600_000_000, "cuda": 1_000_000_000}  # bytes that torch and transformers, or the CUDA context, take
LEAST_BUDGET = 1024  # tokens, where contexts have no limit of their own
WORTH = 0.99  # what of the peak a setting must leave to be proposed
ADAPTER_RANK = 16  # of what is proposed, as are
LEAST_FRACTION = 0.1
LEAST_CONCURRENT = 64  # conversations


class Phase(Enum):
    """What a run does with its memory at a time."""

    sampling = "sampling"
    training = "training"  # a micro-batch goes forward and backward
    update = "update"  # the optimiser steps


@dataclass(frozen=True)
class Row:
    """One thing that takes memory, and when."""

    name: str
    bytes: int
    phases: tuple[Phase, ...] = tuple(Phase)


@dataclass(frozen=True)
class Plan:
    """What a run needs of a device with `device_bytes` of memory."""

    rows: list[Row]
    device_bytes: int
    checkpointing: bool  # whether layers are computed twice: what model.checkpointing=null amounts to

    def needed(self, phase: Phase) -> int:
        """Bytes that are held in `phase`."""
        return sum(row.bytes for row in self.rows if phase in row.phases)

    @property
    def peak_phase(self) -> Phase:
        """When the most is held."""
        return max(Phase, key=self.needed)

    @property
    def peak(self) -> int:
        """The most that is held at once, in bytes."""
        return self.needed(self.peak_phase)

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.peak <= USABLE * self.device_bytes

    def describe(self) -> str:
        """A table: what takes how many GB (10^9 bytes) in each phase."""
        names = ["GB", *(row.name for row in self.rows), "together", "usable"]
        columns = [names]
        for phase in Phase:
            amounts = [row.bytes if phase in row.phases else 0 for row in self.rows]
            total = [self.needed(phase), int(USABLE * self.device_bytes)]
            columns.append([phase.value, *(_gb(amount) if amount else "" for amount in [*amounts, *total])])
        widths = [max(map(len, column)) for column in columns]
        lines = zip(*columns, strict=True)
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def plan(experiment: Experiment, device_bytes: int, device_type: str) -> Plan:
    """What `experiment` needs of a "cuda" or "cpu" device with `device_bytes` of memory; loads no weights.

    With model.checkpointing=null layers are computed twice where there is no room otherwise. Raises ConfigError, with
    what would help, when there is no room at all, and when there is no such model.
    """
    found = estimate(experiment, device_bytes, device_type)
    if not found.fits and experiment.model.checkpointing is None:
        experiment = _checkpointed(experiment)
        found = estimate(experiment, device_bytes, device_type)
    if found.fits:
        return found
    twice = "even with layers computed twice " if found.checkpointing else ""
    raise ConfigError(
        f"model.name={experiment.model.name} with batch.token_budget={experiment.batch.token_budget} {twice}needs "
        f"{_gb(found.peak)} GB at its peak ({found.peak_phase.value}), and of {_gb(device_bytes)} GB "
        f"{_gb(int(USABLE * device_bytes))} can be used: {_advice(experiment, found, device_type)}"
    )


def estimate(experiment: Experiment, device_bytes: int, device_type: str) -> Plan:
    """As `plan`, but computes layers twice only with model.checkpointing=true, and refuses nothing."""
    skeleton = Skeleton(experiment.model, device_type)
    tokens = experiment.batch.token_budget
    trained = sum(weight.nbytes for weight in skeleton.trained)
    state, scratch = _optimizer_bytes(skeleton, experiment)
    reference = trained if experiment.kl.coef else 0
    learning = (Phase.training, Phase.update)
    activations = skeleton.training_bytes(tokens)
    head = skeleton.head_bytes(tokens)
    counted = f"activations, {tokens:,} tokens" if activations else "activations are not known"
    rows = [
        Row("libraries and context", LIBRARIES[device_type]),
        Row("weights", sum(weight.nbytes for weight in skeleton.model.parameters())),
        Row("optimiser state", state),
        Row("reference", reference),
        *_engine_rows(skeleton, experiment, device_bytes, device_type),
        Row("gradients", trained, learning),
        Row(counted, max(activations - head, 0), (Phase.training,)),
        Row("head, in tiles", head, (Phase.training,)),
        Row("optimiser step", scratch, (Phase.update,)),
    ]
    return Plan(
        [row for row in rows if row.bytes or row.name == counted], device_bytes, bool(experiment.model.checkpointing)
    )


def _optimizer_bytes(skeleton: Skeleton, experiment: Experiment) -> tuple[int, int]:
    """What the optimisers keep, and what they make for a moment while they step."""
    state = scratch = 0
    for optimizer in make_optimizers(skeleton.model, experiment.optimizer):
        sizes = [weight.nbytes for group in optimizer.param_groups for weight in group["params"]]
        if isinstance(optimizer, torch.optim.Muon):  # one moment; a matrix at a time, in bfloat16
            state, scratch = state + sum(sizes), scratch + 2 * max(sizes)
        else:  # two moments; the root of one of them, of all weights at once
            state, scratch = state + 2 * sum(sizes), scratch + sum(sizes)
    return state, scratch


def _engine_rows(skeleton: Skeleton, experiment: Experiment, device_bytes: int, device_type: str) -> list[Row]:
    """Of the local engine; others have a memory of their own."""
    engine, rollout = experiment.engine, experiment.rollout
    if not isinstance(engine, Local):
        return []
    siblings = rollout.group_size + rollout.extra_samples
    ahead = rollout.ahead if rollout.max_staleness else 1.0
    evaluated = experiment.eval.tasks * experiment.eval.samples
    open_at_once = min(rollout.max_concurrent, max(int(siblings * rollout.prompts_per_step * ahead), evaluated))
    token_bytes = skeleton.kv_cache_bytes()
    room = int(engine.memory_fraction * device_bytes)
    if device_type == "cpu":  # where memory is taken when it is first used
        room = min(room, open_at_once * _longest_context(skeleton, experiment) * token_bytes)
    asleep = not rollout.max_staleness and (device_type == "cpu" or not experiment.sft.steps)
    vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
    tokens = f", {room // token_bytes:,} tokens" if token_bytes else ""
    return [
        Row("engine's copy of weights", copy_bytes(skeleton.model)),
        Row(f"KV cache{tokens}", room, (Phase.sampling,) if asleep else tuple(Phase)),
        Row("logits of a decoding step", 3 * 4 * open_at_once * vocabulary, (Phase.sampling,)),
    ]


def _longest_context(skeleton: Skeleton, experiment: Experiment) -> int:
    budget = experiment.batch.token_budget
    own = int(getattr(skeleton.model.config, "max_position_embeddings", None) or budget)
    return experiment.environment.max_context_length or min(own, budget)


def _advice(experiment: Experiment, found: Plan, device_type: str) -> str:
    """The settings that lower the peak, the cheapest first, each with what is needed with it and those before."""
    helping: dict[str, str] = {}
    while not found.fits:
        for phases, cheapen in _CHEAPER:
            step = cheapen(experiment) if found.peak_phase in phases else None
            if step is None:
                continue
            setting, cheaper = step
            tried = estimate(cheaper, found.device_bytes, device_type)
            if tried.peak < WORTH * found.peak:
                helping[setting.partition("=")[0]] = f"{setting} ({_gb(tried.peak)} GB)"
                experiment, found = cheaper, tried
                break
        else:
            return f"choose a smaller model; this one is too large even with {', '.join(helping.values()) or 'less'}"
    return f"set {', then '.join(helping.values())}"


_Step = tuple[str, Experiment] | None  # a setting as the user writes it, and the experiment with it; None = no more


def _checkpointed(experiment: Experiment) -> Experiment:
    return replace(experiment, model=replace(experiment.model, checkpointing=True))


def _twice(experiment: Experiment) -> _Step:
    return None if experiment.model.checkpointing else ("model.checkpointing=true", _checkpointed(experiment))


def _half_budget(experiment: Experiment) -> _Step:
    half = experiment.batch.token_budget // 2
    if half < max(experiment.environment.max_context_length, LEAST_BUDGET):
        return None
    return f"batch.token_budget={half}", replace(experiment, batch=replace(experiment.batch, token_budget=half))


def _adapters(experiment: Experiment) -> _Step:
    model = experiment.model
    if model.lora.rank or model.name in FROM_SCRATCH:
        return None
    adapted = replace(model, lora=replace(model.lora, rank=ADAPTER_RANK))
    return f"model.lora.rank={ADAPTER_RANK}", replace(experiment, model=adapted)


def _small_cache(experiment: Experiment) -> _Step:
    engine = experiment.engine
    if not isinstance(engine, Local) or engine.memory_fraction <= LEAST_FRACTION:
        return None
    smaller = replace(engine, memory_fraction=LEAST_FRACTION)
    return f"engine.memory_fraction={LEAST_FRACTION}", replace(experiment, engine=smaller)


def _few_conversations(experiment: Experiment) -> _Step:
    if experiment.rollout.max_concurrent <= LEAST_CONCURRENT:
        return None
    fewer = replace(experiment.rollout, max_concurrent=LEAST_CONCURRENT)
    return f"rollout.max_concurrent={LEAST_CONCURRENT}", replace(experiment, rollout=fewer)


def _half_contexts(experiment: Experiment) -> _Step:
    half = experiment.batch.token_budget // 2
    if half < LEAST_BUDGET:
        return None
    environment = replace(experiment.environment, max_context_length=half)
    shorter = replace(experiment, environment=environment, batch=replace(experiment.batch, token_budget=half))
    return f"environment.max_context_length={half} batch.token_budget={half}", shorter


# By price: first what costs time, then what is learnt, then contexts; and the phases in which it needs less.
_CHEAPER: tuple[tuple[tuple[Phase, ...], Callable[[Experiment], _Step]], ...] = (
    ((Phase.training,), _twice),
    ((Phase.training,), _half_budget),
    (tuple(Phase), _adapters),
    (tuple(Phase), _small_cache),
    ((Phase.sampling,), _few_conversations),
    ((Phase.training,), _half_contexts),
)


def _gb(amount: int) -> str:
    return f"{amount / 1e9:,.2f}" if amount < 1e10 else f"{amount / 1e9:,.1f}"
