"""The model writes down what it needs, and sees that instead."""

from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, newest
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Text
from mtgrpo.types import Message


@dataclass
class Summarize(Condenser, keep_last_n_steps=">= 0"):
    """The policy itself writes a summary; it is sampled, trained and credited as a turn of the trajectory.

    The next context is the opening, the summary as a message of the model, `go_on` as the reply to it, and the last
    `keep_last_n_steps` steps, as many as the budget holds. A summary is cut at sampling.max_new_tokens, and at half
    of the budget.
    """

    instruction: Text = "Summarize what matters for the task so far."
    go_on: Text = "Go on."
    keep_last_n_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.instruction:
            raise ConfigError("condenser summarize: instruction is empty; say what is to be written down")

    async def condense(self, conversation: Conversation) -> list[Message]:
        summary = await conversation.ask(Message("user", self.instruction))
        head = [Message("assistant", summary.content), Message("user", self.go_on)]
        start = max(0, len(conversation.steps) - self.keep_last_n_steps)
        return newest(conversation, conversation.steps[start:], head)
