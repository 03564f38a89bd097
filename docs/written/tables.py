"""What the pages share: tables in Markdown, and how settings are written in them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from mtgrpo.config.helptext import comments

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "&#124;") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def spelled(value: Any) -> str:
    """A default, as a user would type it."""
    if isinstance(value, Enum):
        return str(value.name)
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def fields(cls: type) -> dict[str, Any]:
    """The settings of a class, by name, with their defaults."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        made = field.default_factory
        given[field.name] = field.default if made is dataclasses.MISSING else made()
    return given


def meaning(cls: type, name: str) -> str:
    """The comment of a setting, of the nearest class that has one."""
    return next((text for c in cls.__mro__ if (text := comments(c).get(name))), "")


def settings(prefix: str, cls: type, without: Iterable[str] = (), kinds: Mapping[str, type[Enum]] = {}) -> str:
    """The settings of a class, with defaults and with the members of those that are of one of the `kinds`."""
    rows = [
        [f"`{prefix}.{name}`", spelled(default), meaning(cls, name) + (members(kinds[name]) if name in kinds else "")]
        for name, default in fields(cls).items()
        if name not in without
    ]
    return table(["setting", "default", "meaning"], rows) if rows else ""


def members(cls: type[Enum]) -> str:
    """The members of an enumeration and what they mean, as the end of a cell."""
    source = inspect.getsource(cls).splitlines()
    lines = [next((line for line in source if line.strip().startswith(f"{member.name} =")), "") for member in cls]
    said = [f"`{member.name}`: {line.partition('#')[2].strip()}" for member, line in zip(cls, lines, strict=True)]
    return f"<br>{'<br>'.join(said)}"


def joined(parts: Iterable[str]) -> str:
    """A page of parts, each of which ends with an empty line."""
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)
