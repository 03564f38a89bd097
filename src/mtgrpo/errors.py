"""The errors that end a run, or are told the user before one."""

import argparse
import dataclasses
import difflib
import operator
import shutil
import sys
from collections import ChainMap
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn


class ConfigError(ValueError):
    """The user's configuration or input is wrong; the message says what, the value seen and how to fix it."""


def program() -> str:
    """What stands for `mtgrpo` in what a message tells the user to type: as this process was called."""
    called, found = Path(sys.argv[0]), shutil.which("mtgrpo")
    if called.name == "__main__.py":  # python -m mtgrpo
        called = Path(sys.executable).with_name("mtgrpo")
    known = called.name != "mtgrpo" or not called.is_file() or (found and called.samefile(found))
    return "mtgrpo" if known else str(called)


def meant(name: str, known: Iterable[str]) -> str:
    """Asks whether what is most like `name` was meant, if anything is like it: the beginning of an explanation."""
    bare, name = {one.lstrip("-"): one for one in known}, name.lstrip("-")  # what flags share says nothing
    name = name if name in bare or not name.isupper() else name.lower()
    close = difflib.get_close_matches(name, bare, 2) or [one for one in bare if name and one.startswith(name)][:2]
    return f"did you mean {' or '.join(bare[one] for one in close)}? " if close else ""


def beside(path: Path, pattern: str = "*") -> str:
    """Asks whether a file beside `path` was meant, where that is not there: the end of an explanation."""
    hint = "" if path.exists() else meant(path.name, (file.name for file in path.parent.glob(pattern)))
    return f"; {hint}".rstrip() if hint else ""


class Arguments(argparse.ArgumentParser):
    """The flags of a command. Wrong ones raise ConfigError, in a line in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        nested = [
            one for action in self._actions if isinstance(action.choices, dict) for one in action.choices.values()
        ]
        flags = [flag for parser in (self, *nested) for flag in parser._option_string_actions]
        wrong, _, choices = message.partition("invalid choice: ")[2].partition(" (choose from ")
        known = flags if unknown else [choice.strip(" ')") for choice in choices.split(",")]
        hint = meant(words.partition(" ")[0].partition("=")[0] or wrong.strip("'"), known) if unknown or wrong else ""
        usage = f"{program()}{self.prog.removeprefix('mtgrpo')} --help lists what there is"
        raise ConfigError(f"{message}; {hint.rstrip() or usage}")


POLICY_ERROR, REFUSED = "policy_error", "chat_template"  # beside the limits, why what the policy wrote cuts


class PolicyError(Exception):
    """What the policy wrote cannot be dealt with: the model's doing, not the world's, so never a failed conversation.

    Raised by a tool it is an observation (`ToolError`); by a reward the trajectory is worth 0; by another part it ends
    the conversation, which is TRUNCATED and trained.
    """


class TaskError(ConfigError):
    """A task lacks what it is graded by: its conversations fail, and a run goes on with others."""


class UnreachableError(ConfigError):
    """What is asked for lies on a hub, which does not answer or is not asked, and not on this machine."""


class RunError(RuntimeError):
    """The run cannot go on; the message says why, what was measured and what to change."""


class RanksError(RunError):
    """One of several ranks has failed, or its machine; others may do what it did, from the last checkpoint on."""


class EngineError(RunError):
    """The engine itself is broken (its cause says how): ends the run, unlike a tool that fails."""


_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def require(settings: Any, **bounds: str) -> None:
    """Raise ConfigError where a field of a dataclass is out of its bounds, as NaN always is; None is not looked at.

    bounds: by the field's name, such as lr="> 0", top_p="> 0 and <= 1" or top_k=">= 0 (0 = off)".
    """
    for name, bound in bounds.items():
        value = getattr(settings, name)
        limits = (limit.split() for limit in bound.partition(" (")[0].split(" and "))
        if value is not None and not all(_COMPARISONS[sign](value, float(limit)) for sign, limit in limits):
            raise ConfigError(f"`{name}` must be {bound}, got {value}")


class Bounded:
    """Settings whose fields have bounds, as `require` takes them: `class Length(Reward, cost="> 0")`."""

    _bounds: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **bounds: str) -> None:
        super().__init_subclass__()
        inherited = (base._bounds for base in cls.__mro__ if issubclass(base, Bounded))  # slots=True makes `cls` again
        cls._bounds = dict(ChainMap(bounds, *inherited))

    def __post_init__(self) -> None:
        require(self, **self._bounds)


def refuse_without_effect(settings: Any, names: tuple[str, ...], needs: str) -> None:
    """Raise ConfigError where one of the fields `names` of a dataclass is set; needs: what would give it an effect."""
    for field in dataclasses.fields(settings):
        made = field.default_factory
        default: Any = field.default if made is dataclasses.MISSING else made()
        if field.name in names and (value := getattr(settings, field.name)) != default:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(f"`{field.name}={shown}` has no effect: {needs}, or leave it out")


@contextmanager
def refuse_unreadable() -> Generator[None]:
    """What cannot be read within is the user's mistake: a ConfigError in place of an OSError."""
    try:
        yield
    except BrokenPipeError:  # of what is written
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or 'the input'}: {error.strerror or error}") from error


def harmless(error: BaseException) -> RuntimeError:
    """In place of what would end the whole program, such as SystemExit in somebody's code: an error of that code."""
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
