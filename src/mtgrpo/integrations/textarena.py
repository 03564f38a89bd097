"""Games for one player of the package textarena."""

import random
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtgrpo.environments import Environment, Opening, Reply, below, seed_of
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Code
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.types import Message, Task


@dataclass
class TextArena(Environment):
    """A game of textarena for one player, such as FrozenLake-v0 or Blackjack-v0: one game for each seed of task=game.

    The model's message is its move, in the form that the game asks for; what the game says is the answer. At the end
    the game's reward is paid: reward=environment.
    """

    pays_turns = True

    max_turns: int = 20
    game: Code = "FrozenLake-v0"

    async def start(self, task: Task) -> Opening:
        """Begin the game of the task's seed. Raises ConfigError for a game that is unknown or not for one player."""
        refuse_without_package("textarena", "environment=textarena")
        import textarena  # noqa: PLC0415  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

        with self._own_random(random.Random(seed_of(task)).getstate()):
            try:
                self._game: Any = textarena.make(f"{self.game}-raw")  # its messages one by one, not all at every turn
                self._game.reset(num_players=1, seed=seed_of(task))
            except Exception as error:  # games check as they like, and some do not load on every Python
                why = " ".join(f"{type(error).__name__}: {error}".replace("*", "").split())[:300]
                raise ConfigError(f"environment.game={self.game} does not begin for one player: {why}") from error
            self._own = textarena.ObservationType.PLAYER_ACTION
            return below(task, self._said())

    async def step(self, message: Message) -> Reply:
        with self._own_random(self._random):
            done, _ = self._game.step(re.sub(r"(\d{99})\d+", r"\1", message.content))  # int() refuses longer ones
            if not done:
                return Reply((Message("user", self._said()),))
            rewards, _ = self._game.close()
            return Reply(done=True, reward=float(rewards[0]))

    def _said(self) -> str:
        """What the game has said since it was last asked."""
        _, said = self._game.get_observation()
        return "\n".join(text for _, text, kind in said if kind is not self._own and isinstance(text, str)).strip()

    @contextmanager
    def _own_random(self, state: Any) -> Generator[None]:
        """Python's global generator, from which games draw, is this game's own meanwhile, and then as it was."""
        before = random.getstate()
        random.setstate(state)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)
