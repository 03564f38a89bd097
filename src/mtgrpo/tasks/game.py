"""Seeds of games that an environment plays."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.tasks import Generated, Split
from mtgrpo.tasks.stream import hashed
from mtgrpo.types import Message, Task


@dataclass
class Game(Generated):
    """An endless stream of seeds, for environment=gymnasium and environment=textarena; `eval` has seeds of its own.

    What the game itself says stands below the prompt.
    """

    prompt: str = "Play this game."
    seed: int = 0  # another seed gives other games

    def task(self, split: Split, seed: int, index: int) -> Task:
        """A seed."""
        name = f"game/{self.seed}/{seed}/{split.value}/{index}"
        prompt = self.with_prompt((Message("user", self.prompt),))
        return Task(name, prompt, metadata={"seed": hashed(name) % 2**31})
