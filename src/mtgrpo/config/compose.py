"""From the words of the command line to an Experiment: Hydra's grammar and groups, typed by the dataclasses themselves.

A recipe is the options it chooses and values for them and for the rest; what a finished run used is a recipe too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from mtgrpo.config.experiment import Experiment
from mtgrpo.config.options import Setting, chosen_class, groups, schema, spell, store_name, unknown
from mtgrpo.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """Options of groups, and values of settings; those of a group belong to the option chosen for it."""

    source: str  # for messages
    choices: dict[str, str]
    values: dict[str, Any]


@dataclass(frozen=True)
class Composed:
    """A configuration that its dataclasses have checked."""

    experiment: Experiment
    values: str  # all of it as YAML
    choices: dict[str, str]  # group -> option; a class of the user's own as /absolute/path.py:Name


def parse(arguments: Sequence[str]) -> list[Override]:
    """Read `key=value` words. Raises ConfigError for anything else."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            raise ConfigError(
                f"cannot read {argument!r}: options are key=value, such as seed=1; "
                "quote a value with special characters twice: key=\"'a, b'\""
            ) from error
        if override.type is not OverrideType.CHANGE or override.package is not None:
            raise ConfigError(f"cannot use {argument!r}: options are plain key=value, without +, ~ and @")
        overrides.append(override)
    return overrides


def compose(overrides: Sequence[Override], run: Path | None = None) -> Composed:
    """The experiment that `overrides` describe, on top of a recipe or, where given, of what the run in `run` used.

    Raises ConfigError for whatever is wrong with it.
    """
    base = _choices(_read_yaml(RECIPES / "base.yaml"))
    own = {o.key_or_group: _option(o) for o in overrides if o.key_or_group in base}
    recipe = read_run(run) if run else read_recipe(own.get("recipe", base["recipe"]))
    expected = base | recipe.choices
    choices = expected | own
    classes = {group: chosen_class(group, choices[group]) for group in groups()}
    known = schema(classes)
    # A recipe's settings of a group belong to the option it chose: another option keeps its own defaults.
    values = {name: value for name, value in recipe.values.items() if choices.get(name) == expected.get(name)}
    for key in _keys(values, known):
        if key not in known:
            raise ConfigError(f"{recipe.source}: {unknown(key, known)}")
    settings = [o for o in overrides if o.key_or_group not in base]
    for override in settings:
        _check_key(override, known)
    # Hydra merges containers, but of a setting that may be a list or a mapping the user means to replace the whole.
    replaced = [o for o in settings if o.key_or_group in known and known[o.key_or_group].type is Any]
    for override in replaced:
        values = _with(values, override.key_or_group.split("."), override.value())
    merged = [override for override in settings if override not in replaced]
    try:
        config = _merge(classes, values, merged)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set and has no default; give {missing[0]}=VALUE")
        OmegaConf.resolve(config)
        return Composed(cast(Experiment, OmegaConf.to_object(config)), OmegaConf.to_yaml(config), choices)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, settings, known, recipe)) from error
    except ValueError as error:  # a check in the __post_init__ of a class that knows nothing of ConfigError
        raise ConfigError(str(error)) from error


def preset(recipe: str, *words: str) -> Experiment:
    """The experiment of a recipe, with further settings as on the command line: `preset("calculator", "seed=1")`.

    Raises ConfigError.
    """
    return compose(parse([f"recipe={recipe}", *words])).experiment


def recipes() -> dict[str, Path]:
    """The recipes that come with the package."""
    return {path.stem: path for path in sorted((RECIPES / "recipe").glob("*.yaml"))}


def read_recipe(option: str) -> Recipe:
    """A recipe by its name, or a .yaml file of the user's own in the same layout. Raises ConfigError."""
    path = recipes().get(option, Path(option))
    if path.suffix != ".yaml":
        raise ConfigError(f"there is no recipe={option}; known: {', '.join(recipes())}; or path/to/file.yaml")
    values = _read_yaml(path)
    choices = {key.removeprefix("override /"): _absolute(choice) for key, choice in _choices(values).items()}
    for group in choices:
        if group not in groups():
            raise ConfigError(f"recipe={option} chooses {group!r}; the groups are {', '.join(groups())}")
    values.pop("defaults", None)
    return Recipe(f"recipe={option}", choices, values)


def read_run(folder: Path) -> Recipe:
    """What a run used, from the record it keeps in its folder. Raises ConfigError."""
    hydra_record = _read_yaml(folder / ".hydra" / "hydra.yaml")
    values = _read_yaml(folder / ".hydra" / "config.yaml")
    return Recipe(f"run {folder}", dict(hydra_record["hydra"]["runtime"]["choices"]), values)


def write_record(composed: Composed, overrides: Sequence[Override], folder: Path) -> None:
    """Write into a run's folder what `read_run` reads, and the overrides, in Hydra's layout."""
    target = folder / ".hydra"
    target.mkdir()
    target.joinpath("config.yaml").write_text(composed.values)
    target.joinpath("hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": composed.choices}}}))
    target.joinpath("overrides.yaml").write_text(yaml.safe_dump([o.input_line for o in overrides], width=1000))


def _merge(classes: Mapping[str, type], values: Mapping[str, Any], settings: Sequence[Override]) -> DictConfig:
    """Let Hydra put together the base, the chosen options, the recipe's values and the user's."""
    store = ConfigStore.instance()
    store.store("experiment", Experiment)
    store.store("chosen", OmegaConf.create(dict(values)), "recipe", "_global_")
    lines = [f"{group}={store_name(group, cls)}" for group, cls in classes.items()]
    with hydra.initialize_config_dir(str(RECIPES), version_base="1.3"):
        return hydra.compose("base", [*lines, "recipe=chosen", *(str(o.input_line) for o in settings)])


def _check_key(override: Override, known: Mapping[str, Setting]) -> None:
    key = override.key_or_group
    if key in known:
        return
    section = [name for name in known if name.startswith(f"{key}.")]
    if not section:
        raise ConfigError(unknown(key, known))
    if not isinstance(override.value(), dict):
        raise ConfigError(f"{override.input_line}: {key} has settings of its own: {', '.join(section)}")


def _explain(error: BaseException, settings: Sequence[Override], known: Mapping[str, Setting], recipe: Recipe) -> str:
    """What Hydra or OmegaConf found, in the user's terms. Both wrap errors; the one that has a key is of use."""
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    found = next((link for link in chain if getattr(link, "full_key", None)), error)
    key = re.sub(r"\[.*", "", str(getattr(found, "full_key", "")))
    if isinstance(found, ConfigAttributeError | ConfigKeyError) and key not in known:
        return unknown(key, known)
    said = str(found).strip().partition("\n")[0]
    if isinstance(found, ValidationError) and key in known:
        said = f"expected {spell(known[key].type)}"
    given = [str(o.input_line) for o in settings if key == o.key_or_group or key.startswith(f"{o.key_or_group}.")]
    return f"{given[-1] if given else f'{recipe.source}: {key}'}: {said}" if key else said


def _option(override: Override) -> str:
    value = override.value()
    if isinstance(value, dict | list):
        group = override.key_or_group
        raise ConfigError(f"{override.input_line}: choose a {group} by its name, and settings as {group}.NAME=VALUE")
    return _absolute(str(value))


def _absolute(option: str) -> str:
    """The option; a path in it becomes absolute, since the run's record keeps it and is read from anywhere."""
    path, of_class, name = option.partition(".py:")
    if of_class:
        return f"{Path(path).expanduser().resolve()}.py:{name}"
    return str(Path(option).expanduser().resolve()) if option.endswith(".yaml") else option


def _choices(content: Mapping[str, Any]) -> dict[str, str]:
    """The options that a defaults list chooses."""
    entries = cast("list[Any]", content.get("defaults", []))
    chosen = [cast("dict[str, str]", entry) for entry in entries if isinstance(entry, dict)]
    return {group: option for entry in chosen for group, option in entry.items()}


def _keys(values: Mapping[str, Any], known: Mapping[str, Setting], prefix: str = "") -> Iterator[str]:
    """The keys of the settings that nested values are for."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _keys(cast("dict[str, Any]", value), known, f"{key}.")
        else:
            yield key


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """`values` with `value` at the nested key `path`."""
    name, *rest = path
    return {**values, name: _with(values.get(name, {}), rest, value) if rest else value}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of options to values")
    return cast("dict[str, Any]", content)
