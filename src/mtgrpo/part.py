"""What all parts of a run have in common: settings that are inert, and something that is open while the run lasts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """What a part is given when a run opens it."""

    folder: Path  # of the run; it exists
    note: Callable[[str], None]  # tells the person something
    secrets: Mapping[str, str]  # the environment's variables, such as keys of interfaces
    settings: Mapping[str, str] = field(default_factory=dict[str, str])  # every option of the run, by its full name
    step: int = 0  # of training, after which a run that is resumed goes on


class Part:
    """A part of a run. The object that a configuration makes is settings alone: to make one opens nothing."""

    def open(self, context: RunContext) -> AbstractAsyncContextManager[Self]:
        """The running part, opened once for a run and closed at its end, whatever ends it.

        By default the part itself. One that has resources overrides it with an `asynccontextmanager` that opens them,
        yields a copy of itself that holds them, and closes them in `finally`.
        """
        return _itself(self)

    @property
    def opens(self) -> bool:
        """Whether it has resources, which are not there before it is open."""
        return type(self).open is not Part.open


@asynccontextmanager
async def _itself(part: Any) -> AsyncGenerator[Any]:
    yield part


def named(options: Any, what: str, example: str) -> dict[str, dict[str, Any]]:
    """Names with the settings of each, from a list of names or a mapping from names to settings.

    what, example: of a mapping that is right; for messages. Raises ConfigError for anything else.
    """
    if not isinstance(options, list | Mapping):
        raise ConfigError(f"{what} must be a list of names, or a mapping such as {{{example}}}: {options!r}")
    found: dict[str, dict[str, Any]] = {}
    for name in cast("list[Any] | Mapping[Any, Any]", options):
        settings: Any = cast("Mapping[str, Any]", options)[name] if isinstance(options, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(f"{what}: {name!r} is no name; settings go like {{{example}}}")
        if name in found:
            raise ConfigError(f"{what}: two are named {name!r}; rename one")
        if settings is not None and not isinstance(settings, dict):
            raise ConfigError(f"{what}: settings of {name} must be a mapping, as in {{{example}}}, got {settings!r}")
        found[name] = cast("dict[str, Any]", settings or {})
    return found


def built(what: str, kind: type[T], settings: Mapping[str, Any]) -> T:
    """The part with `settings`, converted to the types of its fields. Raises ConfigError; `what` names the part."""
    try:
        config = OmegaConf.structured(kind)
        if unknown := [key for key in settings if key not in config]:
            known = ", ".join(str(key) for key in config) or "none"
            raise ConfigError(f"the {what} has no setting {unknown[0]!r}; its settings: {known}")
        return cast(T, OmegaConf.to_object(OmegaConf.merge(config, dict(settings))))
    except ConfigError as error:  # names of its own fields stand in backticks
        raise ConfigError(f"the {what}: {error}" if "`" in str(error) else str(error)) from None
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"the {what} with settings {dict(settings)}: {said}") from None
