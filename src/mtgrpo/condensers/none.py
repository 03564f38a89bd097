"""The model sees everything."""

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, messages_of
from mtgrpo.types import Message


@dataclass
class Whole(Condenser):
    """Nothing is condensed: a conversation that exceeds environment.max_context_length is truncated."""

    active = False

    async def condense(self, conversation: Conversation) -> list[Message]:
        return messages_of(conversation.opening, conversation.steps)
