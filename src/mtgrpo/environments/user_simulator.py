"""A user who is played by a script."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import TaskError
from mtgrpo.parts import Text
from mtgrpo.types import Message, Task


@dataclass
class UserSimulator(Environment):
    """A user who answers by the script in the task's metadata, the same for the same task and the same messages.

    `script` is a list of {"when": [WORDS], "say": [TEXTS], "reward": NUMBER, "done": true or false}. The first entry of
    which the model's message contains all of the words, in capitals or not, answers it: with one of the texts, drawn by
    the task's id and the turn, and pays its `reward` the first time. `done` ends the conversation.
    """

    pays_turns = True

    otherwise: Text = "I do not understand. What do you want to know?"  # where no entry fits

    async def start(self, task: Task) -> Opening:
        self._task, self._turn, self._paid = task, 0, frozenset[int]()
        self._script = _script(task)
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        self._turn += 1
        text = message.content.casefold()
        for number, entry in enumerate(self._script):
            if all(word.casefold() in text for word in entry["when"]):
                reward = 0.0 if number in self._paid else float(entry.get("reward", 0))
                self._paid |= {number}
                if entry.get("done"):
                    return Reply(done=True, reward=reward)
                answer = random.Random(f"user/{self._task.id}/{self._turn}").choice(entry["say"])
                return Reply((Message("user", answer),), reward=reward)
        return Reply((Message("user", self.otherwise),))


def _script(task: Task) -> Sequence[Mapping[str, Any]]:
    script: Any = task.metadata.get("script")
    try:
        for entry in script:
            for texts in [entry["when"]] if entry.get("done") else [entry["when"], entry["say"]]:
                if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                    raise TypeError("`when` and `say` are lists of texts")
            float(entry.get("reward", 0))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TaskError(
            f"task {task.id}: environment=user_simulator needs a `script` in its metadata, a list such as "
            f'[{{"when": ["name"], "say": ["Ann."], "reward": 0.5}}], got {script!r:.200} '
            f"({type(error).__name__}: {error})"
        ) from error
    return script
