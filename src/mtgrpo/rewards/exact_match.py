"""Is the final message the answer?"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory


@dataclass
class ExactMatch(Reward):
    """1 when the final message is the answer, or one of the `answers` in the task's metadata, else 0.

    Compared as SQuAD does: without case, punctuation, articles and differences of white space
    (Rajpurkar et al. 2016, arXiv:1606.05250).
    """

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises ConfigError when the task has no answer."""
        task = trajectory.task
        answers = [answer for answer in (task.answer, *task.metadata.get("answers", ())) if answer]
        if not answers:
            raise ConfigError(
                f"task {task.id} has no answer to compare with; choose its column with task.columns.answer=NAME"
            )
        return float(normalised(trajectory.final) in {normalised(answer) for answer in answers})


def normalised(text: str) -> str:
    """`text` in lower case without punctuation, articles and surplus white space."""
    kept = "".join(character for character in text.lower() if unicodedata.category(character)[0] not in "PS")
    words = kept.split()
    without_articles = [word for word in words if not re.fullmatch("a|an|the", word)]
    # An answer that is nothing but an article ("A") or a sign ("+") must not equal an empty message.
    return " ".join(without_articles or words) or text.strip()
