"""Save, verify, find and prune checkpoints. Tensors are safetensors, the rest is JSON: nothing is ever unpickled.

checkpoints/step_000025/    model.safetensors, config.json, tokenizer files    a folder that `model.name=` takes
                            (LoRA: adapter_model.safetensors, adapter_config.json)
                            optimizer.safetensors                              the tensors of the training state
                            state.json                                         the rest; size and checksum of each file
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  (PathLike of what)
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtgrpo.errors import ConfigError, RunError
from mtgrpo.model.load import save_weights, saved_weights
from mtgrpo.model.value import FILE as VALUE_HEAD
from mtgrpo.runtime.files import put_whole, sync_all
from mtgrpo.runtime.resources import check_disk

STATE = "state.json"
_TENSORS = "optimizer.safetensors"
TRAINING_FILES = (STATE, _TENSORS, VALUE_HEAD)  # what no other library reads
_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"  # values that JSON has no type for, in `flatten`


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    step: int
    state: dict[str, Any]  # what JSON can hold
    files: Mapping[str, Any]  # size and checksum of each


class Snapshot(Protocol):
    """A copy of all that training goes on from, in the host's memory: training may go on while it is written."""

    @property
    def bytes(self) -> int: ...  # of its tensors
    def not_finite(self) -> str: ...  # the name of a tensor that is not finite; "" where all are
    def save(self, folder: Path) -> Any: ...  # writes tensors and the model's configuration; the rest, for JSON


class ModelSnapshot:
    """That of a model which is in this process."""

    def __init__(self, model: PreTrainedModel, training: Any, last: ModelSnapshot | None = None) -> None:
        """Copy the weights of `model`, which then gives its configuration alone, and `training` (see `flatten`).

        `last`: the one before, written by now. Its memory is used again: new memory takes longer to get than to fill.
        """
        tensors, self._rest = flatten(training)
        self._model = model
        self.weights = _copy(saved_weights(model), last.weights if last else {})
        self.tensors = _copy(tensors, last.tensors if last else {})

    @property
    def bytes(self) -> int:
        """See `Snapshot`, as all of these."""
        tensors = [*self.weights.values(), *self.tensors.values()]
        return sum({_place(tensor): tensor.nbytes for tensor in tensors}.values())

    def not_finite(self) -> str:
        named = [*self.weights.items(), *self.tensors.items()]
        return next((name for name, tensor in named if not tensor.isfinite().all()), "")

    def save(self, folder: Path) -> Any:
        save_weights(self._model, folder, self.weights)
        save_file(self.tensors, folder / _TENSORS)
        return self._rest


def read_training(path: Path) -> Any:
    """What training goes on from in checkpoint `path`, beside the weights; its tensors are on the CPU."""
    return unflatten(load_file(path / _TENSORS), json.loads((path / STATE).read_bytes())["training"])


def tokenizer_files(tokenizer: PreTrainedTokenizerFast) -> dict[str, bytes]:
    """The files of a tokenizer with its chat template, for all checkpoints of a run."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def write(
    folder: Path,
    step: int,
    snapshot: Snapshot,
    state: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
    keep_last: int = 0,
    best: Collection[int] = (),
) -> Path:
    """Write `checkpoints/step_<step>` in the run's `folder`, then remove all but the newest `keep_last` (0 = none).

    Those of the steps `best` stay too. The checkpoint appears whole or not at all, whenever the process dies; one of
    the same step is replaced. One is written at a time. state: of the run, for JSON.

    Raises RunError, before anything is written, when a tensor is not finite or the disk is too full.
    """
    if name := snapshot.not_finite():
        raise RunError(f"after step {step} {name} is not finite: not saved; older checkpoints stay")
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for leftover in (*checkpoints.glob(".step_*"), *checkpoints.glob("step_*.replaced")):
        if leftover not in _by_step(checkpoints).values():
            shutil.rmtree(leftover)
    check_disk(checkpoints, snapshot.bytes)
    target = checkpoints / f"step_{step:06d}"
    replaced = target.with_name(f"{target.name}.replaced")
    with put_whole(target) as partial:
        partial.mkdir()
        training = snapshot.save(partial)
        for name, content in tokenizer.items():
            (partial / name).write_bytes(content)
        paths = sorted(partial.iterdir())
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
        record = {"step": step, "state": dict(state), "training": training, "files": files}
        (partial / STATE).write_text(json.dumps({"sha256": _digest(record), **record}, indent=1))
        if target.exists():  # no folder can be renamed onto another; `_by_step` gives this one while there is no other
            sync_all(partial)  # so that there is none of this name for a moment only
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(checkpoints, keep_last, {step, *best})
    return target


def newest(folder: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The whole checkpoint of the highest step in the run's `folder`, or None where there is none at all.

    A damaged one is noted and put aside as `damaged_step_<step>`. Raises ConfigError where all are damaged.
    """
    by_step = _by_step(folder / "checkpoints")
    for step in sorted(by_step, reverse=True):
        try:
            return read(by_step[step])
        except ConfigError as error:
            aside = by_step[step].with_name(f"damaged_step_{step:06d}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(by_step[step], aside)
            note(f"{error}; it is now {aside.name}, and the one before it is taken")
    if by_step:
        raise ConfigError(f"every checkpoint in {folder / 'checkpoints'} is damaged: begin anew in another folder")
    return None


def read(path: Path) -> Checkpoint:
    """Checkpoint `path`, every file of which has its size and SHA-256.

    Raises ConfigError that names the first file which is missing or damaged.
    """
    try:
        content = json.loads((path / STATE).read_bytes())
        digest = content.pop("sha256")
        files = {name: (expected["bytes"], expected["sha256"]) for name, expected in content["files"].items()}
        step, state, _ = int(content["step"]), dict(content["state"]), content["training"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path} is not a checkpoint: it has no {STATE}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damage(path / STATE, "it cannot be read") from error
    if digest != _digest(content):
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
            if _sha256(file) != checksum:
                raise _damage(file, "its checksum differs")
        except OSError as error:
            raise _damage(file, f"it cannot be read ({error})") from error
    return Checkpoint(path, step, state, content["files"])


def flatten(state_dict: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts, lists and tuples into tensors by name and a rest that JSON can hold; see `unflatten`.

    The tensors are those of `state_dict`, not copies; one that is there twice is named once. Raises TypeError for a
    leaf that is neither tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    paths: dict[tuple[Any, ...], str] = {}

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if path in tensors:
                raise TypeError(f"two tensors are called {path}")
            first = paths.setdefault(_place(value), path)
            if first == path:
                tensors[path] = value
            return {_TENSOR: first}
        if isinstance(value, dict):
            items = [(key, encode(inner, f"{path}/{key}".lstrip("/"))) for key, inner in cast("Any", value).items()]
            plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
            return dict(items) if plain else {_ITEMS: [[encode(key, path), inner] for key, inner in items]}
        if isinstance(value, list | tuple):
            parts = [encode(inner, f"{path}/{i}".lstrip("/")) for i, inner in enumerate(cast("list[Any]", value))]
            return {_TUPLE: parts} if isinstance(value, tuple) else parts
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{path or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold")

    return tensors, encode(state_dict, "")


def unflatten(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """The inverse of `flatten`, exact also after `rest` went through JSON and the tensors through a file."""
    if isinstance(rest, list):
        return [unflatten(tensors, inner) for inner in cast("list[Any]", rest)]
    if not isinstance(rest, dict):
        return rest
    value = cast("dict[str, Any]", rest)
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unflatten(tensors, inner) for inner in value[_TUPLE])
    if _ITEMS in value:
        return {unflatten(tensors, key): unflatten(tensors, inner) for key, inner in value[_ITEMS]}
    return {key: unflatten(tensors, inner) for key, inner in value.items()}


def _copy(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, where it fits in the memory of `into`; what is the same memory, as tied weights are, still is."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, tensor in tensors.items():
        if (place := _place(tensor)) not in copies:
            old = into.get(name)
            if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
                old = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[place] = old.copy_(tensor.detach())
    return {name: copies[_place(tensor)] for name, tensor in tensors.items()}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same memory."""
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def _by_step(checkpoints: Path) -> dict[int, Path]:
    by_step: dict[int, Path] = {}
    for path in sorted(checkpoints.glob("step_*"), reverse=True):  # step_N comes after step_N.replaced, and so wins
        match = re.fullmatch(r"step_(\d+)(\.replaced)?", path.name)
        if match and path.is_dir():
            by_step[int(match[1])] = path
    return by_step


def _prune(checkpoints: Path, keep_last: int, keep: set[int]) -> None:
    by_step = _by_step(checkpoints)
    for step in sorted(set(sorted(by_step)[:-keep_last] if keep_last else []) - keep):
        hidden = checkpoints / f".{by_step[step].name}.removed"
        os.replace(by_step[step], hidden)  # gone at once: a half-removed checkpoint is never seen
        shutil.rmtree(hidden)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _damage(file: Path, how: str) -> ConfigError:
    return ConfigError(f"the checkpoint is damaged: {file}: {how}; use another checkpoint")
