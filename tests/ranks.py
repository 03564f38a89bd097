"""Runs a function on several ranks, each a process, over gloo; what each gives comes back."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

LIMIT_S = 120  # a rank that waits longer has hung


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
    for child in children:
        child.join(LIMIT_S)
    for child in children:
        child.kill()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    assert not errors, errors
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
