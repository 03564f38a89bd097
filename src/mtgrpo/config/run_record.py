"""The folder of a run, and the record in it of its configuration, which an evaluation takes up again.

The record may be somebody else's.
"""

from __future__ import annotations

import fcntl
import itertools
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.config.options import groups
from mtgrpo.config.recipe import Recipe, read_yaml
from mtgrpo.engines.server import PYTHON
from mtgrpo.errors import ConfigError

LOCK = ".lock"  # in the folder of a run
RUN_PROGRAMS = ("mcp", "verifiers")  # a tool, an agent and tasks that run what their settings name
_RESOLVER = re.compile(r"\$\{[^}]*:")


def read_run(folder: Path, trusted: bool = False) -> Recipe:
    """What a run used, from the record that it keeps in its folder; what it gave Hydra is left out.

    trusted: the record may name Python files, commands and MCP servers, which will be run, and resolvers such as
    ${oc.env:KEY}.
    Raises ConfigError.
    """
    try:
        chosen = read_yaml(folder / ".hydra" / "hydra.yaml")["hydra"]["runtime"]["choices"]
        choices = {key: chosen[key] for key in (*groups(), "recipe")}
    except (KeyError, TypeError) as error:
        what = error if isinstance(error, KeyError) else "'choices'"
        raise ConfigError(
            f"the record of run {folder} lacks {what}: another version of mtgrpo wrote it, and that one can read it"
        ) from error
    content = read_yaml(folder / ".hydra" / "config.yaml")
    # Its sinks may send to servers of somebody else.
    values = {key: value for key, value in content.items() if str(key).partition(".")[0] not in ("hydra", "log")}
    resolved = _resolved(values)
    # What is still to be resolved may become the name of a file, so it counts as one.
    texts = set(_texts([choices, resolved]))
    named = sorted(text for text in texts if text in RUN_PROGRAMS or ".py:" in text or "${" in text)
    if choices["agent"] == "command":
        named.append(f"agent=command with {content.get('agent')!r:.200}")
    named += _programs(values)
    if named and not trusted:
        raise ConfigError(
            f"the record of run {folder} names code or values of this machine, which would be executed or read: "
            f"{', '.join(named)}; "
            "where you trust it, add trust_code=true"
        )
    return Recipe(f"run {folder}", choices, values if named else resolved)


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The values without interpolations, or as they are where one needs what is not there, or this machine's secrets.

    A resolver such as ${oc.env:KEY} would put what it finds into the record of the new run.
    """
    if any(_RESOLVER.search(text) for text in _texts(values)):
        return values
    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(values), resolve=True))
    except OmegaConfBaseException:
        return values


def _programs(value: Any, name: str = "") -> Iterator[str]:
    """Settings that start a program, ask a server or open a sandbox, where they are not the defaults."""
    if isinstance(value, dict):
        held = cast("dict[str, Any]", value)
        usual = {"engine": {"python": PYTHON}, "sandbox": {"kind": "bubblewrap", "python": "python3"}}.get(name, {})
        risky = {"engine": ("python", "arguments", "url"), "sandbox": ("kind", "url", "python", "folders")}.get(
            name, ()
        )
        yield from (f"{name}.{key}={held[key]}" for key in risky if held.get(key) and held[key] != usual.get(key))
        for key, inner in held.items():
            yield from _programs(inner, str(key).rpartition(".")[2])
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _programs(each)


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested values, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        held = cast("dict[Any, Any]", value)
        for each in (*held, *held.values()):
            yield from _texts(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)


def checkpoint_folder(given: str, place: Path | None = None) -> Path:
    """The folder that `checkpoint=` names; a relative one is looked for in `place`, by default the working folder.

    Raises ConfigError where it is none, or lies in no run's folder.
    """
    path = ((place or Path()) / Path(given).expanduser()).resolve()
    if not path.is_dir():
        raise ConfigError(f"checkpoint={given}: there is no folder {path}")
    if saved := sorted((path / "checkpoints").glob("step_*")):
        raise ConfigError(f"checkpoint={given} is a run; its last checkpoint is checkpoint={saved[-1]}")
    if not (path.parent.parent / ".hydra" / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint={given}: {path.parent.parent} holds no .hydra/config.yaml; "
            "a checkpoint is measured where its run left it, as RUN/checkpoints/step_000070"
        )
    return path


def _begun(place: Path) -> bool:
    """Whether a folder that is there is that of a run, or empty."""
    held = {path.name for path in place.iterdir()} - {LOCK}
    return not held or bool(held & {".hydra", "versions.json"})


@contextmanager
def claimed(folder: Path, chosen: bool, resumed: bool = False) -> Generator[Path]:
    """The folder of a run, made where it is not there, and while it runs locked against other processes.

    A `chosen` one may be there and empty, for a run that is `resumed` not empty. Another one gets a number behind its
    name where it is taken. Raises ConfigError.
    """
    if resumed and not chosen:
        raise ConfigError("resume=true goes on in the folder of a run: add hydra.run.dir=FOLDER (or hydra.sweep.dir)")
    for number in itertools.count():
        place = folder.with_name(f"{folder.name}-{number}") if number else folder
        try:
            place.mkdir(parents=True)
        except FileExistsError as error:
            if chosen and (not place.is_dir() or (not resumed and any(path.name != LOCK for path in place.iterdir()))):
                raise ConfigError(
                    f"the folder {place} is not empty: a run needs one of its own, or resume=true to go on with it"
                ) from error
            if not chosen:
                continue
            if resumed and not _begun(place):
                raise ConfigError(
                    f"the folder {place} holds other things and no run: resume=true goes on in the folder of a run, or "
                    "begins in an empty one"
                ) from error
        except OSError as error:
            raise ConfigError(f"cannot make the run's folder {error.filename}: {error.strerror}") from error
        with (place / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another process runs in {place}: wait for its end, or end it") from error
            yield place
        return
