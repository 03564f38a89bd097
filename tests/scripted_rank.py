"""A trainer of scripted deeds, for ranks whose processes are what is tested."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mtgrpo.errors import ConfigError, RunError


@dataclass
class Config:
    """What a rank must know of its run."""

    folder: Path


@dataclass
class Trainer:
    """Has methods of `TrainerRank`, of its weights and of its snapshot, in one object."""

    config: Config
    rank: int
    ranks: int
    changes: int = 0
    notes: list[str] = field(default_factory=list[str])
    bytes: int = 12
    place: tuple[str, int] = "", 0

    def __post_init__(self) -> None:
        sys.modules["__main__"].ALIKE_S = 1.0  # type: ignore[attr-defined]
        for fact in ("version", "model_name", "config", "dtype", "lora", "size", "traits", "cuts_trees"):
            vars(self).setdefault(fact, fact)
        if (self.config.folder / "unfit").exists():
            raise ConfigError("the model does not fit")

    def weights(self) -> Trainer:
        return self

    def snapshot(self) -> Trainer:
        return self

    def begin(self, deed: str, rank: int | None = None) -> Any:
        """Do `deed` on this rank, or on all."""
        self.notes.append(f"rank {self.rank} begins")
        return self.do(deed) if rank in (None, self.rank) else None

    def updating(self, deed: str, rank: int) -> Generator[None, None, dict[str, float]]:
        """Two parts, with the deed of a rank between them, and then a sum over all."""
        for part in range(2):
            self.changes += 1
            self.place = "forward", self.changes
            yield
            if part == 0 and rank in (self.rank, self.ranks):
                self.do(deed)
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": total.item()}

    def do(self, deed: str) -> Any:
        match deed:
            case "count":
                return self.rank, os.environ["LOCAL_RANK"], torch.get_num_threads()
            case "config":
                raise ConfigError("`lr` is wrong")
            case "run":
                raise RunError("the gradient is not finite")
            case "different":
                raise RunError(f"rank {self.rank} says so")
            case "bug":
                raise ValueError("a bug\nin two lines: " + "x" * 20)
            case "loop":
                while True:
                    time.sleep(0.1)
            case "slow":
                time.sleep(2.5)
            case "until saved":
                while not (self.config.folder / "saved_0").exists():
                    time.sleep(0.01)

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        for number in range(4):
            yield f"weight {number}", torch.arange(24.0)[2 + number : 8 : 2].to(dtype or torch.float32)

    def save(self, folder: Path) -> dict[str, int]:
        (folder / f"saved_{self.rank}").touch()
        return {"rank": self.rank}


def make_looping(config: Any, rank: int, ranks: int) -> Any:
    """A real trainer, which on rank 1 is in an endless loop in its third update's first loss."""
    from mtgrpo.cluster.rank import make_trainer  # noqa: PLC0415
    from mtgrpo.policy.objective import Objective  # noqa: PLC0415

    made, loss = make_trainer(config, rank, ranks), Objective.__call__

    def looping(self: Objective, *arguments: Any) -> Any:
        while rank == 1 and self._version == 2:  # pyright: ignore[reportPrivateUsage]
            pass
        return loss(self, *arguments)

    Objective.__call__ = looping
    return made
