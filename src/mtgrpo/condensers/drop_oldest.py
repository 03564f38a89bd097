"""The model sees as much of the end as fits."""

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, newest
from mtgrpo.types import Message


@dataclass
class DropOldest(Condenser, fill="> 0 and <= 1"):
    """Keeps the opening and the newest steps, until they fill the share `fill` of the budget.

    The rest is room to grow into: a context that is full again at once would be rendered again at every turn. Where the
    share holds no step, the newest is kept if the whole budget holds it.
    """

    fill: float = 0.6  # share of the budget

    async def condense(self, conversation: Conversation) -> list[Message]:
        kept = newest(conversation, conversation.steps, share=self.fill)
        alone = len(kept) == len(conversation.opening)  # then the newest step may take all of the budget
        return newest(conversation, conversation.steps[-1:]) if alone else kept
