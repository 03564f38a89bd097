"""The folder of a run, and the record in it of its configuration, which an evaluation takes up again.

The record may be somebody else's.
"""

import contextlib
import fcntl
import itertools
import shutil
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtgrpo.config.experiment import groups
from mtgrpo.config.recipe import Recipe, as_settings, read_mapping
from mtgrpo.config.trust import RECORD, refused, resolved, signed
from mtgrpo.errors import ConfigError
from mtgrpo.record.reading import LOCK, last_written, own_file
from mtgrpo.runtime.plain_yaml import read_bounded
from mtgrpo.weights.saved import find_steps, newest_of

CHECKPOINTS = "checkpoints/step_*"
MEASURED = "journal.json"  # in the folder of an evaluation: the settings with which it began
LEFT_OUT = {"hydra", "log", "resume", "resume_mode", "devices", "parallel"}
UNUSED = (".hydra", LOCK, "notes.txt", "versions.json")  # what a run leaves that has not begun


def read_run(folder: Path, trusted: bool = False, given: Mapping[str, Any] | None = None) -> Recipe:
    """What a run used, from the record in its folder, but for Hydra, sinks, devices and where it went on.

    trusted: the record may reach whatever it names, as one may that this user's own run has signed. given: what the
    reader typed, by key: it stands in place of the record's, which then counts for nothing. Raises ConfigError.
    """
    contents = [_content(folder, name) for name in RECORD]
    content, hydra = (read_mapping(text, folder / ".hydra" / name) for text, name in zip(contents, RECORD, strict=True))
    try:
        chosen = hydra["hydra"]["runtime"]["choices"]
        choices = {key: chosen[key] for key in (*groups(), "recipe") if key not in LEFT_OUT}
    except (KeyError, TypeError) as error:
        what = error if isinstance(error, KeyError) else "'choices'"
        raise ConfigError(
            f"the record of run {folder} lacks {what}: another version of mtgrpo wrote it, and that one can read it"
        ) from error
    for group, choice in choices.items():
        names = choice if isinstance(choice, list) else [choice]
        if not all(isinstance(name, str) and name.isprintable() for name in names):
            raise ConfigError(f"the record of run {folder} chooses no {group} by its name, but {choice!r:.200}")
    if not trusted and not signed(folder, contents):
        typed = dict(given or {})
        other = {group for group in choices if group in typed and typed[group] != choices[group]}
        choices = {key: choice for key, choice in choices.items() if key not in other}
        content = resolved(_without(content, LEFT_OUT | other), content)
        if wanted := refused({key: choices[key] for key in groups() if key in choices}, content, typed):
            raise ConfigError(
                f"the record of run {folder}, which you did not make here, wants to reach what a record may not: "
                f"{wanted}; type these settings yourself, or, where you trust it, add trust_code=true"
            )
    return Recipe(f"run {folder}", choices, as_settings(_without(content, LEFT_OUT), folder))


def is_own(folder: Path) -> bool:
    """Whether this user's own run wrote the record in `folder`."""
    try:
        return signed(folder, [_content(folder, name) for name in RECORD])
    except ConfigError:
        return False


def started_in(folder: Path) -> str:
    """The folder in which the run in `folder` was started, to which its record's names are relative; "" = not known."""
    try:
        return str(read_mapping(_content(folder, "hydra.yaml"), folder)["hydra"]["runtime"]["cwd"])
    except (ConfigError, KeyError, TypeError):
        return ""


def _without(values: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if str(key).partition(".")[0] not in sections}


def _content(folder: Path, name: str) -> bytes:
    """A file of the record. Raises ConfigError where it is no file in the run's folder, or larger than a record is."""
    path = folder / ".hydra" / name
    if path.resolve() != folder.resolve() / ".hydra" / name or (path.exists() and not path.is_file()):
        raise ConfigError(f"{path} is a link or no file: a record is read from the run's own folder")
    return read_bounded(path)


def checkpoint_folder(given: str) -> Path:
    """The folder that `checkpoint=` names, of a run the newest. Raises ConfigError where it is none, or in no run's."""
    path = (last_written(CHECKPOINTS) if given == "latest" else Path(given)).expanduser().resolve()
    if not path.is_dir():
        there = ", ".join(one.name for one in find_steps(path.parent).values())
        raise ConfigError(f"checkpoint={given}: there is no folder {path}{there and f'; beside it are {there}'}")
    path = newest_of(path) or path
    if (path / ".hydra" / "config.yaml").is_file():
        raise ConfigError(f"checkpoint={given} is a run without a checkpoint; with resume=true it makes them anew")
    if not (path.parent.parent / ".hydra" / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint={given}: {path.parent.parent} holds no .hydra/config.yaml; "
            "a checkpoint is measured where its run left it, as RUN/checkpoints/step_000025, and a model of elsewhere, "
            f"as an exported one, by model.name={given} and the recipe of its training"
        )
    return path


def found_in(folder: Path, chosen: bool, resumed: bool) -> set[str]:
    """The names in the folder that a run is to have, as of `claimed`. Raises ConfigError where it cannot have it."""
    if resumed and not chosen:
        raise ConfigError("resume=true goes on in the folder of a run: add hydra.run.dir=FOLDER (or hydra.sweep.dir)")
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{nearest} is a file: name the run's folder otherwise")
    held = {path.name for path in folder.iterdir()} - {LOCK} if chosen and folder.is_dir() else set[str]()
    if held and not resumed:
        raise ConfigError(
            f"the folder {folder} is not empty: a run needs one of its own, or resume=true to go on with it"
        )
    if held.isdisjoint({".hydra", "versions.json", "multirun.yaml"}) and held:
        raise ConfigError(
            f"the folder {folder} holds other things and no run: resume=true goes on in the folder of a run, or begins "
            "in an empty one"
        )
    for path in (*folder.glob("*"), *folder.glob("*/*")) if chosen else ():  # as deep as a run writes to what is there
        name = path.relative_to(folder)
        large = path.parent.name == "checkpoints" or (path.name == "checkpoints" and is_own(path.parent))
        if path.is_symlink() and not large:  # single checkpoints are replaced whole
            own_file(folder, str(name))
    return held


@contextmanager
def claimed(folder: Path, chosen: bool, resumed: bool = False) -> Generator[Path]:
    """The folder of a run, made where it is not there, and while it runs locked against other processes.

    A `chosen` one may be there and empty, for a run that is `resumed` not empty. Another one gets a number behind its
    name where it is taken. Of a run that is refused within, with a ConfigError, nothing is left. Raises ConfigError.
    """
    held = found_in(folder, chosen, resumed)
    for number in itertools.count():
        place = folder.with_name(f"{folder.name}-{number}") if number else folder
        new = [path for path in place.parents if not path.exists()]
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            if not chosen:
                continue
        except OSError as error:
            raise ConfigError(f"cannot make the run's folder {error.filename}: {error.strerror}") from error
        with (place / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another process runs in {place}: wait for its end, or end it") from error
            try:
                yield place
            except ConfigError:
                files = [path for path in place.rglob("*") if path.is_file() and path.stat().st_size]
                if not held and all(path.relative_to(place).parts[0] in UNUSED for path in files):
                    for path in place.iterdir():
                        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                    with contextlib.suppress(OSError):  # it is a link, or another run is in a folder above
                        for one in (place, *new):
                            one.rmdir()
                raise
        return
