"""Recipes: options of groups and values of settings, by name or in a file; and what several of them come to."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.config.experiment import groups
from mtgrpo.config.options import Setting, entries, schema, unknown
from mtgrpo.errors import ConfigError, meant
from mtgrpo.runtime.plain_yaml import parse_yaml, read_bounded

RECIPES = Path(__file__).parent / "recipes"
ABSURD = 1e15  # no setting is as large
SELF = "_self_"  # in a list of defaults: the place of the file's own values, last where it is not named


@dataclass(frozen=True)
class Recipe:
    """Options of groups, and values of settings."""

    source: str  # for messages
    choices: dict[str, Any]  # group -> option, or a list of options
    values: dict[str, Any]  # nested


def recipes(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """The recipes by name: those of the package, and those in recipe/ of the user's configuration `folders`."""
    places = (RECIPES, *folders)
    return {path.stem: path for place in places for path in sorted((place / "recipe").glob("*.yaml"))}


def likely(word: str) -> str:
    """The option that a word without its key may have been meant for."""
    path = Path(word)
    if "=" in word:
        return "seed=1"
    if path.suffix in (".yaml", ".yml") or word in recipes():
        return f"recipe={word}"
    if ".py:" in word:
        return f"reward={word}, or 'environment.tools=[{word}]'"
    return f"checkpoint={word}" if path.is_dir() else f"task.path={word}" if path.is_file() else "seed=1"


def quoted(word: str) -> str:
    """An option as Hydra reads it: a value with letters beyond ASCII, as in `hydra.run.dir=läufe/b`, in quotes."""
    key, _, value = word.partition("=")
    return word if value.isascii() or set(value) & set("'\"[](){},\\") else f"{key}='{value}'"


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
        others = f"known: {', '.join(known)}; or path/to/file.yaml"
        where = f", a default of {within[-1]}" if within else ""
        raise ConfigError(f"there is no recipe={option}{where}; {meant(option, known).rstrip() or others}")
    if path in within:
        raise ConfigError(f"recipe={option} inherits itself: see the defaults in {within[-1]}")
    own, inherited = _read(path, f"recipe={option}" if path.is_relative_to(RECIPES) else str(path))
    layers = [read_recipe(name, folders, (*within, path)) if name != SELF else [own] for name in inherited]
    return [layer for several in layers for layer in several]


def read_primary(name: str, folders: Sequence[Path]) -> Recipe:
    """The configuration `name`.yaml in one of the user's own `folders`; its choices may name a recipe too.

    Where there is none, a recipe of that name is meant. Raises ConfigError.
    """
    path = _own_file(name.removesuffix(".yaml"), folders)
    if path is None and name in recipes(folders):
        return Recipe(f"--config-name {name}", {"recipe": name}, {})
    if path is None:
        looked = f"not in {', '.join(map(str, folders))}" if folders else "give --config-dir FOLDER"
        raise ConfigError(f"--config-name {name}: there is no {name}.yaml; {meant(name, recipes(folders))}{looked}")
    own, inherited = _read(path, f"--config-name {name}", primary=True)
    if wrong := set(inherited) - {SELF, "base"}:
        raise ConfigError(f"{path} inherits {wrong.pop()!r}; it can name recipes, as `override /recipe: [a, b]`")
    return own


def read_option(group: str, option: Any, folders: Sequence[Path]) -> Recipe | None:
    """The option `group`/`option`.yaml in one of the user's own `folders`, None where there is none.

    It inherits another option and sets some of its settings. Raises ConfigError.
    """
    path = _own_file(f"{group}/{option}", folders)
    if path is None:
        return None
    own, inherited = _read(path, f"{group}={option}")
    named = [name for name in inherited if name != SELF]
    if len(named) != 1 or own.choices:
        raise ConfigError(f"{path} must inherit one {group}, as in defaults: [NAME]")
    return Recipe(own.source, {group: named[0]}, own.values)


def _own_file(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / f"{name}.yaml").is_file()), None)


def read_mapping(content: bytes, path: Path) -> dict[str, Any]:
    """The mapping in YAML, which is plain data of usable numbers; path: for messages. Raises ConfigError."""
    values = parse_yaml(content, path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of options to values")
    refuse_absurd(values)
    return cast("dict[str, Any]", values)


def as_settings(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The values, where OmegaConf can take them up. Raises ConfigError."""
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(values)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split()):.500}") from error


def absolute(option: Any) -> Any:
    """The option; a path in it becomes absolute, since the run's record keeps it and is read from anywhere."""
    if isinstance(option, list):
        return [absolute(each) for each in cast("list[Any]", option)]
    path, of_class, name = str(option).partition(".py:")
    if of_class:
        return f"{Path(path).expanduser().resolve()}.py:{name}"
    return str(Path(option).expanduser().resolve()) if str(option).endswith(".yaml") else str(option)


def _read(path: Path, source: str, primary: bool = False) -> tuple[Recipe, list[str]]:
    """A file, and the names that it inherits, itself among them as SELF."""
    values = as_settings(read_mapping(read_bounded(path), path), path)
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


@dataclass(frozen=True)
class Settled:
    """What recipes come to, and what is set on top of them."""

    choices: dict[str, Any]  # options by group
    known: dict[str, Setting]  # the settings that these have, by key, as are
    values: dict[str, Any]
    sources: dict[str, str]  # recipe or word that sets it
    left_out: list[str]  # of files of the user's own what has no effect, for him

    def put(self, key: str, value: Any, source: str) -> None:
        """Set a value, or several below `key`; of a list or mapping one entry. Raises ConfigError."""
        holder = next((name for name, own in self.known.items() if key.startswith(f"{name}.") and own.holds_any), "")
        if isinstance(held := self.values.get(holder), list | dict):
            self.values[holder] = _with_entry(held, key.removeprefix(f"{holder}.").split("."), value)
            self.sources[key] = source
            return
        try:
            new = {key: value} if holder else dict(_flat({key: value}, self.known))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        self.values.update(new)
        self.sources.update(dict.fromkeys(new, source))

    def take_away(self, key: str, source: str) -> str:
        """Leave what recipes set there at its default, and say so. Raises ConfigError."""
        if key not in self.values:
            raise ConfigError(f"{source}: no recipe sets {key}, there is nothing to take away")
        return f"{source}: {key} has its default in place of {self.values.pop(key)}, of {self.sources.pop(key)}"

    def nested(self) -> dict[str, Any]:
        """The values; settings of options that stand in a list are one mapping, `of`, of the option that holds them."""
        values = dict(self.values)
        for group in groups():
            for name, option in zip(entries(group, self.choices[group]), self.choices[group], strict=False):
                prefix = f"{group}.{name}."
                own = {key.removeprefix(prefix): values.pop(key) for key in self.values if key.startswith(prefix)}
                of = values.setdefault(f"{group}.of", {})
                values[f"{group}.of"] = {**of, option: of.get(option, {}) | own}
        return nest(values)


def settle(layers: Sequence[Recipe], folders: Sequence[Path]) -> Settled:
    """What layers come to, where a later one wins.

    What is set of a group belongs to the option chosen for it up to there: another option keeps its own defaults.
    """
    named: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    parts: list[tuple[str, str, Any]] = []  # source, section, what it sets there
    own_files = {layer.source for layer in layers if not layer.source.startswith(("recipe=", "run "))}
    left_out: list[str] = []
    for layer in layers:
        for group, option in layer.choices.items():
            if group in groups() and named.get(group) != option:
                named[group], own = option, read_option(group, option, folders)
                others = [part for part in parts if str(part[1]).partition(".")[0] == group]
                parts = [part for part in parts if part not in others]
                left_out += [_left_out(*part, f"{group}: {option}") for part in others if part[0] in own_files]
                parts += [(own.source, group, own.values)] if own else []
                choices |= own.choices if own else {group: option}
        parts += [(layer.source, section, value) for section, value in layer.values.items()]
    settled = Settled(choices, schema(choices), {}, {}, left_out)
    for source, section, value in parts:
        settled.put(str(section), value, source)
    return settled


def _left_out(source: str, section: Any, value: Any, choice: str) -> str:
    what = ", ".join(map(str, cast("dict[Any, Any]", value))) if isinstance(value, dict) else ""
    cure = f"choose it there too, as `defaults: [override /{choice}]`"
    return f"{source}: {section}{f' ({what})' if what else ''} has no effect, for {choice} is chosen after it; {cure}"


def _flat(values: Mapping[str, Any], known: Mapping[str, Setting], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the keys of their settings. Raises ConfigError where there is no such setting."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known and key != "hydra.sweeper.params":  # it has dotted names
            yield from _flat(cast("dict[str, Any]", value), known, f"{key}.")
        elif key in known or key.startswith("hydra."):
            yield key, value
        else:
            section = [setting for setting in known if setting.startswith(f"{key}.")]
            has = f"{key} has settings of its own: {', '.join(section)}; it is given {value!r:.200}"
            if key == "checkpoint":
                has += "; to go on from one give resume=PATH, to begin with its weights model.name=PATH"
            raise ConfigError(has if section and key not in groups() else unknown(key, known))


def _with_entry(held: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """A list of names, or a mapping from them to settings, in which one has one more setting."""
    mapping: dict[str, Any] = dict(held) if isinstance(held, dict) else {name: {} for name in held}
    if len(path) < 2:
        return {**mapping, path[0]: value}
    name = next((option for option in mapping if Path(option).name.rpartition(":")[2] == path[0]), path[0])
    return {**mapping, name: nest({".".join(path[1:]): value}, mapping.get(name) or {})}


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
