"""The model sees the whole conversation, with long old replies of tools cut short."""

from dataclasses import dataclass, replace

from mtgrpo.condensers import Condenser, Conversation, Step, newest
from mtgrpo.types import Message

CUT = " [...]"


@dataclass
class TruncateTools(Condenser, max_reply_chars=">= 0", keep_last_n_steps=">= 0"):
    """Cuts the replies of tools to `max_reply_chars` characters, but for those of the last `keep_last_n_steps` steps.

    Where that is not enough, the oldest steps are dropped.
    """

    max_reply_chars: int = 200
    keep_last_n_steps: int = 1

    async def condense(self, conversation: Conversation) -> list[Message]:
        steps = list(conversation.steps)
        old = max(0, len(steps) - self.keep_last_n_steps)
        return newest(conversation, [*map(self._shortened, steps[:old]), *steps[old:]])

    def _shortened(self, step: Step) -> Step:
        return tuple(
            replace(message, content=message.content[: self.max_reply_chars] + CUT)
            if message.role == "tool" and len(message.content) > self.max_reply_chars + len(CUT)
            else message
            for message in step
        )
