"""Which devices do what in a run, from its settings, what a launcher started, and what there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.auto import AutoParallel
from mtgrpo.parallel.ddp import DDP
from mtgrpo.parallel.devices import Devices, Role
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.launch import Launch
from mtgrpo.parallel.none import NoParallel
from mtgrpo.parallel.zero3 import Zero3
from mtgrpo.runtime.resources import threads_each

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}  # of accelerate, and what model.dtype must be then


@dataclass(frozen=True)
class Placement:
    """Which devices of this machine do what: GPUs by number. On a CPU there are none, and processes in their place."""

    ranks: int = 1  # processes that train, on all machines
    train: tuple[int, ...] = ()  # the GPU of each rank on this machine, by its LOCAL_RANK
    rollout: tuple[int, ...] = ()  # the GPUs that sample; () where others do, who were started elsewhere
    reference: tuple[int, ...] = ()  # the GPU of each process that has the reference; on a CPU a number for each
    placed: bool = False  # by a cluster, on devices of its machines

    @property
    def shared(self) -> bool:
        """Whether a GPU both trains and samples; on a CPU everything is shared."""
        return not self.train or bool({*self.train} & {*self.rollout})

    @property
    def several(self) -> bool:
        """Whether there are processes beside the one that samples."""
        return self.ranks > 1 or bool(self.reference)

    def describe(self, parallel: Parallel) -> str:
        """Who does what, on a line."""
        how = f"parallel={parallel.name}"
        if isinstance(parallel, FSDP2) and parallel.reshard is not None:
            how += f" parallel.reshard={str(parallel.reshard).lower()}"
        if self.placed:
            return f"devices: {self.ranks} to train ({how}), and those that sample, where the cluster places them"
        if not self.train:
            many = f"{self.ranks} processes train" if self.ranks > 1 else "one process trains"
            others = f", {len(self.reference)} with the reference" if self.reference else ""
            return f"devices: {many} on the CPU, threads of each: {threads_each(self.ranks)} ({how}){others}"
        more = f"; {self.ranks} on all machines" if self.ranks > len(self.train) else ""
        others = f", {_listed(self.reference)} for the reference" if self.reference else ""
        others += f", {_listed(self.rollout)} sample" if self.rollout else ""
        return f"devices: {_listed(self.train)} train ({how}{more}){others}"

    def settled(self, devices: Devices, launched: bool) -> Devices:
        """`devices` with what was left open. launched: the ranks were, and each knows its GPU."""
        train = Role(self.ranks, None if launched or not self.train else [*self.train])
        rollout = Role(ids=[*self.rollout]) if self.rollout and not self.shared else devices.rollout
        reference = Role(ids=[*self.reference]) if self.reference and self.train else devices.reference
        return replace(devices, train=train, rollout=rollout, reference=reference)


def settle(experiment: Any, launch: Launch, gpus: int) -> tuple[Parallel, Placement]:
    """How the ranks of a run share the work, and which devices do what.

    gpus: those of this machine, or of the cluster that places what trains. What memory has a say in is left open on
    GPUs: auto for several ranks, and `reshard`. Raises ConfigError where settings, launcher and machine contradict one
    another.
    """
    if experiment.cluster.places:
        return _settle_for_cluster(experiment, launch, gpus)
    placement = place(
        experiment.devices,
        launch,
        gpus,
        alone=isinstance(experiment.parallel, AutoParallel | NoParallel),
        ahead=experiment.rollout.max_staleness > 0,
        most=experiment.engine.most_devices,
    )
    parallel = _agreed(experiment.parallel, launch, placement.ranks)
    if not gpus and isinstance(parallel, AutoParallel):
        parallel = DDP()
    if not gpus and isinstance(parallel, FSDP2) and parallel.reshard is None:
        parallel = FSDP2(reshard=False)
    _check_accelerate(experiment, launch, gpus)
    if placement.ranks > 1:
        parallel.check_ranks(experiment, placement.ranks)
    elif isinstance(experiment.parallel, Zero3) and experiment.parallel.deepspeed_config:
        raise ConfigError(
            f"parallel.deepspeed_config={experiment.parallel.deepspeed_config} is for several ranks, and one trains: "
            "set devices.train.num=2 or more, or leave it out"
        )
    elif isinstance(parallel, FSDP2 | DDP | Zero3) and not (launch.ranks or experiment.devices.train.count or gpus):
        raise ConfigError(
            f"parallel={parallel.name} is for several processes, and nothing says how many: set devices.train.num=2, "
            "or start them with torchrun --nproc-per-node 2 -m mtgrpo"
        )
    return parallel, placement


def arrange(experiment: Any, launch: Launch, gpus: int) -> tuple[Any, Placement, str]:
    """`experiment` with engine, parallel and devices settled, which devices do what, and why this engine.

    Raises ConfigError as `settle` does, and UnreachableError where the engine follows from a model that is not here.
    """
    engine, why = experiment.engine.chosen(experiment.model)
    parallel, placement = settle(replace(experiment, engine=engine), launch, gpus)
    engine = engine.placed(placement.rollout, placement.shared)
    devices = placement.settled(experiment.devices, launch.ranks > 1)
    return replace(experiment, engine=engine, parallel=parallel, devices=devices), placement, why


def _settle_for_cluster(experiment: Any, launch: Launch, gpus: int) -> tuple[Parallel, Placement]:
    """As `settle`, where a cluster places each rank; what memory would have a say in is what takes the least of it.

    gpus: those of the cluster, as far as they are known.
    """
    devices, parallel = experiment.devices, experiment.parallel
    if launch.ranks > 1:
        raise ConfigError(
            f"WORLD_SIZE={launch.ranks} with cluster={experiment.cluster.name}: the cluster starts the ranks; start "
            "the run by itself, with devices.train.num"
        )
    for role in ("train", "rollout"):
        if ids := getattr(devices, role).ids:
            raise ConfigError(f"devices.{role}.ids={ids}: the cluster chooses which; set devices.{role}.num={len(ids)}")
    ranks = devices.train.num or 1
    if isinstance(parallel, NoParallel) and ranks > 1:
        raise ConfigError(f"parallel=none trains in one process, and devices.train asks for {ranks}: leave it out")
    if isinstance(parallel, AutoParallel):
        parallel = NoParallel() if ranks == 1 else FSDP2() if gpus else DDP()
    if isinstance(parallel, FSDP2) and parallel.reshard is None:
        parallel = FSDP2(reshard=bool(gpus))
    if ranks > 1:
        parallel.check_ranks(experiment, ranks)
    return parallel, Placement(ranks, placed=True)


def place(devices: Devices, launch: Launch, gpus: int, *, alone: bool, ahead: bool, most: int | None) -> Placement:
    """Which devices do what.

    alone: one trains where no number is given; else all that do not sample. ahead: sampling goes on while others train.
    most: GPUs that the engine can use, None = any number, 0 = it is elsewhere.
    Raises ConfigError.
    """
    asked, wanted = devices.train.count, devices.rollout.count
    if launch.ranks > 1 and asked not in (None, launch.ranks):
        raise ConfigError(
            f"devices.train asks for {asked} ranks, and the launcher started WORLD_SIZE={launch.ranks}: leave "
            f"devices.train out, or start {asked} processes"
        )
    if wanted and most is not None and wanted > most:
        how = "samples in one process" if most else "asks servers that somebody else started"
        raise ConfigError(f"devices.rollout asks for {wanted} devices, and the engine {how}: leave it out")
    if not gpus:
        return Placement(_processes(devices, launch), reference=tuple(devices.reference.numbers))
    for role in ("train", "reference", "rollout"):
        ids = getattr(devices, role).ids or ()
        if beyond := [number for number in ids if number >= gpus]:
            raise ConfigError(f"devices.{role}.ids={[*ids]}: there is no GPU {beyond[0]}, the last is {gpus - 1}")
    train = _training(devices, launch, gpus, alone, ahead and most is None)
    rollout = _sampling(devices, train, gpus, ahead and (launch.ranks > 1 or bool(asked) or not alone), most)
    if ahead and devices.rollout.ids and (both := sorted({*train} & {*rollout})):
        raise ConfigError(
            f"devices.rollout.ids={devices.rollout.ids}: GPU {both[0]} trains too, and with rollout.max_staleness "
            "above 0 both go on at once; name others, or leave devices.rollout out"
        )
    reference = _referring(devices, train, rollout, gpus)
    ranks = launch.ranks or len(train)
    if most == 1 and ranks == 1 and wanted and not asked:
        train = rollout
    if most == 1 and ranks == 1 and rollout != train:
        raise ConfigError(
            f"devices.rollout: the engine samples in the process that trains, on GPU {train[0]}: set engine=server, or "
            "leave it out"
        )
    return Placement(ranks, train, rollout, reference)


def _training(devices: Devices, launch: Launch, gpus: int, alone: bool, splits: bool) -> tuple[int, ...]:
    """The GPU of each rank of this machine. splits: without a word of either half of them samples."""
    if launch.ranks > 1:
        if devices.train.ids:
            raise ConfigError(
                f"devices.train.ids={devices.train.ids}: a launcher gives each process the GPU of its LOCAL_RANK; "
                "leave it out, and set CUDA_VISIBLE_DEVICES before the command"
            )
        if launch.local > gpus:
            raise ConfigError(
                f"the launcher started {launch.local} processes on a machine with {gpus} GPUs: start one for each"
            )
        return tuple(range(launch.local or min(launch.ranks, gpus)))
    if devices.train.ids:
        return tuple(devices.train.ids)
    sampling, referring = devices.rollout, devices.reference
    every = sorted(range(gpus), key=lambda number: number in (*(sampling.ids or ()), *(referring.ids or ())))
    free = gpus - (referring.count or 0)
    rest = free - (sampling.count or (free // 2 if splits else 0))
    count = devices.train.num or (1 if alone else max(1, rest))
    if count > gpus:
        raise ConfigError(f"devices.train.num={count}: this machine has {gpus} GPUs; set {gpus} or less")
    return tuple(sorted(every[:count]))


def _sampling(devices: Devices, train: Sequence[int], gpus: int, apart: bool, most: int | None) -> tuple[int, ...]:
    """The GPUs that sample. apart: others than those that train, where there are any and nothing is said."""
    others = [number for number in range(gpus) if number not in (*train, *(devices.reference.ids or ()))]
    free = others[: len(others) - (devices.reference.num or 0)] if devices.reference.ids is None else others
    if devices.rollout.ids:
        return tuple(devices.rollout.ids)
    if wanted := devices.rollout.num:
        if most == 1 and len(train) == 1 and not devices.train.count:  # one process does both
            return (*train,)
        if wanted > len(free):
            raise ConfigError(
                f"devices.rollout.num={wanted} beside {len(train)} that train, and this machine has {gpus} GPUs: leave "
                "it out, and they share"
            )
        return tuple(free[:wanted])
    return tuple((free if apart and free else [*train])[:most])


def _referring(devices: Devices, train: Sequence[int], rollout: Sequence[int], gpus: int) -> tuple[int, ...]:
    """The GPUs of the reference, which do nothing else."""
    if ids := devices.reference.ids:
        if both := sorted({*ids} & {*train, *rollout}):
            raise ConfigError(
                f"devices.reference.ids={ids}: GPU {both[0]} trains or samples too; name others, or leave it out, and "
                "the reference is kept on those that train"
            )
        return tuple(ids)
    free = [number for number in range(gpus) if number not in (*train, *rollout)]
    if (wanted := devices.reference.num or 0) > len(free):
        raise ConfigError(
            f"devices.reference.num={wanted}: {len(free)} of the {gpus} GPUs of this machine neither train nor sample; "
            "leave it out, and the reference is kept on those that train"
        )
    return tuple(free[:wanted])


def _processes(devices: Devices, launch: Launch) -> int:
    """How many processes train, on a machine without a GPU."""
    for role in ("train", "reference", "rollout"):
        if ids := getattr(devices, role).ids:
            raise ConfigError(
                f"devices.{role}.ids={ids}: this machine has no GPU, so that devices are processes: set "
                f"devices.{role}.num={len(ids)}"
            )
    ranks = launch.ranks or devices.train.num or 1
    if (wanted := devices.rollout.num) and (wanted > 1 or ranks == 1):
        raise ConfigError(
            f"devices.rollout.num={wanted}: without a GPU the process that starts the run samples, or engine.replicas "
            "servers: leave it out"
        )
    return ranks


def _agreed(parallel: Parallel, launch: Launch, ranks: int) -> Parallel:
    """`parallel` with what the launcher says. Raises ConfigError where they contradict one another."""
    said = launch.parallel
    if isinstance(parallel, AutoParallel):
        return said or (parallel if ranks > 1 else NoParallel())
    if isinstance(parallel, NoParallel) and ranks > 1:
        source = f"WORLD_SIZE={launch.ranks}" if launch.ranks > 1 else "devices.train"
        raise ConfigError(f"parallel=none trains in one process, and {source} asks for {ranks}: leave parallel out")
    if said is None:
        return parallel
    if type(said) is not type(parallel):
        raise ConfigError(
            f"parallel={parallel.name}, and accelerate launch is configured for {said.name}: leave parallel out, or "
            "start without accelerate's file (torchrun)"
        )
    for name, theirs in vars(said).items():
        ours = getattr(parallel, name)
        if ours not in (None, "") and theirs not in (None, "", ours):
            raise ConfigError(
                f"parallel.{name}={ours}, and accelerate launch is configured for {theirs}: leave one of them out"
            )
    return replace(parallel, **{name: value for name, value in vars(said).items() if value not in (None, "")})


def _check_accelerate(experiment: Any, launch: Launch, gpus: int) -> None:
    """Raise ConfigError where accelerate's file and settings of the run contradict one another."""
    dtype = experiment.model.dtype.value
    wanted = PRECISIONS.get(launch.precision, dtype)
    if dtype != wanted and not (dtype == "auto" and gpus and launch.precision == "bf16"):
        raise ConfigError(
            f"accelerate launch says mixed_precision={launch.precision}, and model.dtype={dtype}"
            f"{'' if gpus or dtype != 'auto' else ', which is float32 on a CPU'}: set model.dtype={wanted}, or "
            'mixed_precision: "no"'
        )
    norm = experiment.optimizer.max_grad_norm
    if launch.max_grad_norm not in (None, norm):
        raise ConfigError(
            f"accelerate launch says gradient_clipping={launch.max_grad_norm:g}, and optimizer.max_grad_norm={norm:g}: "
            "set one as the other"
        )


def _listed(numbers: Sequence[int]) -> str:
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
