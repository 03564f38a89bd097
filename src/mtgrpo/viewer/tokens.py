"""The record of a step's tokens as the page gets it: conversations, prefix trees, times."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtgrpo.errors import ConfigError
from mtgrpo.record.decoding import open_tokenizer, parted
from mtgrpo.record.shapes import Json
from mtgrpo.record.tokens import DIFFERENCES, TokenRecord, read_tokens
from mtgrpo.runtime.text import complain, printable

_COLUMNS = ("behaviour", *DIFFERENCES, "entropy", "advantage", "weight", "value", "version", "flags")
_LABEL = 24  # tokens of a run of the forest that are shown
_MOST_RUNS = 20_000  # of a forest


def of_conversation(folder: Path, step: int, line: int) -> Json | None:
    """Turn by turn what was new in the context, and the sampled tokens with all that is known of them."""
    record = _read(folder, step)
    if record is None or (turns := record.turns(line)) is None:
        return None
    tokenizer, arrays = _tokenizer(folder), record.arrays
    found: list[Json] = []
    for place, turn in enumerate(turns):
        ids, known, entries = record.tokens(turns, place)
        parent, sampled = int(arrays["turn_parent"][turn]), entries.stop - entries.start
        start = len(ids) - sampled
        numbered = " ".join(map(str, ids[known:start])), [f"{token} " for token in ids[start:]]
        context, pieces = parted(tokenizer, ids, known, sampled) if tokenizer else numbered
        found.append(
            {"parent": parent if 0 <= parent < place else -1, "known_tokens": known, "context_tokens": start - known}
            | {"context": printable(context), "ids": ids[start:], "pieces": list(map(printable, pieces))}
            | {"columns": {name: numbers(arrays[name][entries]) for name in _COLUMNS if name in arrays}}
        )
    return {"turns": found, "decoded": tokenizer is not None}


def of_lines(folder: Path, step: int) -> dict[int, Json]:
    """Of each recorded conversation the ranges of advantage and of trainer against sampler, and what was clipped."""
    record = _read(folder, step)
    if record is None:
        return {}
    arrays, found = record.arrays, dict[int, Json]()
    for line in arrays["line"].tolist():
        turns = record.turns(line) or range(0)
        entries = slice(int(record.first[turns.start]), int(record.first[turns.stop])) if turns else slice(0, 0)
        seen: Json = {"recorded": True, "clipped": int((arrays["flags"][entries] & 1).sum())}
        for name, key in (("advantage", "advantage"), ("before", "apart")):
            values = arrays[name][entries].astype(float) if name in arrays else np.zeros(0)
            values = values[np.isfinite(values)]
            seen[key] = [float(values.min()), float(values.max())] if len(values) else None
        found[line] = seen
    return found


def forest(folder: Path, step: int) -> Json | None:
    """The runs of tokens between branchings, depth-first: where each begins, how long it is, how many leaves are below.

    The push of a run is the sum of weight times advantage over the tokens sampled in it: what makes them likelier.
    """
    record = _read(folder, step)
    if record is None:
        return None
    arrays, tokenizer = record.arrays, _tokenizer(folder)
    token, end = arrays["forest_token"], arrays["forest_subtree_end"].astype(np.int64)
    nodes = np.arange(len(end))
    continues = np.zeros(len(end), dtype=bool)
    continues[1:] = (end[:-1] > nodes[1:]) & (end[1:] == end[:-1])  # the only child of the node before
    begins = np.flatnonzero(~continues)
    start, stop = (places[: min(_MOST_RUNS, len(begins))] for places in (begins, np.append(begins[1:], len(end))))
    leaf = np.concatenate([[0], (end == nodes + 1).cumsum()])
    node, order = arrays["node"].astype(np.int64), np.argsort(arrays["node"], kind="stable")
    of_run = np.searchsorted(begins, node, side="right") - 1
    advantage = np.nan_to_num(arrays["advantage"].astype(float)) if "advantage" in arrays else np.zeros(len(node))
    push = np.bincount(of_run, advantage * arrays["weight"], minlength=len(start))[: len(start)]
    sampled = np.bincount(of_run, minlength=len(start))[: len(start)]
    turn = np.repeat(np.arange(len(arrays["turn_tokens"])), arrays["turn_tokens"])
    below = order[np.searchsorted(node[order], start).clip(0, max(0, len(node) - 1))] if len(node) else order
    lines = arrays["line"][arrays["turn_trajectory"][turn[below]]] if len(node) else []
    depth = start - np.searchsorted(np.sort(end), start, side="right")  # nodes before whose subtrees have not ended
    labels = [token[first : min(last, first + _LABEL)].tolist() for first, last in zip(start, stop, strict=True)]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else str(ids) for ids in labels]
    return {
        **{"depth": depth.tolist(), "length": (stop - start).tolist(), "leaf": leaf[start].tolist()},
        **{"leaves": (leaf[end[start]] - leaf[start]).tolist(), "push": numbers(push, 9), "sampled": sampled.tolist()},
        **{"line": np.asarray(lines).tolist(), "text": list(map(printable, texts)), "runs": len(begins)},
        **{"whole": arrays["whole"].tolist(), "nodes": len(end), "conversations": len(arrays["line"])},
    }


def numbers(values: NDArray[Any], digits: int = 6) -> list[float | int | None]:
    """For JSON, which has no NaN."""
    if values.dtype.kind in "iu":
        return values.tolist()
    found = values.astype(np.float64).round(digits).astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()


def _read(folder: Path, step: int) -> TokenRecord | None:
    path = folder / "tokens" / f"step_{step:06d}.npz"
    return _cached(folder, step, path.stat().st_mtime_ns) if path.is_file() else None


@functools.lru_cache(maxsize=4)
def _cached(folder: Path, step: int, _time: int) -> TokenRecord | None:
    try:
        return read_tokens(folder, step)
    except ConfigError as error:
        return complain(f"{error}; the page goes on without it")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """None where a run has none yet: its tokens are then shown as numbers."""
    newest = max((path.stat().st_mtime_ns for path in folder.glob("checkpoints/step_*/tokenizer.json")), default=0)
    return _cached_tokenizer(folder, newest)


@functools.lru_cache(maxsize=4)
def _cached_tokenizer(folder: Path, _time: int) -> Tokenizer | None:
    try:
        return open_tokenizer(folder)
    except ConfigError:
        return None
