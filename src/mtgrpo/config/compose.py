"""From the words of the command line to an Experiment: Hydra's grammar and groups, typed by the dataclasses themselves.

Hydra composes. Its loader is given, in place of recipes and files of the user's own, what these come to; every key is
checked, and what Hydra or a dataclass refuses is said in the user's terms.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from mtgrpo.config.experiment import SINKS, Experiment
from mtgrpo.config.options import Setting, chosen_class, entries, groups, options, schema, spell, store_name, unknown
from mtgrpo.config.recipe import (
    RECIPES,
    Recipe,
    absolute,
    base,
    merge,
    nest,
    read_option,
    read_primary,
    read_recipe,
    refuse_absurd,
)
from mtgrpo.config.run_record import checkpoint_folder, read_run
from mtgrpo.errors import ConfigError

OWN_NAME = re.compile(r"`([a-z_0-9]+)")  # how a part's message names a setting of its own


@dataclass(frozen=True)
class Composed:
    """A configuration that its dataclasses have checked."""

    experiment: Experiment
    values: str  # all of it as YAML
    choices: dict[str, Any]  # group -> option; a class of the user's own as /absolute/path.py:Name


@dataclass(frozen=True)
class _Plan:
    """What Hydra is asked for, and what is needed to explain what it refuses."""

    lines: list[str]  # overrides
    choices: dict[str, Any]
    known: dict[str, Setting]
    sources: dict[str, str]  # of what recipes set, by key
    settings: list[Override]


def parse(arguments: Sequence[str], loader: ConfigLoaderImpl | None = None) -> list[Override]:
    """Read `key=value` words. Raises ConfigError for anything else. loader: knows what glob(*) stands for."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            key = "checkpoint" if Path(argument).is_dir() else "task.path" if Path(argument).is_file() else ""
            raise ConfigError(
                f"cannot read {argument!r}: options are key=value, such as {f'{key}={argument}' if key else 'seed=1'}; "
                "quote a value with special characters twice: key=\"'a, b'\""
            ) from error
        if not override.key_or_group:
            raise ConfigError(f"cannot read {argument!r}: nothing stands before the =; options are key=value")
        if override.package is not None:
            raise ConfigError(f"cannot use {argument!r}: an option has one place, leave @ out")
        override.config_loader = loader
        overrides.append(override)
    return overrides


def compose(overrides: Sequence[Override], run: Path | None = None, folders: Sequence[Path] = ()) -> Composed:
    """The experiment that `overrides` describe, on top of a recipe or, where given, of what the run in `run` used.

    folders: the user's own configurations. Raises ConfigError for whatever is wrong with it.
    """
    loader = ExperimentLoader(folders, run=run)
    config = loader.load_configuration("base", [str(o.input_line) for o in overrides], RunMode.RUN)
    return composed_from(config)


def preset(recipe: str, *words: str) -> Experiment:
    """The experiment of a recipe, with further settings as on the command line: `preset("calculator", "seed=1")`.

    Raises ConfigError.
    """
    return compose(parse([f"recipe={recipe}", *map(str, words)])).experiment


def composed_from(config: DictConfig) -> Composed:
    """What Hydra composed, as an Experiment. Raises ConfigError where a part refuses its settings."""
    own = copy.deepcopy(config)
    with flag_override(own, ["struct", "readonly"], [False, False]):
        chosen = own.pop("hydra").runtime.choices if "hydra" in own else {}
    missing = sorted(OmegaConf.missing_keys(own))
    if missing:
        raise ConfigError(f"{missing[0]} is not set and has no default; give {missing[0]}=VALUE")
    OmegaConf.resolve(own)
    choices = {key: chosen[key] for key in (*groups(), "recipe") if key in chosen}
    refuse_absurd(OmegaConf.to_container(own))
    return Composed(_built(own, ""), OmegaConf.to_yaml(own), choices)


class ExperimentLoader(ConfigLoaderImpl):
    """Hydra's loader for experiments: recipes, classes of the user's own, checks and messages."""

    def __init__(
        self, folders: Sequence[Path] = (), primary: str = "base", evaluates: bool = False, run: Path | None = None
    ) -> None:
        """folders: the user's own configurations. primary: the one of them to begin with.

        evaluates: `checkpoint=PATH` is an option, whose run is the recipe. run: the folder of a run that is the recipe.
        """
        version.setbase("1.3")
        setup_globals()
        path = create_config_search_path(str(RECIPES))
        for folder in folders:
            path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
        super().__init__(path)
        ConfigStore.instance().store("experiment", Experiment)
        named = zip(("--config-dir", "--config-path"), folders, strict=False)  # each can be given once
        self.flags = [word for flag, folder in named for word in (flag, str(folder.resolve()))]
        self.flags += [] if primary == "base" else ["--config-name", primary]
        self._folders, self._evaluates, self._run = list(folders), evaluates, run
        self._primary = None if primary == "base" else read_primary(primary, folders)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Called by Hydra for every configuration it needs; that of a sweep is the first of its runs.

        Raises ConfigError for whatever is wrong with it.
        """
        given = parse(overrides, self)
        plan = self._plan(_firsts(given))
        for override in given:
            if override.is_sweep_override() and override.is_hydra_override():
                raise ConfigError(f"{override.input_line} gives several values: what belongs to Hydra takes one")
            if override.is_sweep_override() and run_mode is RunMode.RUN:
                raise ConfigError(
                    f"{override.input_line} gives several values: add --multirun for one run each; "
                    "a list is written [1,2]"
                )
        try:
            config = super().load_configuration(config_name, plan.lines, run_mode, from_shell)
            composed_from(config)
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, plan)) from error
        except ValueError as error:  # a check in the __post_init__ of a class that knows nothing of ConfigError
            raise ConfigError(str(error)) from error
        own = [override for override in given if not override.is_hydra_override()]
        hydra = config.hydra
        hydra.overrides.task = [override.input_line for override in own]
        hydra.runtime.choices.update(plan.choices)
        names = hydra.job.config.override_dirname
        hydra.job.override_dirname = get_overrides_dirname(own, names.exclude_keys, names.item_sep, names.kv_sep)
        return config

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> DefaultsList:
        """Called by Hydra for --info."""
        return super().compute_defaults_list(config_name, self._plan(_firsts(parse(overrides, self))).lines, run_mode)

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Called by Hydra for shell completion and glob(*)."""
        for group in groups():
            options(group)
        return super().get_group_options(group_name, results_filter)

    def _plan(self, given: Sequence[Override]) -> _Plan:
        start = base()
        taken = {"recipe"} | ({"checkpoint"} if self._evaluates else set())
        taken |= {"trust_code"} if self._evaluates or self._run else set()
        own = [o for o in given if not o.is_hydra_override() and o.key_or_group not in taken]
        recipe, layers = self._recipes(start, given)
        words = Recipe("the command line", {o.key_or_group: _option(o) for o in own if o.key_or_group in groups()}, {})
        chosen, named = self._layered([start, *layers, words])
        inherited = {group: read_option(group, named[group], self._folders) for group in groups()}
        choices = {group: option.choices[group] if option else named[group] for group, option in inherited.items()}
        known = schema(choices)
        values, sources = merge(chosen, named, known)
        values.setdefault("log", list(SINKS))
        settings = [o for o in own if o.key_or_group not in choices]
        inside = tuple(f"{group}.{name}." for group in choices for name in entries(group, choices[group]))
        inside += tuple(f"{name}." for name, setting in known.items() if setting.holds_any)
        settings.sort(key=lambda o: o.key_or_group.startswith(inside))  # a list first, then settings of what is in it
        lines = [line for o in settings if (line := _line(o, known, values, inside))]
        _gather(values, choices)
        ConfigStore.instance().store("chosen", OmegaConf.create(nest(values)), "recipe", "_global_")
        parts = [f"{group}={store_name(group, chosen_class(group, option))}" for group, option in choices.items()]
        of_hydra = [f"{key}={layer.choices[key]}" for layer in layers for key in layer.choices if "/" in key]
        of_hydra += [str(o.input_line) for o in given if o.is_hydra_override()]
        lines = [*parts, "recipe=chosen", *lines, *of_hydra]
        return _Plan(lines, choices | {"recipe": recipe}, known, sources, settings)

    def _layered(self, layers: Sequence[Recipe]) -> tuple[list[tuple[Recipe, dict[str, Any]]], dict[str, Any]]:
        """The layers, each with the options chosen up to it, and all choices.

        Where one chooses an option of the user's own folders, what is set there comes just before that layer.
        """
        chosen: list[tuple[Recipe, dict[str, Any]]] = []
        running: dict[str, Any] = {}
        for layer in layers:
            new = {key: option for key, option in layer.choices.items() if running.get(key) != option}
            running = running | layer.choices
            found = [read_option(key, option, self._folders) for key, option in new.items() if key in groups()]
            chosen += [(each, running) for each in (*found, layer) if each]
        return chosen, running

    def _recipes(self, start: Recipe, given: Sequence[Override]) -> tuple[Any, list[Recipe]]:
        """What was chosen as the recipe, and all that it comes to."""
        self.notes: list[str] = []  # for the user, of the last configuration
        layers = [self._primary] if self._primary else []
        asked = [o for o in given if o.key_or_group == "recipe"]
        checkpoint = [str(o.value()) for o in given if o.key_or_group == "checkpoint" and self._evaluates]
        run = checkpoint_folder(checkpoint[-1]).parent.parent if checkpoint else self._run
        if run is not None:
            if asked:
                raise ConfigError("checkpoint= brings the configuration of its run: leave recipe= out")
            typed = {(key := o.key_or_group): absolute(o.value()) if key in groups() else o.value() for o in given}
            typed |= {"model.name": None} if checkpoint else {}  # whose place the checkpoint takes
            used = read_run(run, typed.get("trust_code") is True, typed)
            return used.choices.get("recipe"), [used, *layers]
        primary = self._primary or start
        typed = {o.key_or_group: o.value() for o in given}
        recipe = start.usual(primary, typed)
        usual = (start.choices["recipe"], primary.choices.get("recipe"))
        if not asked and "model.name" in typed and recipe not in usual:
            why = "no recipe= is given, and the usual one is for the model from scratch"
            self.notes = [f"recipe={recipe} is taken for model.name={typed['model.name']}: {why}"]
        for override in asked:
            added = absolute(override.value()) if not override.is_delete() else []
            recipe = [*_listed(recipe), *_listed(added)] if override.is_add() else added
        found = [layer for option in _listed(recipe) for layer in read_recipe(str(option), self._folders)]
        return recipe, [*found, *layers]


def _firsts(given: Sequence[Override]) -> list[Override]:
    return [_first(override) if override.is_sweep_override() else override for override in given]


def _first(override: Override) -> Override:
    """The first of the values that a sweep gives. Raises ConfigError where there is none."""
    value = override.value()
    try:
        first = value.start if isinstance(value, IntervalSweep) else next(override.sweep_string_iterator(), None)
    except HydraException as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
    if first is None:
        raise ConfigError(f"{override.input_line} stands for no value at all")
    return parse([f"{override.get_key_element()}={first}"])[0]


def _line(override: Override, known: Mapping[str, Setting], values: dict[str, Any], inside: tuple[str, ...]) -> str:
    """An override of a setting as Hydra needs it; "" where `values`, what recipes set, has taken it up.

    inside: how the keys of options begin that stand in a list.
    """
    key, line = override.key_or_group, str(override.input_line)
    if override.is_delete():
        if key not in values:
            raise ConfigError(f"{line}: no recipe sets {key}, there is nothing to take away")
        del values[key]
        return ""
    holder = next((name for name in known if key.startswith(f"{name}.") and known[name].holds_any), "")
    if holder and isinstance(values.get(holder), list | dict):
        values[holder] = _with_entry(values[holder], key.removeprefix(f"{holder}.").split("."), override.value())
        return ""
    if holder:  # an entry of a mapping
        return f"++{line.lstrip('+')}"
    if key not in known:
        section = [name for name in known if name.startswith(f"{key}.")]
        if not section:
            raise ConfigError(unknown(key, known))
        if not isinstance(override.value(), dict):
            raise ConfigError(f"{line}: {key} has settings of its own: {', '.join(section)}")
    elif known[key].holds_any or key.startswith(inside):
        values[key] = override.value()  # Hydra merges containers, but the user means to replace the whole of one
        return ""
    return line.lstrip("+")


def _with_entry(held: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """A list of names, or a mapping from them to settings, in which one has one more setting."""
    found: dict[str, Any] = dict(held) if isinstance(held, dict) else {name: {} for name in held}
    if len(path) < 2:
        return {**found, path[0]: value}
    name = next((option for option in found if Path(option).name.rpartition(":")[2] == path[0]), path[0])
    return {**found, name: nest({".".join(path[1:]): value}, found.get(name) or {})}


def _gather(values: dict[str, Any], choices: Mapping[str, Any]) -> None:
    """The settings of options that stand in a list become one mapping, `of`, of the option that holds them."""
    for group, choice in choices.items():
        of = {option: {} for option in choice} if isinstance(choice, list) else {}
        for option, name in zip(of, entries(group, choice), strict=True):
            prefix = f"{group}.{name}."
            given = {key.removeprefix(prefix): values.pop(key) for key in list(values) if key.startswith(prefix)}
            of[option] = values.get(f"{group}.of", {}).get(option, {}) | given
        if of:
            values[f"{group}.of"] = of


def _built(node: DictConfig, path: str) -> Any:
    """The object of a node. Where a part refuses its settings, they get their full names."""
    for name in node:
        part = node._get_node(name)  # pyright: ignore[reportPrivateUsage]  (an interpolation or a text has no part)
        if isinstance(part, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(part)):
            _built(part, f"{path}{name}.")
    try:
        return OmegaConf.to_object(node)
    except ConfigError as error:
        fields = {str(name) for name in node}
        named = OWN_NAME.sub(lambda m: f"`{path}{m[1]}" if m[1] in fields else m[0], str(error))
        raise ConfigError(re.sub(r"`([\w.]+(?:=[^`]*)?)`", r"\1", named)) from error


def _explain(error: BaseException, plan: _Plan) -> str:
    """What Hydra or OmegaConf found, in the user's terms. Both wrap errors; the one that has a key is of use."""
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    found = next((link for link in chain if getattr(link, "full_key", None)), error)
    key = re.sub(r"\[.*", "", str(getattr(found, "full_key", "")))
    if isinstance(found, ConfigAttributeError | ConfigKeyError) and key not in plan.known and "hydra" not in key:
        return unknown(key, plan.known)
    said = str(found).strip().partition("\n")[0]
    if isinstance(found, ValidationError) and key in plan.known:
        said = f"expected {spell(plan.known[key].type)}"
    given = [str(o.input_line) for o in plan.settings if key == o.key_or_group or key.startswith(f"{o.key_or_group}.")]
    of_recipe = [f"{plan.sources[key]}: {key}"] if key in plan.sources else [key] if key else []
    return ": ".join([*(given[-1:] or of_recipe), said])


def _option(override: Override) -> Any:
    value = override.value()
    if override.is_delete() or isinstance(value, dict) or not value:
        group = override.key_or_group
        raise ConfigError(f"{override.input_line}: choose a {group} by its name, and settings as {group}.NAME=VALUE")
    return absolute(value)


def _listed(option: Any) -> list[Any]:
    return cast("list[Any]", option) if isinstance(option, list) else [option]
