"""What the record of a run would reach on this machine, and whether a run of this user wrote it.

Every setting declares what it reaches (`mtgrpo.parts.Reach`); a record is walked with these declarations.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import inspect
import os
import re
import secrets
import stat
import tempfile
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.options import chosen_class, options
from mtgrpo.parts import Parts, Reach, Where, extension
from mtgrpo.tools import Tool

SIGNATURE = "signature"  # beside the files of the record
RECORD = ("config.yaml", "hydra.yaml")
SHOWN = 20  # of what a record wants to reach
SHOWN_CHARS = 80  # of each value
_KEY_BYTES = 32
UNKNOWN = "unknown"  # a name or a shape that nobody declared
_HELD = {"task": ("task", "weight"), "reward": ("weight",)}  # in the settings of a part, by its kind
_REFERS = "${"
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")


def declared(hint: Any) -> list[Reach | Where | Parts]:
    """What the type of a setting says that it reaches; of a list or mapping what its entries do."""
    own = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Reach | Where | Parts)]
    return own or [mark for part in typing.get_args(hint) for mark in declared(part)]


def undeclared(hint: Any) -> bool:
    """Whether a setting of this type should say what it reaches and does not: numbers, flags and enums need not."""
    if any(isinstance(mark, Reach | Where | Parts) for mark in getattr(hint, "__metadata__", ())):
        return False
    if parts := typing.get_args(hint):
        return any(map(undeclared, parts[typing.get_origin(hint) is dict :]))  # of a mapping its values
    return hint not in (int, float, bool, type(None)) and not (inspect.isclass(hint) and issubclass(hint, Enum))


def resolved(values: Any, root: Mapping[str, Any]) -> Any:
    """The values with what `${section.setting}` stands for, where that is a number or a text; the rest as it is."""
    if isinstance(values, dict):
        return {key: resolved(value, root) for key, value in cast("dict[str, Any]", values).items()}
    if isinstance(values, list):
        return [resolved(value, root) for value in cast("list[Any]", values)]
    found: Any = root
    for name in named[1].split(".") if (named := _REFERENCE.fullmatch(str(values))) else ():
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found if named and isinstance(found, int | float | str) and _REFERS not in str(found) else values


def refused(choices: Mapping[str, Any], values: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What a record wants that needs trust, printable on one line; "" = nothing.

    choices: the options of groups. values: the settings, as `resolved` gives them. given: what the reader typed, by
    key, None where something else takes the place of a setting; where he chose another option of a group, the record's
    `choices` and `values` must lack it.
    """
    found = list(_Walk(choices, given).record(values))
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "; ".join([*found[:SHOWN], *more])


def _said(key: str, reaches: str, value: Any) -> str:
    """Printable, for repr spells out what terminals obey."""
    key, spelled = repr(key)[1:-1], repr(value)
    return f"{key[:SHOWN_CHARS]}={spelled[:SHOWN_CHARS]}{'...' * (len(spelled) > SHOWN_CHARS)} ({reaches})"


class _Walk:
    """Walks a record and says what it wants to reach."""

    def __init__(self, choices: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._choices = choices
        self._chosen = {key for key in given if key in groups()}
        self._given = {key: value for key, value in given.items() if key not in self._chosen}

    def record(self, values: Mapping[str, Any]) -> Iterator[str]:
        """All of it."""
        classes: dict[str, type] = {}
        for group, choice in self._choices.items():
            names: list[Any] = choice if isinstance(choice, list) else [choice]
            strange = [name for name in names if group not in self._chosen and name not in options(group)]
            for name in strange:
                yield _said(group, _kind_of(name), name)
            if strange:
                values = {key: value for key, value in values.items() if str(key).partition(".")[0] != group}
            else:
                classes[group] = chosen_class(group, choice)
            if isinstance(choice, list):  # a record has the settings of each in `of`
                moved = {key: value for key, value in self._given.items() if key.startswith(f"{group}.")}
                self._given |= {f"{group}.of{key.removeprefix(group)}": value for key, value in moved.items()}
        yield from self._section(Experiment, {**dict.fromkeys(classes), **values}, "", classes)

    def _section(
        self, cls: type, values: Any, path: str, classes: Mapping[str, type] | None = None, also: Sequence[str] = ()
    ) -> Iterator[str]:
        """The settings of a dataclass, and what it reaches by being chosen.

        classes: of its fields that are groups, without those that are refused.
        also: the names of plain values that belong to whoever holds the part.
        """
        place = path.removesuffix(".")
        if (chosen := getattr(cls, "reaches", Reach.nothing)) is not Reach.nothing and place not in self._chosen:
            yield _said(place, chosen.value, cls.__name__)
        if not isinstance(values, dict | None):
            yield _said(place, UNKNOWN, values)
            return
        hints = typing.get_type_hints(cls, include_extras=True) | dict(classes or {})
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key, value in cast("dict[Any, Any]", values or {}).items():
            name, dot, rest = str(key).partition(".")
            inner: Any = {rest: value} if dot else value
            if not isinstance(key, str) or name not in {*fields, *also} or (name in also and not _plain(inner)):
                yield _said(f"{path}{key}", UNKNOWN, value)
            elif name in fields:
                yield from self._setting(hints[name], inner, f"{path}{name}", _default(fields[name]))

    def _setting(self, hint: Any, value: Any, path: str, default: Any) -> Iterator[str]:
        section, refers = dataclasses.is_dataclass(hint), any(_REFERS in str(each) for each in scalars(value))
        typed = self._given.get(path)
        if path in self._given and not (typed is None and refers):  # what is not typed may still be shown
            if not section or not isinstance(typed, dict):
                return
            self._given |= {f"{path}.{key}": inner for key, inner in cast("dict[str, Any]", typed).items()}
        if section:
            yield from self._section(cast(type, hint), value, f"{path}.")
        elif undeclared(hint) or refers:
            yield _said(path, Reach.secret.value if not undeclared(hint) else UNKNOWN, value)
        elif value != default:
            for mark in declared(hint):
                if isinstance(mark, Parts):
                    yield from self._parts(mark.kind, value, path)
                elif isinstance(mark, Where):
                    if any(re.match(mark.begins, str(each)) for each in scalars(value)):
                        yield _said(path, mark.reach.value, value)
                elif mark is not Reach.nothing:
                    yield _said(path, mark.value, value)

    def _parts(self, kind: str, value: Any, path: str) -> Iterator[str]:
        """Entries that name parts: a list of names, a mapping from names to settings, or a list of mappings."""
        known = extension.options("mtgrpo.tools", Tool) if kind == "tool" else options(kind)
        if not isinstance(value, list | dict):
            yield _said(path, UNKNOWN, value)
            return
        held = cast("list[Any] | dict[Any, Any]", value)
        for number, entry in enumerate(held):
            settings: Any = held[entry] if isinstance(held, dict) else entry if isinstance(entry, dict) else None
            name = f"{path}.{number if isinstance(entry, dict) else entry}"
            named: Any = settings.get("task", entry) if kind == "task" and isinstance(settings, dict) else entry
            if name in self._given:
                continue
            if not isinstance(named, str) or named not in known:
                yield _said(name, _kind_of(named), settings or named)
            else:
                yield from self._section(known[named], settings, f"{name}.", also=_HELD.get(kind, ()))


def _kind_of(option: Any) -> str:
    return Reach.code.value if isinstance(option, str) and ".py:" in option else UNKNOWN


def _plain(value: Any) -> bool:
    return not isinstance(value, dict | list) and _REFERS not in str(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    """As a record has it."""
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return made.name if isinstance(made, Enum) else made


def scalars(value: Any) -> Iterator[Any]:
    """All that is in nested values, keys too."""
    if isinstance(value, dict | list):
        held = cast("dict[Any, Any] | list[Any]", value)
        for each in (*held, *held.values()) if isinstance(held, dict) else held:
            yield from scalars(each)
    else:
        yield value


# --- whose run it is


def sign(folder: Path) -> None:
    """Sign the record in the folder of a run with this user's key, which is made where there is none.

    A record stays without a signature, and its reader has to trust it, where no key can be kept.
    """
    record = folder / ".hydra"
    with contextlib.suppress(OSError, RuntimeError):
        if all((record / name).is_file() for name in RECORD) and (key := _key() or _made_key()):
            (record / SIGNATURE).write_text(_signature(key, [(record / name).read_bytes() for name in RECORD]))


def signed(folder: Path, contents: list[bytes]) -> bool:
    """Whether this user signed the `contents` of a record's files, in the folder of a run."""
    try:
        with (folder / ".hydra" / SIGNATURE).open("rb") as file:
            given = file.read(100)
    except OSError:
        return False
    key = _key()
    return bool(key) and hmac.compare_digest(given, _signature(key, contents).encode())


def _signature(key: bytes, contents: list[bytes]) -> str:
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    return hmac.new(key, digests, hashlib.sha256).hexdigest()


def _key_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mtgrpo" / "key"


def _key() -> bytes:
    """This user's key; b"" where there is none that this user alone can read."""
    try:
        with _key_file().open("rb") as file:
            held, key = os.fstat(file.fileno()), file.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):  # also where there is no home
        return b""
    own = held.st_uid == os.getuid() and not stat.S_IMODE(held.st_mode) & 0o077
    return key if own and len(key) == _KEY_BYTES else b""


def _made_key() -> bytes:
    """A new key in its file, or that of another process which made it meanwhile. Raises OSError."""
    place = _key_file()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            Path(place).hardlink_to(name)
    finally:
        Path(name).unlink()
    return _key()
