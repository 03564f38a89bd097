"""Whether a run fits machines that are elsewhere, by the memory plan, and how its ranks are placed on them."""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import ConfigError, meant
from mtgrpo.parallel.launch import Launch
from mtgrpo.parallel.placement import place
from mtgrpo.stages.budget import forecast

TRIED = (1, 2, 4, 8, 16)  # machines, with count=auto


@dataclass(frozen=True)
class Machine:
    """A kind of machine."""

    name: str
    gpus: int
    gpu: str  # its kind
    gpu_gb: float  # of each, of 10^9 bytes
    memory_gb: float  # of the machine
    dollars: float  # an hour
    as_of: str  # when that was its price


@dataclass(frozen=True)
class Fleet:
    """Machines on which a run fits, and how it starts there."""

    hosts: int
    processes: int  # that start on each; of a single machine 1: the run starts its ranks by itself
    words: list[str]  # for the run
    told: list[str]  # to the user: who does what, and the memory plan


def machine(name: str) -> Machine:
    """A machine of SageMaker. Raises ConfigError for one that the table does not have."""
    table = yaml.safe_load(Path(__file__).with_name("instances.yaml").read_text())
    known = table["instances"]
    if name not in known:
        hint = meant(name, known) or f"known are {', '.join(known)}; "
        raise ConfigError(f"instance={name}: there is no such machine in launch/instances.yaml; {hint.rstrip('; ')}")
    return Machine(name, as_of=str(table["as_of"]), **known[name])


def fit(experiment: Experiment, kind: Machine, count: str) -> Fleet:
    """`count` machines of a kind, or, with auto, the fewest that hold the run. Raises ConfigError where none do."""
    if count != "auto" and not (count.isdigit() and int(count)):
        raise ConfigError(f"count={count}: give a number of machines, or auto for the fewest that hold the run")
    tried = TRIED if count == "auto" else (int(count),)
    for hosts in tried:
        try:
            return _fitted(experiment, kind, hosts)
        except ConfigError as error:
            if hosts == tried[-1]:
                raise ConfigError(f"instance={kind.name} count={hosts}: {error}") from error
    raise AssertionError


def _fitted(experiment: Experiment, kind: Machine, hosts: int) -> Fleet:
    """Raises ConfigError where the run does not fit, or settings contradict one another."""
    devices, words, each = experiment.devices, list[str](), 1
    if kind.gpus:
        asked, ahead, most = devices.train.count, experiment.rollout.max_staleness > 0, experiment.engine.most_devices
        free = replace(devices, train=replace(devices.train, num=None, ids=None)) if hosts > 1 else devices
        each = len(place(free, Launch(), kind.gpus, alone=False, ahead=ahead, most=most).train)
        each = max(1, asked // hosts) if asked and hosts > 1 else each
    launch = Launch(hosts * each, each) if hosts > 1 else Launch()
    if hosts == 1 and each > 1 and devices.train.count is None:
        words = [f"devices.train.num={each}"]
        experiment = replace(experiment, devices=replace(devices, train=replace(devices.train, num=each)))
    told = forecast(experiment, launch, kind.gpus, int((kind.gpu_gb if kind.gpus else kind.memory_gb) * 1e9))
    return Fleet(hosts, each if hosts > 1 else 1, words, told)
