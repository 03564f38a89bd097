"""Is the answer to a question right, word for word? As question answering measures it."""

import re
import string
import unicodedata
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mtgrpo.errors import ConfigError, TaskError
from mtgrpo.parts import Text
from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_TO_NOTHING = str.maketrans("", "", string.punctuation)
_TO_SPACES = str.maketrans({sign: " " for sign in string.punctuation + "\u2018\u2019\u00b4`"})


class Convention(Enum):
    """Whose rules of comparison."""

    squad = "squad"  # Rajpurkar et al. 2016, arXiv:1606.05250
    hotpotqa = "hotpotqa"  # Yang et al. 2018, arXiv:1809.09600: text as SQuAD; F1 takes yes and no whole
    triviaqa = "triviaqa"  # Joshi et al. 2017, arXiv:1705.03551: punctuation parts words instead of vanishing
    unicode = "unicode"  # as SQuAD, without the punctuation and the signs of any script


@dataclass
class AnswerReward(Reward, ABC):
    """Base of the rewards that compare the words of an answer with those of the accepted ones."""

    compares = True

    convention: Convention = Convention.squad
    tag: Text = ""  # answer: the answer is what the final message's last <answer></answer> holds; "" = all of it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tag:
            check_tag(type(self).__name__.lower(), self.tag)

    def answer(self, trajectory: Trajectory) -> str:
        return normalise(stated_answer(trajectory.final, self.tag), self.convention)

    def normalise(self, trajectory: Trajectory) -> tuple[str, list[str]]:
        """The words of the answer, and those of each accepted one. Raises TaskError when the task has none."""
        task = trajectory.task
        more: Any = task.metadata.get("answers")
        more = () if more is None or isinstance(more, Mapping) else [more] if isinstance(more, str) else more
        accepted = [answer for answer in map(str, (task.answer, *more)) if answer.strip()]
        if not accepted:
            raise TaskError(f"task {task.id} has no answer to compare with; choose task.columns.answer=COLUMN")
        return self.answer(trajectory), [normalise(gold, self.convention) for gold in accepted]


@dataclass
class EM(AnswerReward):
    """1 when the answer is one of the accepted ones, else 0: the exact match of SQuAD, HotpotQA and TriviaQA.

    Accepted are the task's answer and the `answers` in its metadata. Both sides are compared in lower case without
    punctuation, articles (a, an, the) and surplus white space. What is nothing else, such as the answer "A", is
    compared as it stands, so that an empty message is never right.
    """

    def reward(self, trajectory: Trajectory) -> float:
        """Raises TaskError when the task has no answer."""
        answer, accepted = self.normalise(trajectory)
        return float(answer in accepted)


def normalise(text: str, convention: Convention) -> str:
    """The words of `text` that count, parted by single spaces; "" for an empty text alone."""
    lower = text.lower()
    if convention is Convention.unicode:
        words = "".join(character for character in lower if unicodedata.category(character)[0] not in "PS")
    else:
        words = lower.translate(_TO_SPACES if convention is Convention.triviaqa else _TO_NOTHING)
    return " ".join(_ARTICLES.sub(" ", words).split()) or " ".join(lower.split())


def stated_answer(text: str, tag: str) -> str:
    """What the last <tag></tag> of `text` holds, "" where there is none; the whole text where `tag` is ""."""
    if not tag:
        return text
    before, end, _ = text.rpartition(f"</{tag}>")
    return before.rpartition(f"<{tag}>")[2].strip() if end and f"<{tag}>" in before else ""


def check_tag(reward: str, tag: str) -> None:
    """Raise ConfigError unless `tag` is the name of a tag."""
    if not re.fullmatch(r"\w[\w-]*", tag):
        raise ConfigError(f"reward {reward}: tag={tag!r} is not the name of a tag; write answer for <answer></answer>")
