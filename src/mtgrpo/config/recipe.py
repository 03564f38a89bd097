"""Recipes: options of groups and values of settings, by name or in a file."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml.composer import ComposerError

from mtgrpo.config.options import Setting, groups, unknown
from mtgrpo.errors import ConfigError
from mtgrpo.model.settings import FROM_SCRATCH
from mtgrpo.parts.extension import meant

RECIPES = Path(__file__).parent / "recipes"
ABSURD = 1e15  # no setting is as large
MAX_BYTES = 2**18  # of a file
MAX_DEPTH = 32
MAX_DIGITS = 100
SELF = "_self_"  # in a list of defaults: the place of the file's own values, last where it is not named


@dataclass(frozen=True)
class Recipe:
    """Options of groups, and values of settings; the values of a group belong to the option chosen for it."""

    source: str  # for messages
    choices: dict[str, Any]  # group -> option, or a list of options
    values: dict[str, Any]  # nested

    def usual(self, primary: Recipe, given: Mapping[str, Any]) -> Any:
        """The recipe on top of `primary` where `given`, the command line, asks for none: by the model that is named."""
        own = primary.values.get("model") or {}
        name = given.get("model.name", own.get("name", FROM_SCRATCH[0]))
        rank = given.get("model.lora.rank", (own.get("lora") or {}).get("rank"))
        pretrained = "pretrained_lora" if rank else "pretrained"
        usual = self.choices["recipe"] if name in FROM_SCRATCH else pretrained
        return usual if primary is self else primary.choices.get("recipe", usual)


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
    """The mapping in a YAML file of plain data. Raises ConfigError."""
    return checked(parse_yaml(read_bounded(path), path), path)


def read_bounded(path: Path) -> bytes:
    """What a file holds. Raises ConfigError where there is none, or more in it than in any configuration."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes: it is no configuration")
    return content


def parse_yaml(content: bytes, path: Path) -> dict[str, Any]:
    """The mapping in YAML, which is plain data of usable numbers; path: for messages. Raises ConfigError."""
    try:
        found = yaml.load(content, _PlainSafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split()):.500}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping of options to values")
    refuse_absurd(found)
    return cast("dict[str, Any]", found)


def checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The values, where OmegaConf can take them up. Raises ConfigError."""
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(values)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split()):.500}") from error


class _PlainSafeLoader(get_yaml_loader()):  # pyright: ignore[reportUntypedBaseClass]
    """Reads plain data: no tags, no aliases, nothing nested deeper than any configuration."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        """Called for every value."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            raise ComposerError(None, None, "aliases and tags are refused: write the value", event.start_mark)
        if self.depth == MAX_DEPTH:
            raise ComposerError(None, None, f"nested deeper than {MAX_DEPTH}", event.start_mark)
        self.depth += 1
        node: yaml.Node = super().compose_node(parent, index)
        self.depth -= 1
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise ComposerError(None, None, f"a number of {len(node.value)} digits", event.start_mark)
        return node


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
    for group in groups():
        if isinstance(values.get(group), str | list):  # chosen as on the command line
            choices[group] = absolute(values.pop(group))
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


def merge(
    layers: Sequence[tuple[Recipe, Mapping[str, Any]]], choices: Mapping[str, Any], known: Mapping[str, Setting]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of all recipes by key, and where each is from; each recipe comes with the options chosen up to it.

    A recipe's values of a group belong to the option chosen there: another option keeps its own defaults.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for recipe, chosen in layers:
        fitting = {name: value for name, value in recipe.values.items() if chosen.get(name) == choices.get(name)}
        for key, value in _flat(fitting, known):
            if key not in known and not key.startswith("hydra."):
                raise ConfigError(f"{recipe.source}: {unknown(key, known)}")
            values[key], sources[key] = value, recipe.source
    return values, sources


def _flat(values: Mapping[str, Any], known: Mapping[str, Setting], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the keys of the settings that they are for."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known and key != "hydra.sweeper.params":  # it has dotted names
            yield from _flat(cast("dict[str, Any]", value), known, f"{key}.")
        else:
            yield key, value


def nest(values: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Values by key -> nested, on top of those of `base`."""
    found = copy.deepcopy(dict(base or {}))
    for key, value in values.items():
        *path, name = key.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return found
