"""What can be chosen and what can be set: the options of every group, and the settings of the chosen ones.

One scan of the folders finds the options, and puts them where Hydra's shell completion and glob(*) look.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.errors import ConfigError, program
from mtgrpo.parts import extension

COMPOSED = "composed"  # the option of a group that holds several others, in its setting `of`


@dataclass(frozen=True)
class Setting:
    """One thing to be set: its type, and the dataclass that declares it."""

    type: Any
    owner: type

    @property
    def holds_any(self) -> bool:
        """Whether its entries are the user's to name."""
        return self.type is Any or typing.get_origin(self.type) is dict


@functools.cache
def options(group: str) -> dict[str, type]:
    """The options that come with the package, by name."""
    found = extension.options(groups()[group].__module__, groups()[group])
    for name, option in found.items():
        ConfigStore.instance().store(name, option, group)
    return found


def chosen_class(group: str, option: str | list[str]) -> type:
    """The class of an option: its name, or `path/to/file.py:Name`; of a list the group's option `composed`.

    Raises ConfigError when it is none.
    """
    known = options(group)
    if isinstance(option, list):
        if COMPOSED not in known:
            raise ConfigError(f"{group}=[{','.join(map(str, option))}]: choose one {group}, it takes no list")
        return known[COMPOSED]
    if option in known:
        return known[option]
    if ours := elsewhere().get(f"{group}={option}"):
        raise ConfigError(f"there is no {group} named {option!r}; here it is {ours}")
    base = groups()[group]
    found = extension.find_class(base.__module__, option, base)
    if vars(found).get("__annotations__") and "__dataclass_fields__" not in vars(found):
        raise ConfigError(f"{group}={option}: put @dataclass above the class, so that its fields become settings")
    try:
        OmegaConf.structured(found)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{group}={option}: {' '.join(str(error).partition('full_key')[0].split())}; "
            "a setting is an int, float, bool, str or Enum, "
            "a list or dict of these, or one of these | None"
        ) from error
    return found


def entries(group: str, choice: Any) -> dict[str, type]:
    """The classes that a list chose, by the name under which the settings of each stand; {} where it is no list."""
    if not isinstance(choice, list):
        return {}
    listed = [str(option) for option in cast("list[object]", choice)]
    found = {Path(option).name.rpartition(":")[2]: chosen_class(group, option) for option in listed}
    if len(found) < len(listed) or not found:
        raise ConfigError(f"{group}=[{','.join(listed)}]: name each {group} once, and at least one")
    return found


def schema(choices: Mapping[str, Any]) -> dict[str, Setting]:
    """Every setting by its key, for the options that the groups chose."""
    classes = {group: chosen_class(group, choices[group]) for group in groups()}

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Setting]]:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            inner = classes.get(field.name, hints[field.name]) if cls is Experiment else hints[field.name]
            if dataclasses.is_dataclass(inner):
                yield from walk(cast(type, inner), f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", Setting(inner, cls)

    found = dict(walk(Experiment, ""))
    for group, choice in choices.items():
        for name, cls in entries(group, choice).items():
            found |= {f"{group}.{name}.weight": Setting(float, classes[group]), **dict(walk(cls, f"{group}.{name}."))}
    return found


@functools.cache
def elsewhere() -> dict[str, str]:
    """What options of other libraries are called here."""
    return yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text())


def counterpart(key: str) -> str:
    """What this option of another library is called here; "" where none is known."""
    endings = [key.split(".", cut)[-1] for cut in range(key.count(".") + 1)]
    return next((elsewhere()[name] for name in endings if name in elsewhere()), "")


def unknown(key: str, known: Mapping[str, Setting]) -> str:
    """Says that there is no such setting, and which one may have been meant."""
    if key in groups():
        return f"{key} is a group, of which a recipe chooses with `defaults: [override /{key}: NAME]`"
    if key == "recipe":
        return "recipe is for the command line; a recipe takes up another with `defaults: [NAME]`"
    path, _, last = key.rpartition(".")
    below = [name for name in known if path in groups() and re.fullmatch(f"{path}[.][^.]+[.]{re.escape(last)}", name)]
    if near := below or [name for name in known if name == f"{key}s"]:
        return f"unknown option {key}; did you mean {' or '.join(near)}?"
    having = [name for name, cls in options(path).items() if hasattr(cls, last)] if path in groups() else []
    if having:
        return f"unknown option {key}: it belongs to {path}={' or '.join(having)}"
    if ours := counterpart(key):
        within = (name for name in known if path and name.startswith(f"{path}.") and name.endswith(f".{ours}"))
        return f"unknown option {key}; here it is {next(within, ours)}"
    weights = {name for name in (key, *known) if name.startswith("reward.") and name.endswith(".weight")}
    if weights == {key}:
        return f"unknown option {key}: several rewards have weights: 'reward=[numeric,format]' reward.format.weight=0.2"
    group, _, chosen = path.rpartition(".")
    if group in groups() and hasattr(options(group).get(chosen), last):
        return f"unknown option {key}: it is {group}.{last}, of {group}={chosen}"
    section = {name.removeprefix(f"{path}."): name for name in known if path and name.startswith(f"{path}.")}
    close = [section[name] for name in difflib.get_close_matches(last, section, 1)]
    same = difflib.get_close_matches(key, [name for name in known if name.rpartition(".")[2] == last], 3, cutoff=0.0)
    whole = [] if section else [*known, *groups(), "recipe", "checkpoint"]
    near = close or same or difflib.get_close_matches(key, whole, 1)
    if near:
        return f"unknown option {key}; did you mean {' or '.join(near)}?"
    if section:
        return f"unknown option {key}; there are {', '.join(section.values())}"
    return f"unknown option {key}; `{program()} train --help` lists all options"


def spell(hint: Any) -> str:
    """A type, as a person would say it."""
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if hint in _SPELLED:
        return _SPELLED[hint]
    if type(None) in typing.get_args(hint):
        return f"{spell(next(part for part in typing.get_args(hint) if part is not type(None)))} or null"
    if typing.get_origin(hint) is list:
        return f"a list such as [{_EXAMPLES.get(typing.get_args(hint)[0], 'a')}]"
    return re.sub(r"\b[\w.]+\.", "", str(hint))


_SPELLED: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_EXAMPLES: dict[Any, str] = {int: "1,2", float: "0.1,0.2", str: "a,b"}
