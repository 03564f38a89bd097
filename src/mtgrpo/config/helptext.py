"""Every option with its type, its value and what its own source says of it: the text of `mtgrpo train --help`."""

import ast
import functools
import inspect
import json
import textwrap
import typing
from collections.abc import Sequence
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtgrpo.config.compose import compose, parse
from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.options import Setting, chosen_class, options, schema
from mtgrpo.config.recipe import recipes
from mtgrpo.errors import ConfigError, meant, program
from mtgrpo.log import Sink
from mtgrpo.parts import extension

WIDTH = 100
BASE = "Base: "  # the first word of such a recipe
COLUMN = 46  # where what is said of an option begins


def help_text(words: Sequence[str], folders: Sequence[Path] = (), asked: str = "") -> str:
    """All options, with the values that the overrides `words` give them. Raises ConfigError for wrong ones.

    folders: the user's own configurations. asked: a section, or a word; then nothing but what speaks of it.
    """
    composed = compose(parse(words), folders=folders)
    values = OmegaConf.create(composed.values)
    rows: dict[str, list[str]] = {}
    for key, setting in schema(composed.choices).items():
        section = key.partition(".")[0] if "." in key else "general"
        rows.setdefault(section, []).append(_row(key, setting, OmegaConf.select(values, key)))
    sinks = [_entry(f"  'log=[{name}]'", summary(sink)) for name, sink in extension.options("mtgrpo.log", Sink).items()]
    blocks = [["recipe", *_recipes(composed.choices["recipe"], folders)], ["general", *rows.pop("general")]]
    blocks += [["log", *sinks]]
    for group in groups():
        blocks.append([group, *_options(group, composed.choices[group]), *rows.pop(group, [])])
    hints = inspect.get_annotations(Experiment, eval_str=True)
    for section, entries in rows.items():
        blocks.append(["\n".join(textwrap.wrap(f"{section}: {summary(hints[section])}", WIDTH)), *entries])
    if asked and not (blocks := _speaking_of(asked.lower(), blocks)):
        known = {name for key in schema(composed.choices) for name in key.split(".")}
        raise ConfigError(f"no option speaks of {asked!r}; {meant(asked, known)}`{program()} train --help` lists all")
    return "\n\n".join(map("\n".join, [["Shown are the values of what is chosen (*)."], *blocks]))


def _speaking_of(asked: str, blocks: Sequence[list[str]]) -> list[list[str]]:
    """The sections named `asked`, else of every section the entries with that word in them."""
    if named := [block for block in blocks if block[0].partition(":")[0] == asked]:
        return named
    found = ([title, *(entry for entry in entries if asked in entry.lower())] for title, *entries in blocks)
    return [block for block in found if len(block) > 1]


def summary(cls: type) -> str:
    """The first paragraph of the class's own docstring, on one line."""
    paragraph = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return " ".join(paragraph.split()) if not paragraph.startswith(f"{cls.__name__}(") else ""


@functools.cache
def comments(cls: type) -> dict[str, str]:
    """What the source of a dataclass says of each field: the comment behind it, or above it, or the string below it."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # of what is built in
        return {}
    lines = source.splitlines()
    definition = ast.parse(source).body[0]
    found: dict[str, str] = {}
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        behind = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().strip()
        above = list(takewhile(lambda line: line.startswith("#"), map(str.strip, lines[node.lineno - 2 :: -1])))
        if behind.startswith("#"):
            text = behind
        elif isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = str(following.value.value)
        else:
            text = " ".join(line.lstrip("# ") for line in reversed(above))
        found[node.target.id] = " ".join(text.removeprefix("#").split())
    return found


def _recipes(chosen: Any, folders: Sequence[Path]) -> list[str]:
    """What the head of each file says; those that are there to be inherited begin with BASE, and are left out."""
    entries: list[str] = []
    for name, path in recipes(folders).items():
        head = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        said = " ".join(line.lstrip("# ") for line in head if "@package" not in line)
        if not said.startswith(BASE):
            among = [chosen] if isinstance(chosen, str) else chosen
            entries.append(_entry(f"{'*' if name in among else ' '} recipe={name}", said))
    return entries


def _options(group: str, chosen: Any) -> list[str]:
    offered = {**options(group), str(chosen): chosen_class(group, chosen)}
    return [
        _entry(f"{'*' if name == str(chosen) else ' '} {group}={Path(name).name}", summary(option))
        for name, option in offered.items()
    ]


def _row(key: str, setting: Setting, value: Any) -> str:
    name = key.rpartition(".")[2]
    said = next((text for cls in setting.owner.__mro__ if (text := comments(cls).get(name))), "")
    return _entry(f"  {key}  {_type(setting.type)} = {_value(value)}", said)


def _type(hint: Any) -> str:
    if hint is Any:
        return "list or mapping"
    if inspect.isclass(hint) and not typing.get_args(hint):
        return "|".join(member.name for member in hint) if issubclass(hint, Enum) else hint.__name__
    return str(hint).replace("typing.", "")


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if OmegaConf.is_config(value):
        return str(OmegaConf.to_container(value)).replace("'", "").replace(" ", "")
    return str(value) or "''"


def _entry(left: str, right: str) -> str:
    """Two columns; what does not fit beside `left` stands below it."""
    below = textwrap.wrap(right, WIDTH - COLUMN)
    if len(left) + 2 <= COLUMN and below:
        return "\n".join([left.ljust(COLUMN) + below[0], *(" " * COLUMN + line for line in below[1:])])
    return "\n".join([*textwrap.wrap(left, WIDTH), *(" " * COLUMN + line for line in below)])
