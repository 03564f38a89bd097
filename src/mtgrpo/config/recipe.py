"""Recipes: options of groups and values of settings, by name or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.config.options import groups
from mtgrpo.errors import ConfigError
from mtgrpo.extension import meant

RECIPES = Path(__file__).parent / "recipes"
ABSURD = 1e15  # no setting is as large
SELF = "_self_"  # in a list of defaults: the place of the file's own values, last where it is not named


@dataclass(frozen=True)
class Recipe:
    """Options of groups, and values of settings; the values of a group belong to the option chosen for it."""

    source: str  # for messages
    choices: dict[str, Any]  # group -> option, or a list of options
    values: dict[str, Any]  # nested


def recipes(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """The recipes by name: those of the package, and those in recipe/ of the user's configuration `folders`."""
    places = (RECIPES, *folders)
    return {path.stem: path for place in places for path in sorted((place / "recipe").glob("*.yaml"))}


def base() -> Recipe:
    """What every run starts from; its choices name a recipe too."""
    return _read(RECIPES / "base.yaml", "base", primary=True)[0]


def read_recipe(option: str, folders: Sequence[Path] = (), within: tuple[Path, ...] = ()) -> list[Recipe]:
    """A recipe by its name or the path of a .yaml file, after those that it inherits. Raises ConfigError.

    within: the files that inherit it, the nearest last; a path is relative to that one.
    """
    known = recipes(folders)
    path = known.get(option, (within[-1].parent if within else Path()) / Path(option).expanduser()).resolve()
    if path.suffix != ".yaml":
        raise ConfigError(
            f"there is no recipe={option}; {meant(option, known)}known: {', '.join(known)}; or path/to/file.yaml"
        )
    if path in within:
        raise ConfigError(f"recipe={option} inherits itself: see the defaults in {within[-1]}")
    own, inherited = _read(path, f"recipe={option}")
    layers = [read_recipe(name, folders, (*within, path)) if name != SELF else [own] for name in inherited]
    return [layer for several in layers for layer in several]


def read_primary(name: str, folders: Sequence[Path]) -> Recipe:
    """The configuration `name`.yaml in one of the user's own `folders`; its choices may name a recipe too.

    Raises ConfigError.
    """
    for folder in folders:
        path = folder / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            own, inherited = _read(path, f"--config-name {name}", primary=True)
            if wrong := set(inherited) - {SELF, "base"}:
                raise ConfigError(
                    f"{path} inherits {wrong.pop()!r}; it can name recipes, as `override /recipe: [a, b]`"
                )
            return own
    looked = f"not in {', '.join(map(str, folders))}" if folders else "give --config-dir FOLDER"
    raise ConfigError(f"--config-name {name}: there is no {name}.yaml; {looked}")


def read_option(group: str, option: Any, folders: Sequence[Path]) -> Recipe | None:
    """The option `group`/`option`.yaml in one of the user's own `folders`, None where there is none.

    It inherits another option and sets some of its settings. Raises ConfigError.
    """
    for folder in folders:
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            own, inherited = _read(path, f"{group}={option}")
            named = [name for name in inherited if name != SELF]
            if len(named) != 1 or own.choices:
                raise ConfigError(f"{path} must inherit one {group}, as in defaults: [NAME]")
            return Recipe(own.source, {group: named[0]}, {group: own.values})
    return None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split()):.500}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of options to values")
    return cast("dict[str, Any]", content)


def absolute(option: Any) -> Any:
    """The option; a path in it becomes absolute, since the run's record keeps it and is read from anywhere."""
    if isinstance(option, list):
        return [absolute(each) for each in cast("list[Any]", option)]
    path, of_class, name = str(option).partition(".py:")
    if of_class:
        return f"{Path(path).expanduser().resolve()}.py:{name}"
    return str(Path(option).expanduser().resolve()) if str(option).endswith(".yaml") else option


def _read(path: Path, source: str, primary: bool = False) -> tuple[Recipe, list[str]]:
    """A file, and the names that it inherits, itself among them as SELF."""
    values = read_yaml(path)
    inherited: list[str] = []
    choices: dict[str, Any] = {}
    for entry in cast("list[Any]", values.pop("defaults", [])):
        if not isinstance(entry, dict):
            inherited.append(str(entry))
            continue
        for key, option in cast("dict[str, Any]", entry).items():
            group = key.removeprefix("override ").removeprefix("/")
            if not (group in groups() or group.startswith("hydra/") or (primary and group == "recipe")):
                raise ConfigError(f"{source} chooses {group!r}; the groups are {', '.join(groups())}")
            choices[group] = absolute(option)
    return Recipe(source, choices, values), inherited if SELF in inherited else [*inherited, SELF]


def refuse_absurd(value: Any, key: str = "") -> None:
    """Raise ConfigError for NaN, infinity and numbers that nothing has, wherever they stand in nested values."""
    if isinstance(value, dict | list):
        held = cast("dict[Any, Any] | list[Any]", value)
        for name, inner in held.items() if isinstance(held, dict) else enumerate(held):
            refuse_absurd(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int | float) and not -ABSURD < value < ABSURD:
        raise ConfigError(f"{key}={value!s:.40} is no usable number; give a finite one below {ABSURD:g}")
