"""From the words of the command line to an Experiment: Hydra's grammar and groups, typed by the dataclasses themselves.

Hydra composes. Its loader is given, in place of recipes and files of the user's own, what these come to; every key is
checked, and what Hydra or a dataclass refuses is said in the user's terms.
"""

import copy
import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from mtgrpo.config.experiment import SINKS, Experiment, groups
from mtgrpo.config.options import chosen_class, options, spell, unknown
from mtgrpo.config.recipe import (
    RECIPES,
    Recipe,
    Settled,
    absolute,
    base,
    likely,
    quoted,
    read_primary,
    read_recipe,
    refuse_absurd,
    settle,
)
from mtgrpo.config.run_record import checkpoint_folder, read_run, started_in
from mtgrpo.errors import ConfigError
from mtgrpo.model.settings import FROM_SCRATCH, SHIPPED
from mtgrpo.weights.saved import STATE

OWN_NAME = re.compile(r"`([a-z_0-9]+)")  # how a part's message names a setting of its own


@dataclass(frozen=True)
class Configured:
    """A configuration that its dataclasses have checked."""

    experiment: Experiment
    values: str  # all of it as YAML
    choices: dict[str, Any]  # group -> option; a class of the user's own as /absolute/path.py:Name
    noted: bool = False  # there is something that the user should know


def parse(arguments: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Read `key=value` words. Raises ConfigError for anything else. loader: knows what glob(*) stands for."""
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for argument in arguments:
        try:
            override = parser.parse_override(quoted(argument))
        except HydraException as error:
            why = "; quote a value with special characters twice: key=\"'a, b'\"" if "=" in argument else ""
            if argument.count("[") > argument.count("]"):
                why = "; a list is one word: 'key=[a,b]', without spaces"
            elif re.search(r"\.py:\w+\s*:", argument):
                escaped = argument.replace(".py:", ".py\\:")
                why = f"; within braces the colon of FILE.py:NAME takes a backslash: '{escaped}'"
            elif any(word.startswith("=") for word in arguments):
                why = "; no spaces stand around the ="
            raise ConfigError(
                f"cannot read {argument!r}: options are key=value, such as {likely(argument)}{why}"
            ) from error
        if not override.key_or_group:
            raise ConfigError(f"cannot read {argument!r}: nothing stands before the =; options are key=value")
        if override.package is not None:
            raise ConfigError(f"cannot use {argument!r}: an option has one place, leave @ out")
        override.config_loader = loader
        overrides.append(override)
    return overrides


def compose(overrides: Sequence[Override], run: Path | None = None, folders: Sequence[Path] = ()) -> Configured:
    """The experiment that `overrides` describe, on top of a recipe or, where given, of what the run in `run` used.

    folders: the user's own configurations. Raises ConfigError for whatever is wrong with it.
    """
    loader = ExperimentLoader(folders, run=run)
    loader.load_configuration("base", [str(o.input_line) for o in overrides], RunMode.RUN)
    return loader.composed


def preset(recipe: str, *words: str) -> Experiment:
    """The experiment of a recipe with settings as typed: `preset("calculator", "seed=1")`. Raises ConfigError."""
    return compose(parse([f"recipe={recipe}", *map(str, words)])).experiment


def composed_from(config: DictConfig) -> Configured:
    """What Hydra composed, as an Experiment. Raises ConfigError where a part refuses its settings."""
    own = copy.deepcopy(config)
    with flag_override(own, ["struct", "readonly"], [False, False]):
        chosen: Any = OmegaConf.to_container(own.pop("hydra").runtime.choices) if "hydra" in own else {}
    missing = sorted(OmegaConf.missing_keys(own))
    if missing:
        raise ConfigError(f"{missing[0]} is not set and has no default; give {missing[0]}=VALUE")
    OmegaConf.resolve(own)
    choices = {key: chosen[key] for key in (*groups(), "recipe") if key in chosen}
    refuse_absurd(OmegaConf.to_container(own))
    return Configured(_built(own, ""), OmegaConf.to_yaml(own), choices)


class ExperimentLoader(ConfigLoader):
    """Loads experiments for Hydra, by its own loader: recipes, classes of the user's own, checks and messages."""

    composed: Configured  # what the last configuration came to

    def __init__(
        self,
        folders: Sequence[Path] = (),
        primary: str = "base",
        evaluates: bool = False,
        run: Path | None = None,
        job: str = "mtgrpo",
    ) -> None:
        """folders: the user's own configurations. primary: the one of them to begin with. job: its name for Hydra.

        evaluates: `checkpoint=PATH` is an option, whose run is the recipe. run: the folder of a run that is the recipe.
        """
        self.hydra = _make_hydra(job)
        self._inner: ConfigLoader = self.hydra.config_loader
        self.hydra.config_loader = self
        named = zip(("--config-dir", "--config-path"), folders, strict=False)  # each can be given once
        self.flags = [word for flag, folder in named for word in (flag, str(folder.resolve()))]
        self.flags += [] if primary == "base" else ["--config-name", primary]
        self.notes: list[str] = []  # for the user, of the last configuration
        self._folders, self._reads, self._run = list(folders), evaluates or run is not None, run
        self._trains = not evaluates and job != "sft"  # a warm start begins from scratch; what is measured is named
        self._record: Path | None = None  # the run whose record, which may be used, is the recipe
        self._primary = None if primary == "base" else read_primary(primary, folders)

    def hint(self, said: str) -> str:
        """Where `said` misses a file below this folder, and a run's record means another: the end of the message."""
        here, begun = str(Path.cwd()), started_in(self._record) if self._record else ""
        missed = re.search(f"no (such )?file.*{re.escape(here)}/", said)
        if not missed or begun in ("", here) or not Path(begun).is_dir():
            return ""
        return f"; names in the record of {self._record} are relative to {begun!r:.200}, where it was started: go there"

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
        words = parse(overrides, self)
        for word in words:
            if word.is_sweep_override() and word.is_hydra_override():
                raise ConfigError(f"{word.input_line} gives several values: what belongs to Hydra takes one")
            if word.is_sweep_override() and run_mode is RunMode.RUN:
                raise ConfigError(
                    f"{word.input_line} gives several values: add --multirun for one run each; a list is written [1,2]"
                )
        settled = self._settled(words)
        try:
            ConfigStore.instance().store("chosen", _typed(settled), "recipe", "_global_")
            config = self._inner.load_configuration(config_name, self._lines, run_mode, from_shell)
            with open_dict(config.hydra.runtime):
                config.hydra.runtime.choices.update(settled.choices)
            self.composed = composed_from(config)
        except ConfigError as error:
            source = settled.sources.get(key := re.split(r"[ =:]", str(error), maxsplit=1)[0], "")
            if not source or f"{key}=" in source:
                raise
            raise ConfigError(f"{source}: {error}") from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, settled)) from error
        except ValueError as error:  # a check in the __post_init__ of a class that knows nothing of ConfigError
            raise ConfigError(str(error)) from error
        hydra, own = config.hydra, [word for word in words if not word.is_hydra_override()]
        hydra.overrides.task = [word.input_line for word in own]
        hydra.overrides.hydra = [word.input_line for word in words if word.is_hydra_override()]
        names = hydra.job.config.override_dirname
        lines = sorted(str(word.input_line) for word in own if word.key_or_group not in names.exclude_keys)
        hydra.job.override_dirname = names.item_sep.join(lines).replace("=", names.kv_sep)
        return config

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Called by Hydra for each run of a sweep."""
        words = [*cast("list[str]", OmegaConf.to_container(master_config.hydra.overrides.hydra)), *sweep_overrides]
        config = self.load_configuration(master_config.hydra.job.config_name, words, RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)  # such as the time in a folder's name
        return config

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        """Called by Hydra for --info."""
        self.load_configuration(config_name, overrides, RunMode.MULTIRUN)
        return self._inner.compute_defaults_list(config_name, self._lines, run_mode)

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
        return self._inner.get_group_options(group_name, results_filter, None, self._search_path)

    def list_groups(self, parent_name: str) -> list[str]:
        return self.get_group_options(parent_name, ObjectType.GROUP)

    def get_search_path(self) -> Any:
        return self._inner.get_search_path()

    def get_sources(self) -> list[Any]:
        return self._inner.get_sources()

    def _settled(self, overrides: Sequence[Override]) -> Settled:
        """What recipes, or the record of a run, and the words of the command line come to."""
        words = [_first(override) if override.is_sweep_override() else override for override in overrides]
        typed = {word.key_or_group: _value(word) for word in words}
        checkpoint = checkpoint_folder(str(typed["checkpoint"])) if self._reads and "checkpoint" in typed else None
        recipe, layers = self._recipes(words, typed, checkpoint)
        chosen = {group: option for group, option in typed.items() if group in groups()}
        settled = settle([base(), *layers, Recipe("the command line", chosen, {})], self._folders)
        self.notes += settled.left_out
        settled.values.setdefault("log", list(SINKS))
        elsewhere = {*groups(), "recipe", *(("checkpoint", "trust_code") if self._reads else ())}
        settings = [word for word in words if not (word.is_hydra_override() or word.key_or_group in elsewhere)]
        inside = tuple(f"{key}." for key, setting in settled.known.items() if setting.holds_any)
        settings.sort(key=lambda word: word.key_or_group.startswith(inside))  # a list before its entries
        for word in settings:
            if word.is_delete():
                self.notes.append(settled.take_away(word.key_or_group, str(word.input_line)))
            else:
                settled.put(word.key_or_group, word.value(), str(word.input_line))
        tools = any(value and key.startswith("environment.tools") for key, value in typed.items())
        if tools and settled.choices["agent"] != base().choices["agent"] and not settled.values.get("sft.steps"):
            self.notes.append("environment.tools has no effect on training: an agent brings tools of its own")
        if not settled.values.get("model.lora.rank") and {"model.lora.alpha", "model.lora.targets"} & typed.keys():
            self.notes.append("model.lora.rank is 0: all weights are trained, unless model.name is an adapter's")
        settled.values.update({"model.name": str(checkpoint)} if checkpoint else {})
        settled.choices["recipe"] = recipe
        self._lines = [str(word.input_line) for word in words if word.is_hydra_override()]
        self._lines += [f"{key}={layer.choices[key]}" for layer in layers for key in layer.choices if "/" in key]
        self._lines += ["recipe=chosen", *self._search_path]
        return settled

    def _recipes(
        self, words: Sequence[Override], typed: Mapping[str, Any], checkpoint: Path | None
    ) -> tuple[Any, list[Recipe]]:
        """What is chosen as the recipe, and the layers on top of the base that it comes to."""
        self.notes = []
        primary = [self._primary] if self._primary else []
        asked = [word for word in words if word.key_or_group == "recipe"]
        if run := checkpoint.parent.parent if checkpoint else self._run:
            if asked:
                raise ConfigError("checkpoint= brings the configuration of its run: leave recipe= out")
            if checkpoint and "model.name" in typed:
                raise ConfigError(
                    f"checkpoint= and model.name= each name a model: leave one out; {typed['model.name']} is measured "
                    "with recipe= and settings as in training"
                )
            given = {**typed, **({"model.name": None} if checkpoint else {})}  # whose place the checkpoint takes
            record = read_run(run, typed.get("trust_code") is True, given)
            self._record = run
            return record.choices.get("recipe"), [record, *primary]
        recipe, note = self._usual_recipe(typed)
        self.notes = [] if asked else note
        for word in asked:
            added = [] if word.is_delete() else absolute(word.value())
            recipe = [*_listed(recipe), *_listed(added)] if word.is_add() else added
        layers = [layer for option in _listed(recipe) for layer in read_recipe(str(option), self._folders)]
        return recipe, [*layers, *primary]

    def _usual_recipe(self, typed: Mapping[str, Any]) -> tuple[Any, list[str]]:
        """Where none is asked for: that of the primary configuration, else by the model that is named; and a note.

        The weights that ship are for their own task; any other, and who asks for a warm start, begins from scratch.
        """
        primary = self._primary or base()
        usual, model = base().choices, primary.values.get("model") or {}
        name = typed.get("model.name", model.get("name", SHIPPED))
        if self._primary and "recipe" in primary.choices:
            return primary.choices["recipe"], []
        if name in (*FROM_SCRATCH, SHIPPED):
            task = typed.get("task", primary.choices.get("task", usual["task"]))
            imitates = typed.get("sft.steps") != 0 and any(key.startswith("sft.") for key in typed)
            begun = (name, task) == (SHIPPED, usual["task"]) and self._trains and not imitates
            return usual["recipe"] if begun else f"{usual['recipe']}_from_scratch", []
        rank = typed.get("model.lora.rank", (model.get("lora") or {}).get("rank"))
        recipe = "pretrained_lora" if rank else "pretrained"
        why = "no recipe= is given, and the usual one (of other steps and lr) is for the model that ships"
        why += "; for weights of a run of yours give its recipe" if (Path(str(name)) / STATE).is_file() else ""
        return recipe, [f"recipe={recipe} is taken for model.name={name}: {why}"] if "model.name" in typed else []

    @property
    def _search_path(self) -> list[str]:
        """How Hydra finds its own groups in the user's folders; the path that he types himself stands before it."""
        places = [QuotedString(f"file://{folder.resolve()}", Quote.single).with_quotes() for folder in self._folders]
        return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def _make_hydra(job: str) -> Any:
    """A Hydra that composes from the recipes; one that this process has already, as a notebook may, keeps its place."""
    present = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(RECIPES), job, version_base="1.3"):
            return GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = present


def _first(override: Override) -> Override:
    """The first of the values that a sweep gives. Raises ConfigError where there is none."""
    value = override.value()
    try:
        if isinstance(value, IntervalSweep) and value.start is not None:
            first = int(value.start) if value.start.is_integer() else value.start  # Hydra reads 2 as 2.0
        else:
            first = next(override.sweep_string_iterator(), None)
    except HydraException as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
    if first is None:
        raise ConfigError(f"{override.input_line} stands for no value at all")
    return parse([f"{override.get_key_element()}={first}"])[0]


def _value(word: Override) -> Any:
    """What a word gives. Raises ConfigError where it chooses nothing by its name that has to be."""
    group, value = word.key_or_group, word.value()
    if group not in groups():
        return value
    if word.is_delete() or isinstance(value, dict) or not value:
        raise ConfigError(f"{word.input_line}: choose a {group} by its name, and settings as {group}.NAME=VALUE")
    return absolute(value)


def _typed(settled: Settled) -> DictConfig:
    """The configuration, whose values have been converted to the types of their settings."""
    nested = settled.nested()
    of_hydra = {"hydra": nested.pop("hydra")} if "hydra" in nested else {}
    chosen = {group: OmegaConf.structured(chosen_class(group, settled.choices[group])) for group in groups()}
    config = cast("DictConfig", OmegaConf.merge(Experiment, chosen, nested))
    with open_dict(config):
        config.update(of_hydra)
    return config


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


def _explain(error: BaseException, settled: Settled) -> str:
    """What Hydra or OmegaConf refuses, in the user's terms. Both wrap errors; the one that has a key is of use."""
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    cause = next((link for link in chain if getattr(link, "full_key", None)), error)
    key = re.sub(r"\[.*", "", str(getattr(cause, "full_key", "")))
    text = str(cause).strip().partition("\n")[0]
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and key not in settled.known:
        if "hydra" not in key:
            return unknown(key, settled.known)
        path, _, last = key.rpartition(".")
        if near := difflib.get_close_matches(last, map(str, cast(Any, cause).parent_node or ()), 1):
            text = f"did you mean {path}.{near[0]}?"
    if isinstance(cause, ValidationError) and key in settled.known:
        text = f"expected {spell(settled.known[key].type)}"
    source = settled.sources.get(key, "")
    return ": ".join(filter(None, (source, "" if f"{key}=" in source else key, text)))


def _listed(option: Any) -> list[Any]:
    return cast("list[Any]", option) if isinstance(option, list) else [option]
