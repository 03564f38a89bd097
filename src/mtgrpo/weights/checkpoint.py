"""Save and prune checkpoints, which `saved.py` finds. Tensors are safetensors, the rest is JSON: nothing is unpickled.

checkpoints/step_000025/    model.safetensors, config.json, tokenizer files    a folder that `model.name=` takes
                            (LoRA: adapter_model.safetensors, adapter_config.json)
                            optimizer.safetensors                              the tensors of the training state
                            reference.safetensors                              of a reference on devices of its own
                            state.json                                         the rest; size and checksum of each file
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import ChainMap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  (PathLike of what)
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtgrpo.errors import RunError
from mtgrpo.model.load import save_weights, saved_weights
from mtgrpo.model.sharding import local_part, whole
from mtgrpo.runtime.files import put_whole, sync_all
from mtgrpo.runtime.resources import check_disk
from mtgrpo.weights.saved import REFERENCE, STATE, TENSORS, digest_of, find_steps, sha256_of

_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"  # values that JSON has no type for, in `flatten`


class Snapshot(Protocol):
    """A copy of all that training goes on from, in the host's memory: training may go on while it is written."""

    @property
    def bytes(self) -> int: ...  # of its tensors
    def not_finite(self) -> str: ...  # the name of a tensor that is not finite; "" where all are
    def save(self, folder: Path) -> Any: ...  # writes tensors and the model's configuration; the rest, for JSON


class ModelSnapshot:
    """That of a model which is in this process."""

    def __init__(
        self, model: PreTrainedModel, training: Any, last: ModelSnapshot | None = None, writes: bool = True
    ) -> None:
        """Copy the weights of `model`, which then gives its configuration alone, and `training` (see `flatten`).

        `last`: the one before, written by now. Its memory is used again: new memory takes longer to get than to fill.
        Of sharded tensors all ranks gather one after the other, and the rank that `writes` keeps the copies.
        """
        tensors, self._rest = flatten(training)
        self._model, self._writes = model, writes
        self.weights = _copy(saved_weights(model), last.weights if last else {}, writes)
        self.tensors = _copy(tensors, last.tensors if last else {}, writes)

    @property
    def bytes(self) -> int:
        """See `Snapshot`, as all of these."""
        tensors = [*self.weights.values(), *self.tensors.values()]
        return sum({_place(tensor): tensor.nbytes for tensor in tensors}.values())

    def not_finite(self) -> str:
        named = [*self.weights.items(), *self.tensors.items()]
        return next((name for name, tensor in named if not tensor.isfinite().all()), "")

    def save(self, folder: Path) -> Any:
        if not self._writes:
            return None
        save_weights(self._model, folder, self.weights)
        save_file(self.tensors, folder / TENSORS)
        return self._rest

    def save_reference(self, folder: Path) -> Any:
        """Write the weights that are trained as those of the reference of a KL penalty; the rest as `save`."""
        trained = {name for name, weight in self._model.named_parameters() if weight.requires_grad}
        tensors, rest = flatten({"reference": {n: w for n, w in self.weights.items() if n in trained}})
        if self._writes:
            save_file(tensors, folder / REFERENCE)
        return rest


def read_training(path: Path) -> Any:
    """What training goes on from in checkpoint `path`, beside the weights; its tensors are on the CPU."""
    tensors = [load_file(path / name) for name in (TENSORS, REFERENCE) if (path / name).is_file()]
    return unflatten(dict(ChainMap(*tensors)), json.loads((path / STATE).read_bytes())["training"])


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
        if leftover not in find_steps(checkpoints).values():
            _remove(leftover)
    check_disk(checkpoints, snapshot.bytes)
    target = checkpoints / f"step_{step:06d}"
    replaced = target.with_name(f"{target.name}.replaced")
    with put_whole(target) as partial:
        partial.mkdir()
        training = snapshot.save(partial)
        for name, content in tokenizer.items():
            (partial / name).write_bytes(content)
        paths = sorted(partial.iterdir())
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
        record = {"step": step, "state": dict(state), "training": training, "files": files}
        (partial / STATE).write_text(json.dumps({"sha256": digest_of(record), **record}, indent=1))
        if target.exists():  # no folder is renamed onto another; `find_steps` gives this one while there is no other
            sync_all(partial)  # so that there is none of this name for a moment only
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(checkpoints, keep_last, {step, *best})
    return target


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


def _copy(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """On the CPU, where it fits in the memory of `into`; what is the same memory, as tied weights are, still is."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, tensor in tensors.items():
        if (place := _place(tensor)) not in copies:
            full = whole(tensor)
            old = into.get(name)
            if old is None or (old.shape, old.dtype) != (full.shape, full.dtype):
                old = torch.empty(full.shape, dtype=full.dtype) if keep else full
            copies[place] = old.copy_(full) if keep else torch.empty(0)
    return {name: copies[_place(tensor)] for name, tensor in tensors.items()} if keep else {}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same memory."""
    return local_part(tensor).data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def _prune(checkpoints: Path, keep_last: int, keep: set[int]) -> None:
    by_step = find_steps(checkpoints)
    for step in sorted(set(sorted(by_step)[:-keep_last] if keep_last else []) - keep):
        hidden = checkpoints / f".{by_step[step].name}.removed"
        os.replace(by_step[step], hidden)  # gone at once: a half-removed checkpoint is never seen
        _remove(hidden)


def _remove(path: Path) -> None:
    """Of a link, by which somebody may have replaced an old checkpoint, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
