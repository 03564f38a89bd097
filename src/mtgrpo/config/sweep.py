"""What a sweep varies: settings with lists of values and ranges, of which every combination may run, and intervals."""

import itertools
from collections.abc import Iterator
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from mtgrpo.config.compose import parse
from mtgrpo.errors import ConfigError
from mtgrpo.runtime.packages import refuse_without_package

Values = list[str] | IntervalSweep  # as they are typed
Space = dict[str, Values]  # of each setting; one value where it does not vary


def read_space(config: DictConfig, loader: ConfigLoader) -> Space:
    """What the sweeper's `params` and the words of the command say. Raises ConfigError."""
    params = [f"{key}={values}" for key, values in (config.hydra.sweeper.params or {}).items()]
    space: Space = {}
    for word in parse([*params, *config.hydra.overrides.task], loader):
        value, key = word.value(), word.get_key_element()
        try:
            if isinstance(value, IntervalSweep):
                whole = isinstance(OmegaConf.select(config, key), int)  # Hydra reads its ends as fractions
                kind = int if whole else float
                space[key] = IntervalSweep(value.tags, kind(value.start or 0), kind(value.end or 0))
            else:
                swept = word.is_sweep_override()
                space[key] = list(word.sweep_string_iterator()) if swept else [word.get_value_element_as_str()]
        except HydraException as error:
            raise ConfigError(f"--multirun takes lists such as seed=1,2,3 and ranges: {error}") from error
    return space


def combinations(space: Space) -> Iterator[list[str]]:
    """The words of every run of a plain sweep. Raises ConfigError for an interval, which has no end of values."""
    lists: list[list[str]] = []
    for key, values in space.items():
        if isinstance(values, IntervalSweep):
            raise ConfigError(f"{key}=interval(...) is for hydra/sweeper=optuna; else give a list, or range(1,9,2)")
        lists.append([f"{key}={value}" for value in values])
    yield from map(list, itertools.product(*lists))


def corners(space: Space, trials: Any) -> Iterator[list[str]]:
    """Words of runs in which each value that Optuna may choose, of an interval its ends, is found once at least.

    Raises ConfigError where there is nothing to choose, or no Optuna.
    """
    refuse_without_package("optuna", "hydra/sweeper=optuna")
    if not isinstance(trials, int) or trials < 1:
        raise ConfigError(f"hydra.sweeper.trials={trials}: give a number of runs, 1 or more")
    ends: dict[str, list[str]] = {}
    for key, values in space.items():
        ends[key] = [str(values.start), str(values.end)] if isinstance(values, IntervalSweep) else values
        if isinstance(values, IntervalSweep) and not (values.start or 0) < (values.end or 0):
            raise ConfigError(f"{key}=interval({','.join(ends[key])}) is empty: the lower end comes first")
    others = [{key: value} for key, values in ends.items() for value in values[1:]]
    if not others:
        raise ConfigError("hydra/sweeper=optuna: nothing varies; add 'optimizer.lr=interval(1e-4,1e-2)' or seed=1,2")
    first = {key: values[0] for key, values in ends.items()}
    for other in [{}, *others]:
        yield [f"{key}={value}" for key, value in (first | other).items()]


def varies(values: Values) -> bool:
    """Whether there is more than one."""
    return isinstance(values, IntervalSweep) or len(values) > 1


def describe_space(space: Space) -> str:
    """The settings that vary, for people."""
    said: list[str] = []
    for key, values in space.items():
        if isinstance(values, IntervalSweep):
            said.append(f"{key} from {values.start} to {values.end}{', on a log scale' * ('log' in values.tags)}")
        elif varies(values):
            said.append(f"{key} one of {', '.join(values)}")
    return "; ".join(said)
