"""The model sees as much of the end as fits."""

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, newest
from mtgrpo.types import Message


@dataclass
class DropOldest(Condenser, fill="> 0 and <= 1"):
    """Keeps the opening and the newest steps, until they fill the share `fill` of the budget.

    The rest is room to grow into: a context that is full again at once would be rendered again at every turn.
    """

    fill: float = 0.6  # share of the budget

    async def condense(self, conversation: Conversation) -> list[Message]:
        return newest(conversation, conversation.steps, share=self.fill)
