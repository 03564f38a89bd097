"""Seeds of games that an environment plays."""

from dataclasses import dataclass

from mtgrpo.parts import Text
from mtgrpo.tasks import Generated, Split, hashed, user
from mtgrpo.types import Task


@dataclass
class Game(Generated):
    """An endless stream of seeds, for environment=gymnasium and environment=textarena; `eval` has seeds of its own.

    What the game itself says stands below the prompt.
    """

    prompt: Text = "Play this game."
    seed: int = 0  # another seed gives other games

    def task(self, split: Split, seed: int, index: int) -> Task:
        name = f"game/{self.seed}/{seed}/{split.value}/{index}"
        return Task(name, self.with_prompt(user(self.prompt)), metadata={"seed": hashed(name) % 2**31})
