"""What all parts of a run have in common: settings that are inert, and something that is open while the run lasts."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.errors import Bounded, ConfigError

T = TypeVar("T")


class Reach(Enum):
    """What a setting reaches: a record that somebody sent may set what reaches nothing."""

    nothing = "nothing"
    code = "code"
    program = "program"
    file = "file"
    folder = "folder"
    network = "network"
    secret = "secret"
    run = "may run"  # where the policy's code does
    endless = "may never end"


@dataclass(frozen=True)
class Where:
    """Declares that a text reaches something where it begins as the regular expression `begins`, else nothing."""

    reach: Reach
    begins: str


@dataclass(frozen=True)
class Parts:
    """Declares that entries name parts of a kind, whose settings say themselves what they reach."""

    kind: str  # tool, or a group


# The types of settings that are no number, flag or enum; a test finds one that does not say what it reaches.
Text = Annotated[str, Reach.nothing]
Data = Annotated[Any, Reach.nothing]
Prompt = Annotated[str, Where(Reach.file, "file:")]  # a text, or file:PATH of one
Option = Annotated[str, Where(Reach.code, r"(?s).*\.py:")]  # the name of one, or path/to/file.py:Name
File = Annotated[str, Reach.file]
Folder = Annotated[str, Reach.folder]
Pattern = Annotated[str, Where(Reach.endless, r"(?s).*[*+?{(]")]  # a regular expression; others match in bounded time
Program = Annotated[str, Reach.program]  # one that is started, or words and variables for it
Code = Annotated[str, Reach.code]
Network = Annotated[str, Reach.network]
Secret = Annotated[str, Reach.secret]  # the name of one of the environment's variables


@dataclass(frozen=True)
class RunContext:
    """What a part is given when a run opens it."""

    folder: Path  # of the run; it exists
    note: Callable[[str], None]  # tells the person something
    secrets: Mapping[str, str]  # the environment's variables, such as keys of interfaces
    settings: Mapping[str, str] = field(default_factory=dict[str, str])  # every option of the run, by its full name
    step: int = 0  # of training, after which a run that is resumed goes on


class Part(Bounded):
    """A part of a run. The object that a configuration makes is settings alone: to make one opens nothing."""

    def open(self, context: RunContext) -> AbstractAsyncContextManager[Self]:
        """The running part, opened once for a run and closed at its end, whatever ends it.

        By default the part itself. One that has resources overrides it with an `asynccontextmanager` that opens them,
        yields a copy of itself that holds them, and closes them in `finally`.
        """
        return nullcontext(self)

    def check(self, experiment: Any) -> None:
        """Raise ConfigError where it cannot be used beside the other parts and settings of `experiment`."""

    def check_machine(self) -> None:
        """Raise ConfigError where this machine lacks a file or a program that it names; opens nothing."""

    @property
    def opens(self) -> bool:
        """Whether it has resources, which are not there before it is open."""
        return type(self).open is not Part.open


def named(options: Any, what: str, example: str) -> dict[str, dict[str, Any]]:
    """Names with the settings of each, from a list of names or a mapping from names to settings.

    what, example: of a mapping that is right; for messages. Raises ConfigError for anything else.
    """
    if isinstance(options, str) and options and not set(options) & set("{}'\""):
        raise ConfigError(f"{what} must be a list of names: '{what}=[{options}]'")
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
            plain = unknown[0] in kind.__annotations__ and "__dataclass_fields__" not in vars(kind)
            lacks = f", and {kind.__name__} lacks @dataclass" if plain else ""
            raise ConfigError(f"the {what} has no setting {unknown[0]!r}; its settings: {known}{lacks}")
        return cast(T, OmegaConf.to_object(OmegaConf.merge(config, dict(settings))))
    except ConfigError as error:  # names of its own fields stand in backticks
        raise ConfigError(f"the {what}: {error}" if "`" in str(error) else str(error)) from None
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        if "from None" in said and (none := [field.name for field in fields(cast(Any, kind)) if field.default is None]):
            said = f"{none[0]} = None needs a type that may be None, as `{none[0]}: str | None = None`"
        raise ConfigError(f"the {what} with settings {dict(settings)}: {said}") from None
