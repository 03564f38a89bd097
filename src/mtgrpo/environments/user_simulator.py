"""A user who is played by a script."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.types import Message, Task


@dataclass
class UserSimulator(Environment):
    """A user who answers by the script in the task's metadata, the same for the same task whatever else goes on.

    `script` is a list of {"when": PATTERN, "say": TEXT or TEXTS, "reward": NUMBER, "done": true or false}. The first
    entry whose regular expression is found in the model's message answers it: with the text, or one of the texts that
    is drawn by the task's id, and pays its `reward` the first time. `done` ends the conversation. Where none is found
    the user says `otherwise`.
    """

    pays_turns = True

    otherwise: str = "I do not understand. What do you want to know?"

    async def start(self, task: Task) -> Opening:
        """Learn the script. Raises ConfigError where it cannot be read."""
        self._task, self._turn, self._paid = task, 0, frozenset[int]()
        self._script = _script(task)
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        self._turn += 1
        for number, entry in enumerate(self._script):
            if re.search(entry["when"], message.content):
                reward = 0.0 if number in self._paid else float(entry.get("reward", 0))
                self._paid |= {number}
                texts = entry.get("say", "")
                draw = random.Random(f"user/{self._task.id}/{self._turn}")
                text = texts if isinstance(texts, str) else draw.choice(cast("Sequence[str]", texts))
                done = bool(entry.get("done"))
                return Reply(() if done else (Message("user", text),), done, reward)
        return Reply((Message("user", self.otherwise),))


def _script(task: Task) -> Sequence[Mapping[str, Any]]:
    script: Any = task.metadata.get("script")
    try:
        for entry in script:
            re.compile(entry["when"])
            float(entry.get("reward", 0))
            assert entry.get("done") or entry["say"]
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError, re.error) as error:
        raise ConfigError(
            f"task {task.id}: its metadata must have a `script` for environment=user_simulator, a list such as "
            f'[{{"when": "name", "say": "Ann", "reward": 0.5}}], got {script!r:.200} ({type(error).__name__}: {error})'
        ) from error
    return script
