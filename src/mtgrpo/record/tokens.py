"""The record of a step token by token: what each was paid, and how likely it was to whom. `tokens/step_000010.npz`.

Arrays of numpy, without pickle. A forest holds each distinct token once; an entry is a sampled token of a trajectory,
in the order of trajectory, turn and position, so that the turns' numbers of tokens say which is whose.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mtgrpo.errors import ConfigError
from mtgrpo.parts.extension import explained
from mtgrpo.record.reading import step_of
from mtgrpo.record.settings import TokenSettings
from mtgrpo.runtime.files import put_whole
from mtgrpo.runtime.resources import check_disk
from mtgrpo.types import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from mtgrpo.batch.forest import Batch

FLAGS = ("clipped", "clamped", "rejected", "no advantage", "auxiliary", "not trained")  # by bit, from the lowest
DIFFERENCES = ("before", "last", "after", "reference")  # log-probabilities, stored as what they are above `behaviour`
_HALF = ("entropy", "value", *DIFFERENCES)  # stored as float16, which is exact enough for what is small
_OF_TURNS = ("turn_tokens", "turn_trajectory", "turn_parent")
_WHOLE_NUMBERS = ("forest_token", "forest_subtree_end", *_OF_TURNS, "node", "version", "flags", "line", "whole")
_NEEDED = ("forest_token", "version", "flags", "behaviour", "weight", "turn_parent", "whole")
_MOST = float(np.finfo(np.float16).max)
_MOST_BYTES = 1 << 30  # of the arrays of a file that is read
_SPARE = 1 << 28  # bytes that a disk must have left beside the record


class TokenRecorder:
    """Writes the records of a run and removes old ones. It never ends the run: what goes wrong is noted, once."""

    def __init__(self, settings: TokenSettings, folder: Path, note: Any) -> None:
        self._settings, self._folder, self._note = settings, folder / "tokens", note

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        trained: Sequence[Trajectory],
        batch: Batch,
        paid: Mapping[str, Tensor],
    ) -> None:
        """Keep step number `step`, in whose file of conversations `groups` stand; `paid`: see `Objective.record`."""
        if not (self._settings.active and self._settings.keeps(step, step)):
            return
        try:
            arrays = lay_out(groups, trained, batch, paid, self._settings.groups)
            self._folder.mkdir(exist_ok=True)
            check_disk(self._folder, _SPARE + sum(array.nbytes for array in arrays.values()), "tokens")
            with put_whole(self._folder / f"step_{step:06d}.npz", durable=False) as partial:
                write_arrays(partial, arrays)
            for path in self._folder.glob("step_*.npz"):
                if (older := step_of(path.stem)) and not self._settings.keeps(older, step):
                    path.unlink()
        except Exception as error:
            self._settings = TokenSettings(last=0, every=0)
            self._note(f"the record of tokens failed and goes on no more: {explained(error)}")


def lay_out(
    groups: Sequence[Group], trained: Sequence[Trajectory], batch: Batch, paid: Mapping[str, Tensor], most: int
) -> dict[str, NDArray[Any]]:
    """The arrays of a record: of at most `most` groups, those whose rewards differ most; 0 = of all.

    trained: the trajectories of `batch`.
    """
    import torch  # noqa: PLC0415  readers of records need none

    lines = {id(t): line for line, t in enumerate(t for one in groups for t in one.trajectories)}
    group = {id(t): number for number, one in enumerate(groups) for t in one.trajectories}
    rewarded = [[trajectory.reward for trajectory in one.valid] for one in groups]
    spread = [max(rewards, default=0.0) - min(rewards, default=0.0) for rewards in rewarded]
    candidates = sorted({group[id(t)] for t in trained}, key=spread.__getitem__, reverse=True)
    chosen = set(candidates[: most or None])
    inside = [index for index, t in enumerate(trained) if group[id(t)] in chosen]
    entries = torch.isin(batch.trajectory, torch.tensor(inside, dtype=torch.long)).nonzero()[:, 0]
    nodes = batch.forest.with_ancestors(batch.node[entries].unique())
    forest, turns = batch.forest.subset(nodes), [(i, turn) for i in inside for turn in trained[i].turns]
    auxiliary = [turn.auxiliary for _, turn in turns for _ in turn.output]
    place = {index: number for number, index in enumerate(inside)}
    behaviour = batch.behaviour_logp[entries].numpy()
    columns = {name: values[entries].numpy() for name, values in paid.items()}
    weight = columns.get("weight", np.full(len(entries), np.nan))
    arrays: dict[str, NDArray[Any]] = {
        "whole": np.array([round(batch.shared * len(batch.forest)), len(batch.forest)]),
        "forest_token": forest.token.numpy().astype(np.uint32),
        "forest_subtree_end": forest.subtree_end.numpy().astype(np.uint32),
        "line": np.array([lines[id(trained[index])] for index in inside], dtype=np.int32),
        "turn_trajectory": np.array([place[index] for index, _ in turns], dtype=np.int32),
        "turn_parent": np.array([turn.parent for _, turn in turns], dtype=np.int32),
        "turn_tokens": np.array([len(turn.output) for _, turn in turns], dtype=np.int32),
        "node": torch.searchsorted(nodes, batch.node[entries]).numpy().astype(np.uint32),
        "version": batch.version[entries].numpy().astype(np.int32),
        "flags": _flags(columns, weight, np.array(auxiliary, dtype=bool)),
        "behaviour": behaviour.astype(np.float32),
        "weight": np.nan_to_num(weight).astype(np.float32),
    }
    if "advantage" in columns:
        arrays["advantage"] = columns["advantage"].astype(np.float32)
    for name in set(_HALF) & set(columns):
        values = columns[name] - behaviour if name in DIFFERENCES else columns[name]
        if not np.isnan(values).all():
            arrays[name] = values.clip(-_MOST, _MOST).astype(np.float16)
    if "last" in arrays and np.array_equal(arrays["last"], arrays["before"], equal_nan=True):  # of a single update
        del arrays["last"]
    return arrays


def _flags(
    columns: Mapping[str, NDArray[Any]], weight: NDArray[Any], auxiliary: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    nothing = np.zeros(len(weight))
    raised = [columns.get("clipped", nothing) == 1, columns.get("clamped", nothing) == 1]
    raised += [columns.get("factor", nothing + 1) == 0, columns.get("advantage", nothing + 1) == 0]
    raised += [auxiliary, np.isnan(weight)]
    return np.packbits(np.stack(raised), axis=0, bitorder="little")[0]


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write what `numpy.load` reads; quicker than `numpy.savez_compressed`, and about as small."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


@dataclass(frozen=True)
class TokenRecord:
    """The record of a step, read back."""

    arrays: Mapping[str, NDArray[Any]]  # as `lay_out` gives them, checked to fit one another
    first: NDArray[np.int64]  # [turns + 1] where the entries of each turn begin

    def turns(self, line: int) -> range | None:
        """The turns of the trajectory on this line of the step's conversations; None where it is not recorded."""
        (found,) = np.nonzero(self.arrays["line"] == line)
        if not len(found):
            return None
        return range(*np.searchsorted(self.arrays["turn_trajectory"], [found[0], found[0] + 1]).tolist())

    def tokens(self, turns: range, place: int) -> tuple[list[int], int, slice]:
        """Of the turn at `place` of a trajectory's: all its tokens, how many of them its parent has, its entries."""
        turn = turns[place]
        parent = int(self.arrays["turn_parent"][turn])
        known = len(self.path(turns[parent])) if 0 <= parent < place else 0
        ids: list[int] = self.arrays["forest_token"][self.path(turn)].tolist()
        return ids, known, slice(int(self.first[turn]), int(self.first[turn + 1]))

    def path(self, turn: int) -> NDArray[np.int64]:
        """The nodes from the root to the last token of a turn: what the engine was sent, and what it answered."""
        if not self.arrays["turn_tokens"][turn]:
            return np.zeros(0, dtype=np.int64)
        last = int(self.arrays["node"][self.first[turn + 1] - 1])
        return np.flatnonzero(self.arrays["forest_subtree_end"][: last + 1] > last)


def read_tokens(folder: Path, step: int) -> TokenRecord | None:
    """The record of a step of the run in `folder`; None where there is none. Raises ConfigError for what is none."""
    path = folder / "tokens" / f"step_{step:06d}.npz"
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MOST_BYTES:
            raise ValueError(f"it unpacks to {size:,} bytes, more than are read")
        with np.load(path, allow_pickle=False) as file:
            record = {name: np.asarray(file[name]) for name in file.files}
        return _checked(record)
    except Exception as error:  # the libraries that unpack it have no base in common
        raise ConfigError(f"{path} is no record of tokens: {error}") from error


def _checked(arrays: Mapping[str, NDArray[Any]]) -> TokenRecord:
    """Raises ValueError, or KeyError, for arrays that do not fit one another."""
    whole = {name: a.astype(np.int64) for name, a in arrays.items() if name in _WHOLE_NUMBERS and a.dtype.kind in "iu"}
    arrays = {**arrays, **whole}
    end, counts, line = arrays["forest_subtree_end"], arrays["turn_tokens"], arrays["line"]
    trajectory, node, nodes = arrays["turn_trajectory"], arrays["node"], np.arange(len(end))
    lengths = {"whole": 2, "line": len(line), "forest": len(end), "turn": len(counts)}
    for name, array in arrays.items():
        kinds = "iu" if name in _WHOLE_NUMBERS else "iuf"
        if array.shape != (lengths.get(name.partition("_")[0], len(node)),) or array.dtype.kind not in kinds:
            raise ValueError(f"{name} has shape {array.shape} and type {array.dtype}")
    if missing := [name for name in _NEEDED if name not in arrays]:
        raise ValueError(f"it has no {missing[0]}")
    if (counts < 0).any() or counts.sum() != len(node) or (np.diff(trajectory) < 0).any():
        raise ValueError("its turns do not have as many tokens as there are")
    if len(trajectory) and not 0 <= trajectory[0] <= trajectory[-1] < len(line):
        raise ValueError("its turns are of trajectories that are not there")
    if (node >= len(end)).any() or (node < 0).any() or (end > len(end)).any() or (end <= nodes).any():
        raise ValueError("its forest is none")
    if (arrays["forest_token"] >> 32).any():
        raise ValueError("its tokens are no ids, which have 32 bits")
    first = np.concatenate([[0], counts.cumsum()])
    last = node[first[1:][counts > 0] - 1]
    if (last + 1 - np.searchsorted(np.sort(end), last, side="right") < counts[counts > 0]).any():
        raise ValueError("its turns have more tokens than there are up to their last")
    return TokenRecord(arrays, first)


def recorded_steps(folder: Path) -> list[int]:
    """The steps whose tokens a run has kept, in order."""
    return sorted(filter(None, (step_of(path.stem) for path in (folder / "tokens").glob("step_*.npz"))))
