"""Have the searches shown what answers the question?"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtgrpo.rewards import Reward, Score, required
from mtgrpo.types import Trajectory

_SHOWN = re.compile(r"^\[([^\]\n]+)\]", re.MULTILINE)  # an id, as the search tool begins its lines


@dataclass
class Evidence(Reward):
    """The share of the passages that the question needs, the task's `gold`, which the tool search has shown: 0 to 1.

    For task=search_qa with environment.tools={search: ...}. A search for words of the answer finds passages without
    answering, so put it beside the answer's reward: reward=[f1,evidence] reward.evidence.weight=0.2.
    """

    per_turn: bool = False  # each turn is paid for what it is the first to show, the whole for nothing: advantage=turn

    def __post_init__(self) -> None:
        super().__post_init__()
        self.judges_turns = self.per_turn

    def reward(self, trajectory: Trajectory) -> Score:
        """The share, or that of each turn. Raises ConfigError where the task does not say what it needs."""
        gold = frozenset[str](required(trajectory.task, "gold", "evidence", "search_qa"))
        missing, turns = gold, list[float]()
        for turn in trajectory.turns:
            texts = [reply.content for reply in turn.observations if reply.name == "search"]
            left = missing.difference(*map(_SHOWN.findall, texts))
            turns.append(len(missing - left) / len(gold))
            missing = left
        found = 1 - len(missing) / len(gold)
        return Score(0.0, {"found": found}, turns) if self.per_turn else Score(found)
