"""The errors that end a run, or are told the user before one."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any


class ConfigError(ValueError):
    """The user's configuration or input is wrong; the message says what, the value seen and how to fix it."""


class EngineError(RuntimeError):
    """The engine itself is broken (its cause says how): ends the run, unlike a tool that fails."""


def refuse_without_effect(settings: Any, names: tuple[str, ...], needs: str) -> None:
    """Raise ConfigError where one of the fields `names` of a dataclass is set; needs: what would give it an effect."""
    for field in dataclasses.fields(settings):
        made = field.default_factory
        default: Any = field.default if made is dataclasses.MISSING else made()
        if field.name in names and (value := getattr(settings, field.name)) != default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"`{field.name}={shown}` has no effect: {needs}, or leave it out")


def refuse_without_package(package: str, setting: str) -> None:
    """Raise ConfigError where `package`, which `setting` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{setting} needs the package {package}: pip install mtgrpo[gpu], or leave it out")


def harmless(error: BaseException) -> RuntimeError:
    """In place of what would end the whole program, such as SystemExit in somebody's code: an error of that code."""
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
