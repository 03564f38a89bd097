"""A number to be guessed."""

import re
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import TaskError
from mtgrpo.types import Message, Task


@dataclass
class GuessNumber(Environment):
    """The model guesses the number of task=guess_number and is told whether it is higher or lower.

    `max_turns` is how often it may guess. The right guess ends the game and pays 1: reward=environment.
    """

    pays_turns = True

    max_turns: int = 5

    async def start(self, task: Task) -> Opening:
        if not {"low", "high", "number"} <= task.metadata.keys():
            raise TaskError(f"task {task.id} has no number to guess; environment=guess_number is for the task of it")
        self._low, self._high, self._number = (int(task.metadata[name]) for name in ("low", "high", "number"))
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        numbers = re.findall(r"(?<!\d)\d{1,9}(?!\d)", message.content)
        if len(numbers) != 1:
            return Reply((Message("user", "error: say one number"),))
        guess = int(numbers[0])
        if guess == self._number:
            return Reply(done=True, reward=1.0)
        if guess < self._number:
            where, self._low = "higher", max(self._low, guess + 1)
        else:
            where, self._high = "lower", min(self._high, guess - 1)
        return Reply((Message("user", f"{where}: {self._low} to {self._high}"),))
