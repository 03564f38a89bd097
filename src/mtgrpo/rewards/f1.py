"""How many words of the answer to a question are right? As question answering measures it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mtgrpo.rewards.em import AnswerReward, Convention
from mtgrpo.types import Trajectory

_WHOLE = {"yes", "no", "noanswer"}  # HotpotQA: an answer that is one of these is right or wrong, never in part


@dataclass
class F1(AnswerReward):
    """The F1 of the answer's words, from 0 to 1: the harmonic mean of their precision and recall.

    Words are what reward=em compares, each as often as it occurs; of several accepted answers the best counts.
    Conventions squad and triviaqa differ in these words; with hotpotqa yes, no and noanswer are right as a whole or
    worth 0.
    """

    def reward(self, trajectory: Trajectory) -> float:
        """From 0.0 to 1.0. Raises ConfigError when the task has no answer."""
        given, accepted = self.compared(trajectory)
        if self.convention is Convention.hotpotqa:
            accepted = [answer for answer in accepted if answer == given or not {answer, given} & _WHOLE]
        return max((word_f1(given.split(), answer.split()) for answer in accepted), default=0.0)


def word_f1(given: list[str], answer: list[str]) -> float:
    """The F1 of two lists of words, whatever their order."""
    shared = (Counter(given) & Counter(answer)).total()
    return 2 * shared / (len(given) + len(answer)) if shared else 0.0
