"""Several ranks, each a process, over gloo: what a function gives on each; how far runs are from one another."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed as dist

from test_resume import digits, rows

BIN = Path(sys.executable).parent
COMPUTED = ("computed_tokens", "repeated_tokens", "memory_bytes")  # what ranks compute more of
LIMIT_S = 300  # a rank that waits longer for others has hung
WHOLE_S = 1000  # for all that ranks are asked for, on a machine that others use too


def run_rank(function: Callable[..., Any], folder: Path, rank: int, ranks: int, arguments: tuple[Any, ...]) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        limit = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(rank, ranks, *arguments)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


def on_ranks(ranks: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `function(rank, ranks, *arguments)` gives on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=run_rank, args=(function, folder, rank, ranks, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    ends = time.monotonic() + WHOLE_S
    for child in children:
        child.join(max(0.0, ends - time.monotonic()))
    for child in children:
        child.kill()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    assert not errors, errors
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def train_by_command(folder: Path, *words: str) -> Path:
    """A run of `mtgrpo train` with these words, which must end well."""
    command = [str(BIN / "mtgrpo"), "train", *words, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def furthest_of_runs(one: Path, other: Path, of: str = "") -> tuple[float, str]:
    """How far what two runs logged, relative, and their last weights are apart, and where; `of`: a name in the rows."""
    return max(_distances(one, other, of))


def _distances(one: Path, other: Path, of: str) -> Iterator[tuple[float, str]]:
    chosen = [[row for row in rows(run) if not of or of in row] for run in (one, other)]
    for number, pair in enumerate(zip(*chosen, strict=True)):
        logged, of_other = map(digits, pair)
        assert logged.keys() == of_other.keys(), logged.keys() ^ of_other.keys()
        for name, value in logged.items():
            if isinstance(value, float) and not name.endswith(COMPUTED):
                yield abs(of_other[name] - value) / max(1.0, abs(value)), f"{name} in row {number}"
    saved = [load_file(max((run / "checkpoints").glob("step_*")) / "model.safetensors") for run in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        yield (weight - saved[1][name]).abs().max().item(), name
