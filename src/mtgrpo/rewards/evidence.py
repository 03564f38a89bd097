"""Have the searches shown what answers the question?"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

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
        """The share, or that of each turn. Raises TaskError where the task does not say what it needs."""
        needed, turns = self._needed(trajectory), list[float]()
        missing = needed
        for turn in trajectory.turns:
            texts = [reply.content for reply in turn.observations if reply.name == "search"]
            left = [is_in for is_in in missing if not any(map(is_in, texts))]
            turns.append((len(missing) - len(left)) / len(needed))
            missing = left
        found = 1 - len(missing) / len(needed)
        return Score(0.0, {"found": found}, turns) if self.per_turn else Score(found)

    def _needed(self, trajectory: Trajectory) -> list[Callable[[str], bool]]:
        """Of each thing that must be shown, whether it is in a text."""
        if self.answers:
            return [partial(_says, accepted=EM(convention=Convention.triviaqa).normalise(trajectory)[1])]
        gold = set[str](required(trajectory.task, "gold", "evidence", "search_qa"))
        return [lambda text, passage=passage: passage in _SHOWN.findall(text) for passage in gold]


def _says(text: str, accepted: Collection[str]) -> bool:
    """Whether `text` has the words of an accepted answer, one after another."""
    words = f" {normalise(text, Convention.triviaqa)} "
    return any(f" {answer} " in words for answer in accepted)
