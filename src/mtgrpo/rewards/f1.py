"""How many words of the answer to a question are right? As question answering measures it."""

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
        """Raises TaskError when the task has no answer."""
        answer, accepted = self.normalise(trajectory)
        if self.convention is Convention.hotpotqa:
            accepted = [gold for gold in accepted if gold == answer or not {gold, answer} & _WHOLE]
        return max((word_f1(answer.split(), gold.split()) for gold in accepted), default=0.0)


def word_f1(words: list[str], others: list[str]) -> float:
    """The F1 of two lists of words, whatever their order."""
    shared = (Counter(words) & Counter(others)).total()
    return 2 * shared / (len(words) + len(others)) if shared else 0.0
