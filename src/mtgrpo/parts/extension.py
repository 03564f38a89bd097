"""How a name on the command line becomes a class: one file in a folder, or `path/to/file.py:Name`.

The file name is the option's name, the dataclass in it holds the settings, its docstring is the help text. Options of
a kind lie in the kind's own folder, and in `integrations`, where one module or folder holds options of several kinds.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from mtgrpo.errors import ConfigError, beside, meant

T = TypeVar("T")
INTEGRATIONS = "mtgrpo.integrations"  # the folder may be absent
TRACEBACK = "traceback.txt"  # in a run's folder: of the error that ended it, or of the first failed conversation


class MisgivenError(TypeError):
    """Somebody's code gave what it should not; the message says what was expected, and names file and line."""


def options(package: str, base: type) -> dict[str, type]:
    """The classes that a folder and `integrations` offer, by their option's name. `package`: dotted, "mtgrpo.rewards".

    A file that holds no concrete `base` is no option.
    """
    folder = importlib.import_module(package)
    modules = [importlib.import_module(f"{package}.{file.name}") for file in pkgutil.iter_modules(folder.__path__)]
    return dict(sorted((_offered(modules, base) | _integrated(package, base)).items()))


def _integrated(package: str, base: type) -> dict[str, type]:
    """The options among the integrations; of these only the modules that import from `package` are imported.

    A class derived from `base` imports that, or another option, from the folder of its kind.
    """
    imports = re.compile(rf"^from {re.escape(package)}(\.\w+)? import", re.MULTILINE)
    found: dict[str, type] = {}
    for integration, sources in _integrations().items():
        modules = [importlib.import_module(name) for name, source in sources.items() if imports.search(source)]
        offered = _offered(modules, base)
        found |= {integration: next(iter(offered.values()))} if len(offered) == 1 else offered
    return found


def _offered(modules: Iterable[ModuleType], base: type) -> dict[str, type]:
    """The one concrete class derived from `base` of each module that has any, by the module's last name."""
    found: dict[str, type] = {}
    for module in modules:
        own = [
            value
            for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
            if not inspect.isabstract(value) and not name.startswith("_")
        ]
        if len(own) > 1:
            raise ConfigError(f"{module.__name__} must define one concrete {base.__name__}, it defines {own}")
        found |= {module.__name__.rpartition(".")[2]: each for each in own}
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
    known = options(package, base)
    if name not in known:
        if name.endswith(".py"):
            raise ConfigError(f"{name} names a file; name the class in it too, as {name}:Name")
        what = what or package.rpartition(".")[2].removesuffix("s")
        if what == "task" and name.endswith((".jsonl", ".json", ".parquet", ".csv")):
            raise ConfigError(f"task={name} names a file: give task=jsonl (or parquet) task.path={name}")
        stem, colon, own = name.partition(":")  # as Python's module:Name
        module = Path(f"{stem.replace('.', '/')}.py")
        hint = f"did you mean {module}:{own}? " if colon and module.is_file() else meant(name, known)
        raise ConfigError(
            f"there is no {what} named {name!r}; {hint}known: {', '.join(known)}; or give a class of your own as "
            "path/to/file.py:Name"
        )
    return known[name]


def find_class(package: str, name: str, base: type[T], what: str = "") -> type[T]:
    """As `find`, where only a class will do. Raises ConfigError for anything else, and for a class with gaps."""
    found = find(package, name, base, what)
    if not (inspect.isclass(found) and issubclass(found, base)):
        methods = " and ".join(sorted(getattr(base, "__abstractmethods__", ())))
        what = kind_of(found)
        if inspect.isfunction(found):
            what += f"; make it the method {methods} of one{getattr(base, 'or_function', '')}"
        raise ConfigError(f"{name} must be a class derived from {base.__module__}.{base.__name__}, it is {what}")
    check_methods(found, base, name)
    given = [field.name for field in dataclasses.fields(base)] if dataclasses.is_dataclass(base) else []
    try:
        inspect.signature(found).bind_partial(**dict.fromkeys(given))
    except TypeError:
        raise ConfigError(
            f"{name}: its __init__ does not take {', '.join(given)}, which every {base.__name__} does: leave it out and"
            " make the class a @dataclass, whose fields are its options"
        ) from None
    if inspect.isabstract(found):
        raise ConfigError(
            f"{name}: the class does not define {', '.join(sorted(cast(Any, found).__abstractmethods__))}"
        )
    return found


def kind_of(found: object) -> str:
    """What somebody's file has under a name, for messages: a class by what it is derived from, else its type."""
    if not inspect.isclass(found):
        return f"a {type(found).__name__}"
    bases = [base.__name__ for base in found.__bases__ if base is not object]
    return f"a class derived from {', '.join(bases)}" if bases else "a class of its own"


def check_methods(found: type, base: type, name: str) -> None:
    """Raise ConfigError where a method of `found`, which is called `name`, does not take what one of `base` does."""
    for method, expected in inspect.getmembers(base, inspect.isfunction):
        own = getattr(found, method)
        if method.startswith("_") or own is expected or not inspect.isfunction(own):
            continue
        parameters = inspect.signature(expected).parameters.values()
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        try:
            inspect.signature(own).bind(
                *[p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD], **dict.fromkeys(named)
            )
        except TypeError:
            has, takes = (", ".join(inspect.signature(each).parameters) for each in (own, expected))
            raise ConfigError(f"{name}: {method}({has}) must be {method}({takes}){place(own)}") from None


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once per process. Raises ConfigError when it is missing or breaks.

    The module's name says where the file is, so that what it defines can be unpickled in another process. What lies
    beside it can be imported from then on, behind all that could be before.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}{beside(path, '*.py')}")
    try:
        return importlib.import_module(f"{__name__}.{str(path).encode().hex()}")
    except (Exception, SystemExit) as error:  # it may be a script
        raise ConfigError(f"{path} cannot be imported: {explained(error)}") from error


DIGEST = "sha256:"  # before a digest
DIGESTED_BYTES = 4_000_000  # of a larger file its beginning and its size
digests: dict[str, str] = {}  # of the files of somebody's own that have been read, by their paths
_stamps: dict[str, tuple[int, int]] = {}  # the time and size that each had then


def digest(file: str | Path) -> None:
    """Keep a digest of `file`, by which a run that goes on knows whether it is the same. Raises OSError."""
    stamp = (status := os.stat(file)).st_mtime_ns, status.st_size
    if _stamps.get(str(file)) == stamp:
        return
    with open(file, "rb") as content:
        found = hashlib.sha256(content.read(DIGESTED_BYTES))
    if status.st_size > DIGESTED_BYTES:
        found.update(str(status.st_size).encode())
    _stamps[str(file)], digests[str(file)] = stamp, f"{DIGEST}{found.hexdigest()[:12]}"


class _FileFinder:
    """Finds the modules below this one: each name is the path of a file, in hexadecimal."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """The module `name`; None where it is not one of these. Called by Python's import."""
        parent, _, place = name.rpartition(".")
        if parent != __name__:
            return None
        file = bytes.fromhex(place).decode()
        if (folder := os.path.dirname(file)) not in sys.path:
            sys.path.append(folder)  # what lies beside it can be imported, as by a script
        digest(file)
        return importlib.util.spec_from_file_location(name, file)


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
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return said if where in said else said + where


def is_ours(part: object) -> bool:
    """Whether its class is none of the user's own code."""
    module = type(part).__module__
    return module.startswith("mtgrpo.") and not module.startswith(f"{__name__}.")


def of_own_code(error: BaseException) -> bool:
    """Whether it came from a user's own file, or is about what such a file gave."""
    return isinstance(error, MisgivenError) or bool(_way(error))


def keep_traceback(error: BaseException, folder: Path) -> None:
    """Write how it came to `error` into `folder`, as far as the disk has room."""
    with contextlib.suppress(OSError):
        (folder / TRACEBACK).write_text("".join(traceback.format_exception(error)), errors="backslashreplace")


def _way(error: BaseException) -> str:
    """The last place in a user's own file, which `load_file` has read, that it went through, as `place` has it."""
    frames = [step for link in (error.__cause__, error) if link for step in traceback.walk_tb(link.__traceback__)]
    own = [(f, line) for f, line in frames if str(f.f_globals.get("__name__")).startswith(f"{__name__}.")]
    return f" ({own[-1][0].f_code.co_filename}, line {own[-1][1]})" if own else ""
