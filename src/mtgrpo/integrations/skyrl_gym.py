"""Environments written for SkyRL, by the package skyrl-gym."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Code, Reach
from mtgrpo.runtime.isolation import run_in_thread
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.types import Message, Task


@dataclass
class SkyRLGym(Environment):
    """An environment of skyrl-gym, its own or one that is registered: a row of SkyRL's data is a task.

    The row's columns beside the prompt are the environment's extras, such as reward_spec; `max_turns` is told it too.
    Its rewards are those of the turns: reward=environment. A turn stays as it was sampled: what an environment would
    cut off it (`postprocessed_action`) is not.
    """

    pays_turns = True

    game: Code = "gsm8k"  # its id; `MODULE:ID` imports the module that registers it
    settings: Annotated[Any, Reach.code] = None  # its env_config, such as {search_url: ..., topk: 3}

    async def start(self, task: Task) -> Opening:
        """Make it for this task. Raises ConfigError where it does not take the task's columns."""
        self._game: Any = None
        refuse_without_package("skyrl_gym", "environment=skyrl_gym")
        import skyrl_gym  # noqa: PLC0415  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

        settings = SimpleNamespace(**(self.settings or {}))
        extras = {"max_turns": self.max_turns, **task.metadata}
        try:
            self._game = skyrl_gym.make(self.game, env_config=settings, extras=extras)
            said, _ = self._game.init([{"role": one.role, "content": one.content} for one in task.messages])
        except Exception as error:  # environments check as they like
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"environment.game={self.game} cannot be made for task {task.id}: {why}") from error
        return Opening(_read(said))

    async def step(self, message: Message) -> Reply:
        """Its observations; it runs in a thread, for it may wait for a server."""
        found = await run_in_thread(lambda: self._game.step(message.content))
        done = bool(found["done"])
        return Reply(() if done else _read(found["observations"]), done, float(found["reward"]))

    async def stop(self) -> None:
        if self._game is not None:
            await run_in_thread(self._game.close)


def _read(said: list[dict[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message(one["role"], one["content"]) for one in said)
