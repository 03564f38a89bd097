"""A condenser: what the model still sees of a conversation that has become long.

    mtgrpo train recipe=ledger_tiny condenser=examples/condenser.py:Ends condenser.first=1 sft.steps=60 trainer.steps=2

The opening always stays. A step is a message of the model and the replies to it.
"""

from dataclasses import dataclass, replace

from mtgrpo.condensers import Condenser, When, best_and_newest


@dataclass
class Ends(Condenser, first=">= 0", last=">= 1"):
    """The first steps and the last ones; of what tools answered in the first ones only the beginning."""

    when: When = When.every_turn
    first: int = 1  # steps that stay from the beginning
    last: int = 2  # steps that stay from the end
    most_chars: int = 40  # of a reply in the first steps

    async def condense(self, conversation):
        steps = conversation.steps
        start = max(0, len(steps) - self.last)
        short = [tuple(map(self.cut, step)) if number < start else step for number, step in enumerate(steps)]
        return best_and_newest(replace(conversation, steps=tuple(short)), range(min(self.first, start)), start)

    def cut(self, message):
        """A tool's reply without its end; what the model said stays as it is."""
        if message.role != "tool" or len(message.content) <= self.most_chars:
            return message
        return replace(message, content=message.content[: self.most_chars] + " ...")
