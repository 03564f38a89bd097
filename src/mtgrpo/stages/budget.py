"""How long a run is: what it has used, and which limit it has reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.config.experiment import TrainerSettings
from mtgrpo.types import Group


@dataclass
class Budget:
    """Counts what a run has used, and says which limit it has reached."""

    settings: TrainerSettings
    steps: int = 0
    turns: int = 0
    seconds: float = 0.0

    def count(self, groups: Sequence[Group], seconds: float) -> None:
        """One more step is done."""
        self.steps += 1
        self.turns += sum(len(t.turns) for group in groups for t in group.trajectories)
        self.seconds += seconds

    def reached(self, epoch: int) -> str:
        """The first limit that is reached, as the user would write it; "" while there is none."""
        used = {"steps": self.steps, "epochs": epoch, "total_turns": self.turns, "wall_time_s": self.seconds}
        for name, value in used.items():
            limit = getattr(self.settings, name)
            if limit and value >= limit:
                return f"trainer.{name}={limit}"
        return ""
