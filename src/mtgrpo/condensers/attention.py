"""The model sees its last steps and those older ones that it attends to most."""

from dataclasses import dataclass
from typing import ClassVar

from mtgrpo.condensers import Condenser, Conversation, best_and_newest
from mtgrpo.types import Message


@dataclass
class Attention(Condenser, keep_last_n_steps=">= 0", attended_steps=">= 0"):
    """Keeps the last `keep_last_n_steps` steps and brings back the `attended_steps` others with the most attention.

    The attention is that of the end of a context of all steps to each of them, as a mean over layers and heads;
    steps that are too old for the window get none. It takes the model itself: engine=local. What is kept stays in its
    order. Steps that the budget does not hold are dropped, those with the least attention first.
    """

    keep_last_n_steps: int = 1
    attended_steps: int = 2

    attends: ClassVar[bool] = True

    async def condense(self, conversation: Conversation) -> list[Message]:
        start = max(0, len(conversation.steps) - self.keep_last_n_steps)
        shares = await conversation.attention(conversation.steps)
        ranked = sorted(range(start), key=lambda i: (-shares[i], -i))
        return best_and_newest(conversation, ranked[: self.attended_steps], start)
