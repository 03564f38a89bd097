"""The model sees the task and its last steps."""

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, When, newest
from mtgrpo.types import Message


@dataclass
class KeepLast(Condenser, keep_last_n_steps=">= 0"):
    """Keeps the opening and the last `keep_last_n_steps` steps, fewer where the budget is smaller.

    A step is a message of the model and the replies to it.
    """

    when: When = When.every_turn
    keep_last_n_steps: int = 2

    async def condense(self, conversation: Conversation) -> list[Message]:
        start = max(0, len(conversation.steps) - self.keep_last_n_steps)
        return newest(conversation, conversation.steps[start:])
