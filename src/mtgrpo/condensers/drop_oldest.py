"""The model sees as much of the end as fits."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, newest
from mtgrpo.types import Message


@dataclass
class DropOldest(Condenser):
    """Keeps the opening and the newest steps that the budget holds."""

    async def condense(self, conversation: Conversation) -> list[Message]:
        """Whole steps are dropped, the oldest first."""
        return newest(conversation, conversation.steps)
