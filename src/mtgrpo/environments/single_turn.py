"""A question and one answer."""

from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.types import Message, Task


@dataclass
class SingleTurn(Environment):
    """The conversation ends with the model's first message; there are no tools."""

    async def start(self, task: Task) -> Opening:
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        return Reply(done=True)
