"""The memory plan: what a run needs of its device, before anything is loaded.

A run holds different things while it samples, while a micro-batch goes forward and backward, and while the optimiser
steps. The peak is the largest of the three.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from typing import Any

import torch

from mtgrpo.batch.settings import DEFAULT_BUDGET, BatchSettings, PlannedBatch
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Demand, Item, Phase
from mtgrpo.errors import ConfigError
from mtgrpo.model.checkpointing import decoder_layers
from mtgrpo.model.settings import FROM_SCRATCH, Quantization
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.auto import AutoParallel
from mtgrpo.parallel.ddp import DDP
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.placement import Placement
from mtgrpo.parallel.zero3 import Zero3
from mtgrpo.policy.optimizer import make_optimizers
from mtgrpo.policy.settings import Kind, OptimizerSettings

USABLE = 0.92  # of the device's memory; the rest is lost between the blocks of the allocator
LIBRARIES = {"cpu": 600_000_000, "cuda": 1_000_000_000}  # bytes that torch and transformers, or the CUDA context, take
LEAST_BUDGET = LEAST_CONTEXT = 1024  # tokens
BUDGETS = [2**power for power in range(16, 9, -1)]  # tokens, what batch.token_budget=null may become, the best first
WORTH = 0.99  # what of the peak a setting must leave to be proposed
ADAPTER_RANK = 16  # of what is proposed, as are
LEAST_FRACTION = 0.1
LEAST_CONCURRENT = 64  # conversations
ALONE = Placement()  # one device does everything


@dataclass(frozen=True)
class Plan:
    """What `experiment`, in which nothing is left open, needs of a device with `device_bytes` of memory."""

    rows: list[Item]
    device_bytes: int
    experiment: Experiment
    loading: int = 0  # bytes of a whole model, before it is divided, and of what is there then

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
        return max(self.peak, self.loading) <= USABLE * self.device_bytes

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


def plan(
    experiment: Experiment, device_bytes: int, device_type: str, taken: int = 0, placement: Placement = ALONE
) -> Plan:
    """What `experiment` needs of a "cuda" or "cpu" device with `device_bytes` of memory; loads no weights.

    `taken` bytes of it are in use already, by other processes. Of several devices that train it is the fullest.

    model.checkpointing=null and batch.token_budget=null become what there is room for: layers are computed once where
    that leaves a budget of the usual size. So do, before these, parallel=auto of several ranks and reshard=null. Raises
    ConfigError, with what would help, when there is no room at all, and when there is no such model.
    """
    ways = (replace(experiment, parallel=parallel) for parallel in _ways(experiment, placement.ranks))
    settled = [candidates for way in ways for candidates in _computed(way, device_type)]
    for candidates in settled:
        found = estimate(candidates[-1], device_bytes, device_type, taken, placement)
        if found.fits:
            larger = (estimate(candidate, device_bytes, device_type, taken, placement) for candidate in candidates[:-1])
            return next((candidate for candidate in larger if candidate.fits), found)
    tried = settled[-1][-1]
    found = estimate(tried, device_bytes, device_type, taken, placement)
    if found.loading > max(found.peak, USABLE * device_bytes):
        raise ConfigError(
            f"model.name={tried.model.name} is loaded whole before parallel={tried.parallel.name} divides it, in "
            f"{_gb(found.loading)} GB, and of {_gb(device_bytes)} GB {_gb(int(USABLE * device_bytes))} can be used: "
            "choose a smaller model"
        )
    twice = "even with layers computed twice " if tried.model.checkpointing else ""
    raise ConfigError(
        f"model.name={tried.model.name} with batch.token_budget={tried.batch.tokens} {twice}needs "
        f"{_gb(found.peak)} GB at its peak ({found.peak_phase.value}), and of {_gb(device_bytes)} GB "
        f"{_gb(int(USABLE * device_bytes))} can be used{f', {_gb(taken)} of them by others' if taken else ''}: "
        f"{_advice(tried, found, device_type, taken, placement)}"
    )


def _ways(experiment: Experiment, ranks: int) -> Iterator[Parallel]:
    """What parallel may become, the quickest first."""
    asked, whole, sharded = experiment.parallel, FSDP2(reshard=False), FSDP2(reshard=True)
    open_ = isinstance(asked, AutoParallel) and ranks > 1
    for way in [DDP(), whole, sharded] if open_ else [whole, sharded] if asked == FSDP2() else [asked]:
        with contextlib.suppress(ConfigError) if open_ and way.divides else contextlib.nullcontext():
            if ranks > 1:
                way.check_ranks(experiment, ranks)
            yield way


def _computed(experiment: Experiment, device_type: str) -> Iterator[list[Experiment]]:
    """What model.checkpointing may become, the best first, each with the budgets there may be, the largest first."""
    auto = experiment.batch.token_budget is None and device_type == "cuda"
    asked = experiment.model.checkpointing
    for checkpointing in (False, True) if asked is None else (asked,):
        model = replace(experiment.model, checkpointing=checkpointing)
        least = DEFAULT_BUDGET if asked is None and not checkpointing else LEAST_BUDGET
        budgets = [budget for budget in BUDGETS if budget >= least] if auto else [experiment.batch.tokens]
        batch = PlannedBatch if auto else BatchSettings
        yield [replace(experiment, model=model, batch=batch(budget)) for budget in budgets]


def estimate(
    experiment: Experiment, device_bytes: int, device_type: str, taken: int = 0, placement: Placement = ALONE
) -> Plan:
    """As `plan`, but computes layers twice only with model.checkpointing=true, and refuses nothing."""
    skeleton = Skeleton(experiment.model, device_type)
    tokens = experiment.batch.tokens
    shares = placement.ranks if experiment.parallel.divides else 1  # into which a model is divided
    weights, trained = (sum(w.nbytes for w in of) for of in (skeleton.model.parameters(), skeleton.trained))
    steps = [_step_bytes(skeleton, settings, device_type) for settings in experiment.optimizers.values()]
    gradients, state, scratch = map(max, zip(*steps, strict=True))
    held = weights
    if isinstance(zero3 := experiment.parallel, Zero3):
        steps_away, weights_away = (device_type == "cuda" and zero3.offloads(part) for part in ("optimizer", "param"))
        gradients, state = (0, 0) if steps_away else (gradients, state + trained)  # it steps a copy of them
        held = 0 if weights_away else weights
    learning = (Phase.training, Phase.update)
    activations = skeleton.training_bytes(tokens)
    head = skeleton.head_bytes(tokens)
    # Of a context beyond the budget each layer's keys and values are kept, and their gradients; where layers are
    # computed once, also a copy for what is computed below it, and one for the chains that are held.
    token_bytes, longest = skeleton.kv_cache_bytes, _longest_context(skeleton, experiment)
    path = (2 if experiment.model.checkpointing else 4) * longest * token_bytes
    counted = f"activations, {tokens:,} tokens" if activations else "activations are not known"
    rows = [
        Item("libraries and context", LIBRARIES[device_type]),
        Item("taken by others", taken),
        Item("weights", held // shares),
        Item("weights and gradients put together", _gathered(skeleton, experiment.parallel, shares), (Phase.training,)),
        Item("optimiser state", state // shares),
        Item("reference", trained // shares if experiment.kl.coef and not placement.reference else 0),
        Item("gradients", gradients // shares, learning),
        Item(counted, max(activations - head, 0), (Phase.training,)),
        Item("keys and values of a context", path, (Phase.training,)),
        Item("head, in tiles", head, (Phase.training,)),
        Item("optimiser step", scratch // shares, (Phase.update,)),
    ]
    loading = LIBRARIES[device_type] + taken + weights if shares > 1 else 0
    if not placement.shared:
        return Plan([row for row in rows if row.bytes or row.name == counted], device_bytes, experiment, loading)
    if placement.ranks > 1 and experiment.engine.cache_share:  # the first rank's device
        rows += _controller(weights, device_type)
    of_engine, engine = experiment.engine.plan_memory(_asked(skeleton, experiment, rows, device_bytes, device_type))
    rows = [row for row in (*rows, *of_engine) if row.bytes or row.name == counted]
    return Plan(rows, device_bytes, replace(experiment, engine=engine), loading)


def planned(
    experiment: Experiment, placement: Placement, device_bytes: int, taken: int = 0, device_type: str = "cuda"
) -> tuple[Experiment, list[str]]:
    """`experiment` with what memory has a say in settled, and what the user is told of its devices, which are alike.

    `taken` bytes of each are in use already. Raises ConfigError where one has too little.
    """
    found = plan(experiment, device_bytes, device_type, taken, placement)
    tables = [placement.describe(found.experiment.parallel), found.describe()]
    if placement.train and placement.reference:
        referring = plan_reference(found.experiment, device_bytes, len(placement.reference))
        tables.append(f"on each GPU for the reference:\n{referring.describe()}")
    if placement.rollout and not placement.shared:
        sampling = plan_sampling(found.experiment, device_bytes)
        return sampling.experiment, [*tables, f"on each GPU that samples:\n{sampling.describe()}"]
    return found.experiment, tables


def plan_sampling(experiment: Experiment, device_bytes: int) -> Plan:
    """What sampling needs of a GPU that does nothing else; parallel is settled. Raises ConfigError, as `plan` does."""
    skeleton = Skeleton(experiment.model, "cuda")
    weights = sum(weight.nbytes for weight in skeleton.model.parameters())
    rows = _controller(weights, "cuda") if experiment.engine.cache_share else []
    demand = _asked(skeleton, experiment, rows, device_bytes, "cuda")
    of_engine, engine = experiment.engine.plan_memory(replace(demand, phases=(Phase.sampling,), trains=False))
    found = Plan([*rows, *of_engine], device_bytes, replace(experiment, engine=engine))
    if not found.fits:
        raise ConfigError(
            f"model.name={experiment.model.name} needs {_gb(found.peak)} GB to sample, and of {_gb(device_bytes)} GB "
            f"{_gb(int(USABLE * device_bytes))} can be used: set engine.memory_fraction lower, or take a smaller model"
        )
    return found


def plan_reference(experiment: Experiment, device_bytes: int, devices: int) -> Plan:
    """What the reference needs of each of its `devices`; all else is settled. Raises ConfigError, as `plan` does."""
    skeleton, tokens = Skeleton(experiment.model, "cuda"), experiment.batch.tokens
    weights = sum(weight.nbytes for weight in skeleton.model.parameters())
    shares = devices if experiment.parallel.divides else 1
    path = 2 * _longest_context(skeleton, experiment) * skeleton.kv_cache_bytes
    rows = [
        Item("libraries and context", LIBRARIES["cuda"]),
        Item("weights", weights // shares),
        Item("weights put together", _gathered(skeleton, FSDP2(reshard=True), shares), (Phase.training,)),
        Item(f"activations, {tokens:,} tokens", skeleton.scoring_bytes(tokens), (Phase.training,)),
        Item("keys and values of a context", path, (Phase.training,)),
    ]
    loading = LIBRARIES["cuda"] + weights if shares > 1 else 0
    found = Plan([row for row in rows if row.bytes], device_bytes, experiment, loading)
    if not found.fits:
        raise ConfigError(
            f"model.name={experiment.model.name} needs {_gb(max(found.peak, loading))} GB for the reference, and of "
            f"{_gb(device_bytes)} GB {_gb(int(USABLE * device_bytes))} can be used: set batch.token_budget lower, or "
            "leave devices.reference out, and it is kept on the GPUs that train"
        )
    return found


def _controller(weights: int, device_type: str) -> list[Item]:
    """What the process holds that samples by itself, where others train."""
    return [Item("libraries and context, to sample", LIBRARIES[device_type]), Item("weights, to sample", weights)]


def _gathered(skeleton: Skeleton, parallel: Parallel, shares: int) -> int:
    """Bytes that a pass holds beside its share: weights of others, and gradients that are not divided yet."""
    if shares == 1:
        return 0
    every, trained = ([*of] for of in (skeleton.model.parameters(), skeleton.trained))
    whole = sum(weight.nbytes for weight in (*every, *trained))
    if isinstance(parallel, FSDP2) and not parallel.reshard:
        return whole - whole // shares
    layers = [[*layer.parameters()] for layer in decoder_layers(skeleton.model)]
    in_layers = {weight for layer in layers for weight in layer}
    largest = max((layer for layer in layers), key=lambda layer: sum(weight.nbytes for weight in layer), default=[])
    outside = [weight for weight in every if weight not in in_layers]
    both = [*outside, *largest]  # two layers' weights: the next one's are on their way
    return sum(weight.nbytes * (2 if weight.requires_grad else 1) for weight in both) + sum(w.nbytes for w in largest)


def _asked(skeleton: Skeleton, experiment: Experiment, rows: list[Item], device_bytes: int, device_type: str) -> Demand:
    """What the engine is asked for, beside `rows`."""
    rollout, measured = experiment.rollout, experiment.eval
    ahead = rollout.ahead if rollout.max_staleness else 1.0
    at_once = int((rollout.group_size + rollout.extra_samples) * rollout.prompts_per_step * ahead)
    sleeps = not rollout.max_staleness and (device_type == "cpu" or not experiment.sft.steps)
    return Demand(
        model=skeleton.model,
        token_bytes=skeleton.kv_cache_bytes,
        longest=_longest_context(skeleton, experiment),
        conversations=min(rollout.max_concurrent, max(at_once, measured.tasks * measured.samples)),
        phases=(Phase.sampling,) if sleeps else tuple(Phase),
        device_type=device_type,
        device_bytes=device_bytes,
        left_bytes=USABLE * device_bytes - Plan(rows, device_bytes, experiment).needed(Phase.sampling),
        process_bytes=LIBRARIES["cuda"],
    )


def check_cache(experiment: Experiment, device: torch.device) -> None:
    """Raise ConfigError where a KV cache in this process would hold no whole conversation; loads no weights."""
    if experiment.engine.cache_share:
        skeleton = Skeleton(experiment.model, device.type)
        if token_bytes := skeleton.kv_cache_bytes:
            experiment.engine.check_room(device, token_bytes, _longest_context(skeleton, experiment))


def _step_bytes(skeleton: Skeleton, settings: OptimizerSettings, device_type: str) -> tuple[int, int, int]:
    """The gradients of a stage, what its optimisers keep, and what these make for a moment while they step."""
    state = scratch = 0
    trained = sum(weight.nbytes for weight in skeleton.trained)
    if settings.offload and device_type == "cuda":  # gradients leave one by one
        return max(weight.nbytes for weight in skeleton.trained), 0, 0
    if settings.kind is Kind.adamw_8bit:  # two moments of a byte a number, and two fp32 numbers for each 256 of each
        return trained, trained // 2 + trained // 128, 0
    for optimizer in make_optimizers(skeleton.model, settings, {weight: weight for weight in skeleton.trained}):
        sizes = [weight.nbytes for group in optimizer.param_groups for weight in group["params"]]
        if isinstance(optimizer, torch.optim.Muon):  # one moment; a matrix at a time, in bfloat16
            state, scratch = state + sum(sizes), scratch + 2 * max(sizes)
        else:  # two moments; on a CPU the root of one of them, of all weights at once
            state, scratch = state + 2 * sum(sizes), scratch + (sum(sizes) if device_type == "cpu" else 0)
    return trained, state, scratch


def _longest_context(skeleton: Skeleton, experiment: Experiment) -> int:
    most = experiment.batch.context
    own = int(getattr(skeleton.model.config, "max_position_embeddings", None) or most)
    return experiment.environment.max_context_length or min(own, most)


def _advice(experiment: Experiment, found: Plan, device_type: str, taken: int, placement: Placement) -> str:
    """The settings that lower the peak, the cheapest first, each with what is needed with it and those before."""
    helping: dict[str, str] = {}
    while not found.fits:
        for phases, setting, value in _cheaper(experiment, placement.ranks):
            if value is None or found.peak_phase not in phases:
                continue
            cheaper: Experiment = reduce(lambda made, path: _with(made, path, value), setting.split(), experiment)
            try:
                lower = estimate(cheaper, found.device_bytes, device_type, taken, placement)
            except ConfigError:  # the cache would hold no conversation
                continue
            if lower.peak < WORTH * found.peak:
                word = value.name if isinstance(value, Parallel | Enum) else str(value)
                words = " and ".join(f"{path}={word.lower()}" for path in setting.split())
                helping[setting] = f"{words} ({_gb(lower.peak)} GB)"
                experiment, found = cheaper, lower
                break
        else:
            tried = ", ".join(helping.values()) or "less"
            more = ", or divide it: parallel=fsdp2 on more GPUs (devices.train.num)" if device_type == "cuda" else ""
            return f"choose a smaller model; this one is too large even with {tried}{more}"
    return f"set {', then '.join(helping.values())}"


def _with(settings: Any, path: str, value: object) -> Any:
    """`settings` with another value at `path`, names with dots between them."""
    name, _, rest = path.partition(".")
    return replace(settings, **{name: _with(getattr(settings, name), rest, value) if rest else value})


def _cheaper(experiment: Experiment, ranks: int) -> list[tuple[tuple[Phase, ...], str, Any]]:
    """By price (time, then what is learnt, then contexts): phases that need less, settings, value; None = no more."""
    model, parallel, stages = experiment.model, experiment.parallel, experiment.optimizers.items()
    divided = None if parallel.divides or ranks == 1 or model.quantization is not Quantization.none else FSDP2(True)
    context = experiment.environment.max_context_length or experiment.batch.context
    kept = " ".join(f"{name}.offload" for name, of in stages if not of.offload and of.kind is not Kind.adamw_8bit)
    adapts = model.lora.rank or model.name in FROM_SCRATCH
    quantizes = model.lora.rank and model.quantization is Quantization.none and not parallel.divides
    again = isinstance(parallel, FSDP2) and not parallel.reshard and ranks > 1
    shrinks = experiment.engine.cache_share > LEAST_FRACTION
    crowded = experiment.rollout.max_concurrent > LEAST_CONCURRENT
    return [
        (tuple(Phase), "parallel", divided),
        ((Phase.training,), "parallel.reshard", True if again else None),
        ((Phase.training,), "model.checkpointing", None if model.checkpointing else True),
        ((Phase.training,), "batch.token_budget", _half(experiment.batch.tokens, LEAST_BUDGET)),
        ((Phase.training, Phase.update), kept, None if parallel.divides or not kept else True),
        (tuple(Phase), "model.lora.rank", None if adapts else ADAPTER_RANK),
        (tuple(Phase), "model.quantization", Quantization.nf4 if quantizes else None),
        (tuple(Phase), "engine.memory_fraction", LEAST_FRACTION if shrinks else None),
        ((Phase.sampling,), "rollout.max_concurrent", LEAST_CONCURRENT if crowded else None),
        ((Phase.training, Phase.sampling), "environment.max_context_length", _half(context, LEAST_CONTEXT)),
    ]


def _half(tokens: int, least: int) -> int | None:
    return tokens // 2 if tokens // 2 >= least else None


def _gb(amount: int) -> str:
    return f"{amount / 1e9:,.2f}" if amount < 1e10 else f"{amount / 1e9:,.1f}"
