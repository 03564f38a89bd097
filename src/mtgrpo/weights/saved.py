"""Checkpoints on disk: find the newest, verify every file of one. Nothing of torch is needed for that.

`checkpoint.py` says what is in the folder of one, and writes it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.model.settings import VALUE_HEAD

STATE, TENSORS, REFERENCE = "state.json", "optimizer.safetensors", "reference.safetensors"
NO_REFERENCE = "kl.coef was 0, so the reference was not kept: resume with kl.coef=0, or begin anew"
TRAINING_FILES = (STATE, TENSORS, REFERENCE, VALUE_HEAD)  # what no other library reads
_ABSENT = (FileNotFoundError, NotADirectoryError)  # other errors of a disk may pass


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    step: int
    state: dict[str, Any]  # what JSON can hold
    files: Mapping[str, Any]  # size and checksum of each
    has_reference: bool  # of a KL penalty


def find_newest(folder: Path, note: Callable[[str], None], looks: bool = False) -> Checkpoint | None:
    """The whole checkpoint of the highest step in the run's `folder`, or None where there is none at all.

    A damaged one is noted and put aside as `damaged_step_<step>`. Raises ConfigError where all are damaged, and where
    the disk does not give what is there. looks: no checksum is compared, nothing noted and nothing put aside.
    """
    by_step = find_steps(folder / "checkpoints")
    for step in sorted(by_step, reverse=True):
        try:
            return read_checkpoint(by_step[step], verify=not looks)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, _ABSENT):
                raise  # nothing is known of it
            if looks:
                continue
            aside = by_step[step].with_name(f"damaged_step_{step:06d}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(by_step[step], aside)
            note(f"{str(error).partition('; use another')[0]}; it is now {aside.name}, and the one before it is taken")
    if by_step or any((folder / "checkpoints").glob("damaged_step_*")):
        raise ConfigError(f"every checkpoint in {folder / 'checkpoints'} is damaged: begin anew in another folder")
    return None


def read_checkpoint(path: Path, verify: bool = True) -> Checkpoint:
    """Checkpoint `path`, every file of which has its size and, where it is to `verify`, its SHA-256.

    Raises ConfigError that names the first file which is missing or damaged.
    """
    try:
        content = json.loads((path / STATE).read_bytes())
        digest = content.pop("sha256")
        files = {name: (expected["bytes"], expected["sha256"]) for name, expected in content["files"].items()}
        step, state = int(content["step"]), dict(content["state"])
        has_reference = bool(content["training"].get("reference"))
    except _ABSENT as error:
        there = ", ".join(sorted(one.name for one in path.parent.glob("step_*"))) or "no checkpoints"
        what = f"it has no {STATE}" if path.is_dir() else f"there is no such folder; beside it are {there}"
        if newest := newest_of(path):
            what = f"it is a run; its newest is {newest}"
        raise ConfigError(f"{path} is not a checkpoint: {what}") from error
    except OSError as error:
        raise _unread(path / STATE, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damage(path / STATE, "it cannot be read") from error
    if digest != digest_of(content):
        raise _damage(path / STATE, "its checksum differs")
    for name, (size, checksum) in files.items():
        file = path / name
        if Path(name).name != name:
            raise _damage(path / STATE, f"it names the file {name!r}, which is not in its folder")
        if not file.is_file():
            raise _damage(file, "it is missing")
        try:
            if file.stat().st_size != size:
                raise _damage(file, f"it has {file.stat().st_size} bytes instead of {size}")
            if verify and sha256_of(file) != checksum:
                raise _damage(file, "its checksum differs")
        except OSError as error:
            raise _unread(file, error) from error
    return Checkpoint(path, step, state, content["files"], has_reference)


def find_steps(checkpoints: Path) -> dict[int, Path]:
    """The folder of each step among `checkpoints`, whole or not."""
    by_step: dict[int, Path] = {}
    for path in sorted(checkpoints.glob("step_*"), reverse=True):  # step_N comes after step_N.replaced, and so wins
        match = re.fullmatch(r"step_(\d+)(\.replaced)?", path.name)
        if match and path.is_dir():
            by_step[int(match[1])] = path
    return by_step


def newest_of(run: Path) -> Path | None:
    """The folder of the highest step that a run, or its folder of checkpoints, has, whole or not, if any."""
    folder = run if run.name == "checkpoints" else run / "checkpoints"
    return max(find_steps(folder).items(), default=(0, None))[1]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of what a state file says."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _unread(file: Path, error: OSError) -> ConfigError:
    cure = f"try again, or put {file.parent.name} elsewhere to use another checkpoint"
    return ConfigError(f"the checkpoint cannot be read now: {file}: {error.strerror or error}; {cure}")


def _damage(file: Path, how: str) -> ConfigError:
    return ConfigError(f"the checkpoint is damaged: {file}: {how}; use another checkpoint")
