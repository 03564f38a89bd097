"""Does each message have the parts that it should, between tags?"""

import re
from dataclasses import dataclass, field

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Text
from mtgrpo.rewards import Reward, Score
from mtgrpo.rewards.em import check_tag
from mtgrpo.types import Trajectory


@dataclass
class Tags(Reward):
    """1 when the final message is <think>...</think><answer>...</answer>, or the `tags` of your own, else 0.

    Every part stands once, in this order, holds some text and no tag of the list; between parts there is only white
    space. What the chat template took out of the message as its reasoning counts as the part think.
    """

    tags: list[Text] = field(default_factory=lambda: ["think", "answer"])  # of the final message
    turn_tags: list[Text] = field(default_factory=list[str])  # of messages before it, beside their calls; [] = any text
    per_turn: bool = False  # each turn whose message has its parts is worth 1 more: for advantage=turn and others

    def __post_init__(self) -> None:
        super().__post_init__()
        for tag in (*self.tags, *self.turn_tags):
            check_tag("tags", tag)
        if not self.tags:
            raise ConfigError("reward tags: tags is empty: name what the final message consists of, as [think,answer]")
        if self.turn_tags and not self.per_turn:
            raise ConfigError(
                f"reward tags: turn_tags={self.turn_tags} counts for nothing without per_turn=true: set it, or leave "
                "turn_tags out"
            )
        self.judges_turns = self.per_turn
        self._final, self._earlier = _pattern(self.tags), _pattern(self.turn_tags)

    def reward(self, trajectory: Trajectory) -> Score:
        """With `per_turn` also for each turn; those that a condenser asked for are worth 0."""
        last = max((index for index, turn in enumerate(trajectory.turns) if not turn.auxiliary), default=-1)
        turns: list[float] = []
        for index, turn in enumerate(trajectory.turns):
            reasoning = f"<think>{turn.message.reasoning}</think>" if turn.message.reasoning else ""
            pattern = self._final if index == last else self._earlier
            turns.append(float(not turn.auxiliary and bool(pattern.fullmatch(reasoning + turn.message.content))))
        return Score(turns[last] if last >= 0 else 0.0, turns=turns if self.per_turn else ())


def _pattern(tags: list[str]) -> re.Pattern[str]:
    """What a message of these parts matches; anything where there is none."""
    if not tags:
        return re.compile(".*", re.DOTALL)
    character = rf"(?:(?!</?(?:{'|'.join(tags)})>).)"  # that begins no tag
    # Possessive: where a part does not end as it should there is no second way to read it.
    parts = [rf"<{tag}>\s*+{character}++</{tag}>" for tag in tags]
    return re.compile(r"\s*+" + r"\s*+".join(parts) + r"\s*+", re.DOTALL)
