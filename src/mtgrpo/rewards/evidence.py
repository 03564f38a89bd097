"""Have the searches shown what answers the question?"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from mtgrpo.rewards import Reward, Score, required
from mtgrpo.rewards.em import EM, Convention, normalise
from mtgrpo.types import Trajectory

_SHOWN = re.compile(r"^\[([^\]\n]+)\]", re.MULTILINE)  # an id, as the search tool begins its lines


@dataclass
class Evidence(Reward):
    """The share of the passages that the question needs, the task's `gold`, which the tool search has shown: 0 to 1.

    For task=search_qa with 'environment.tools={search: ...}'; with answers=true for any task that has accepted answers,
    such as triviaqa, 1 where a search has shown one of them. A search for words of the answer finds passages without
    answering, so put it beside the answer's reward: 'reward=[f1,evidence]' reward.evidence.weight=0.2.
    """

    per_turn: bool = False  # each turn is paid for what it is the first to show, the whole for nothing: advantage=turn
    answers: bool = False  # what is needed is an accepted answer, word for word, whatever passage has it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.judges_turns = self.per_turn

    def reward(self, trajectory: Trajectory) -> Score:
        """The share, or that of each turn. Raises ConfigError where the task does not say what it needs."""
        needed = {""} if self.answers else set[str](required(trajectory.task, "gold", "evidence", "search_qa"))
        accepted = EM(convention=Convention.triviaqa).normalise(trajectory)[1] if self.answers else ()
        missing, turns = needed, list[float]()
        for turn in trajectory.turns:
            texts = [reply.content for reply in turn.observations if reply.name == "search"]
            shown = (
                {"" for text in texts if _says(text, accepted)} if self.answers else _SHOWN.findall("\n".join(texts))
            )
            left = missing.difference(shown)
            turns.append(len(missing - left) / len(needed))
            missing = left
        found = 1 - len(missing) / len(needed)
        return Score(0.0, {"found": found}, turns) if self.per_turn else Score(found)


def _says(text: str, accepted: Collection[str]) -> bool:
    """Whether `text` has the words of an accepted answer, one after another."""
    words = f" {normalise(text, Convention.triviaqa)} "
    return any(f" {answer} " in words for answer in accepted)
