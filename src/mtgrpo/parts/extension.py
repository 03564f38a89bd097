"""How a name on the command line becomes a class: one file in a folder, or `path/to/file.py:Name`.

The file name is the option's name, the dataclass in it holds the settings, its docstring is the help text. Options of
a kind lie in the kind's own folder, and in `integrations`, where one module or folder holds options of several kinds.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

from mtgrpo.errors import ConfigError

T = TypeVar("T")
INTEGRATIONS = "mtgrpo.integrations"  # the folder may be absent
TRACEBACK = "traceback.txt"  # in a run's folder: of the error that ended it, or of the first failed conversation


class MisgivenError(TypeError):
    """Somebody's code gave what it should not; the message says what was expected, and names file and line."""


def names(package: str) -> list[str]:
    """The options that a folder offers: its file names. `package` is dotted, e.g. "mtgrpo.rewards"."""
    folder = importlib.import_module(package)
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def options(package: str, base: type) -> dict[str, type]:
    """The classes that a folder and `integrations` offer, by their option's name.

    A file that holds no concrete `base` is no option.
    """
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names(package)}
    own = {name: _only(module, base) for name, module in modules.items() if _candidates(module, base)}
    return dict(sorted((own | _integrated(package, base)).items()))


def _integrated(package: str, base: type) -> dict[str, type]:
    """The options among the integrations; of these only the modules that import from `package` are imported.

    A class derived from `base` imports that, or another option, from the folder of its kind.
    """
    imports = re.compile(rf"^from {re.escape(package)}(\.\w+)? import", re.MULTILINE)
    found: dict[str, type] = {}
    for integration, sources in _integrations().items():
        modules = [importlib.import_module(name) for name, source in sources.items() if imports.search(source)]
        offered = {module.__name__: _only(module, base) for module in modules if _candidates(module, base)}
        for name, option in offered.items():
            found[integration if len(offered) == 1 else name.rpartition(".")[2]] = option
    return found


@functools.cache
def _integrations() -> dict[str, dict[str, str]]:
    """The source of each module of an integration, by the module's dotted name."""
    found: dict[str, dict[str, str]] = {}
    spec = importlib.util.find_spec(INTEGRATIONS)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).rglob("[!_]*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.setdefault(parts[0], {})[".".join((INTEGRATIONS, *parts))] = path.read_text(encoding="utf-8")
    return found


def find(package: str, name: str, base: type, what: str = "") -> Any:
    """The extension that option `name` of `package` means; `name` may also be `path/to/file.py:Name`.

    Returns a concrete subclass of `base`, or a plain function where the file or the path names one. what: such an
    option, for messages; by default as the folder is called.
    Raises ConfigError when there is no such file or nothing suitable in it.
    """
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        module = load_file(Path(path))
        found = getattr(module, attribute, None)
        if found is None:
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            raise ConfigError(f"{path} has no {attribute!r}; it defines {', '.join(own) or 'nothing usable'}")
        return found
    if name not in names(package):
        if name in (integrated := _integrated(package, base)):
            return integrated[name]
        known = options(package, base)
        what = what or package.rpartition(".")[2].removesuffix("s")
        raise ConfigError(
            f"there is no {what} named {name!r}; {meant(name, known)}known: {', '.join(known)}; or give a file "
            "of your own as path/to/file.py:Name"
        )
    return _only(importlib.import_module(f"{package}.{name}"), base)


def meant(name: str, known: Iterable[str]) -> str:
    """Asks whether what is most like `name` was meant, if anything is like it: the beginning of an explanation."""
    close = difflib.get_close_matches(name, list(known), 2)
    return f"did you mean {' or '.join(close)}? " if close else ""


def find_class(package: str, name: str, base: type[T], what: str = "") -> type[T]:
    """As `find`, where only a class will do. Raises ConfigError for anything else, and for a class with gaps."""
    found = find(package, name, base, what)
    if not (inspect.isclass(found) and issubclass(found, base)):
        methods = " and ".join(sorted(getattr(base, "__abstractmethods__", ())))
        what = f"a function; make it the method {methods} of one" if inspect.isfunction(found) else repr(found)
        raise ConfigError(f"{name} must be a class derived from {base.__module__}.{base.__name__}, it is {what}")
    if inspect.isabstract(found):
        raise ConfigError(
            f"{name}: the class does not define {', '.join(sorted(cast(Any, found).__abstractmethods__))}"
        )
    return found


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once per process. Raises ConfigError when it is missing or breaks.

    The module's name says where the file is, so that what it defines can be unpickled in another process.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return importlib.import_module(f"{__name__}.{str(path).encode().hex()}")
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {explained(error)}") from error


class _FileFinder:
    """Finds the modules below this one: each name is the path of a file, in hexadecimal."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The module `name`; None where it is not one of these. Called by Python's import."""
        parent, _, place = name.rpartition(".")
        return (
            importlib.util.spec_from_file_location(name, bytes.fromhex(place).decode()) if parent == __name__ else None
        )


__path__: list[str] = []  # modules may lie below this one
sys.meta_path.append(_FileFinder)


def place(method: Any) -> str:
    """Where a function or method is written, to be put behind what is said of it."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def misgiven(method: Any, given: Any, expected: str) -> MisgivenError:
    """The error to raise where somebody's `method` gave something else than was `expected`."""
    return MisgivenError(
        f"{getattr(method, '__qualname__', type(method).__name__)} gave {given!r:.120}; {expected}{place(method)}"
    )


async def awaited(method: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """What a coroutine function gives. Raises MisgivenError where somebody wrote it without `async`."""
    given = method(*arguments)
    if not inspect.isawaitable(given):
        raise misgiven(method, given, f"write it as `async def {cast(Any, method).__name__}`")
    return await given


def explained(error: BaseException) -> str:
    """Its type and what it says; where it came from a user's own file, also the file and line."""
    where = _way(error)
    said = f"{type(error).__name__}: {error}"
    return said if where in said else said + where


def of_own_code(error: BaseException) -> bool:
    """Whether it came from a user's own file, or is about what such a file gave."""
    return isinstance(error, MisgivenError) or bool(_way(error))


def keep_traceback(error: BaseException, folder: Path) -> None:
    """Write how it came to `error` into `folder`, as far as the disk has room."""
    with contextlib.suppress(OSError):
        (folder / TRACEBACK).write_text("".join(traceback.format_exception(error)), errors="backslashreplace")


def _way(error: BaseException) -> str:
    """The last place in a user's own file that it went through, as `place` has it; "" for none."""
    steps = [step for one in (error.__cause__, error) if one for step in traceback.walk_tb(one.__traceback__)]
    own = [(frame.f_code.co_filename, line) for frame, line in steps if _own(frame)]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def _own(frame: FrameType) -> bool:
    """Whether the code stands in a file that `load_file` has read."""
    return str(frame.f_globals.get("__name__")).startswith(f"{__name__}.")


def _only(module: ModuleType, base: type) -> type:
    """The one concrete subclass of `base` that an extension file holds."""
    found = _candidates(module, base)
    if len(found) != 1:
        raise ConfigError(
            f"{module.__name__} must define exactly one concrete {base.__name__}, it defines {found or 'none'}"
        )
    return getattr(module, found[0])


def _candidates(module: ModuleType, base: type) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
        and not name.startswith("_")
    ]
