"""Text games of the package gymnasium."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from mtgrpo.environments import Environment, Opening, Reply, below, seed_of
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Code, Reach, Text
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.types import CallOutcome, CallRecord, Message, Task, ToolSpec

_NAMES = {
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
}
_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)  # coloured by the game, such as where the player stands
_TOOL = "act"


@dataclass
class Gymnasium(Environment):
    """A game of gymnasium with numbered actions, such as its toy texts: one game for each seed of task=game.

    The model sees what the game draws as text, with marks in brackets, else its observation. The last action that a
    message names is taken. The game's rewards are those of the turns: reward=environment. A task's metadata may have
    `settings` of its own, such as a map.
    """

    pays_turns = True

    max_turns: int = 20
    game: Code = "FrozenLake-v1"
    settings: Annotated[Any, Reach.code] = None  # of the game: {is_slippery: false}
    actions: list[Text] = field(default_factory=list[str])  # their names, in the game's order; [] = those of toy texts
    tool: bool = False  # the model calls a tool, act(action), in place of naming the action

    def __post_init__(self) -> None:
        super().__post_init__()
        self._names = self.actions or next((names for game, names in _NAMES.items() if self.game.startswith(game)), [])
        if not self._names:
            raise ConfigError(f"environment.game={self.game}: name its actions: 'environment.actions=[first,second]'")
        self._named = re.compile(rf"\b({'|'.join(map(re.escape, self._names))})\b", re.IGNORECASE)

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        properties = {"action": {"type": "string", "enum": self._names}}
        schema = {"type": "object", "properties": properties, "required": ["action"]}
        return (ToolSpec(_TOOL, "Take an action.", schema),) if self.tool else ()

    async def start(self, task: Task) -> Opening:
        """Begin the game of the task's seed. Raises ConfigError for a game that cannot be made or played so."""
        self._game: Any = None
        refuse_without_package("gymnasium", "environment=gymnasium")
        import gymnasium  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        settings = {**(self.settings or {}), **task.metadata.get("settings", {})}
        try:
            self._game = gymnasium.make(self.game, **settings)
            if "ansi" in self._game.metadata["render_modes"]:
                self._game.close()
                self._game = gymnasium.make(self.game, render_mode="ansi", **settings)
        except Exception as error:  # games check their settings as they like
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"environment.game={self.game} with settings {settings} cannot be made: {why}") from error
        if getattr(self._game.action_space, "n", None) != len(self._names):
            raise ConfigError(
                f"environment.game={self.game} has the actions {self._game.action_space}, named are {self._names}: "
                "name each of a numbered row of actions with environment.actions"
            )
        return below(task, self._seen(self._game.reset(seed=seed_of(task))[0]), self.tool_specs)

    async def step(self, message: Message) -> Reply:
        action, calls = self._action(message), max(1, len(message.tool_calls)) if self.tool else 0
        if action is None:
            how = " with one call of the tool act" if self.tool else ""
            refused = (CallRecord(_TOOL, CallOutcome.refused),) * calls
            return Reply((self._answer(f"error: say one of {', '.join(self._names)}{how}"),), calls=refused)
        observation, reward, terminated, truncated, _ = self._game.step(action)
        done = bool(terminated or truncated)
        messages = () if done else (self._answer(self._seen(observation)),)
        return Reply(messages, done, float(reward), (CallRecord(_TOOL),) * calls)

    async def stop(self) -> None:
        if self._game is not None:
            self._game.close()

    def _answer(self, text: str) -> Message:
        return Message("tool", text, name=_TOOL) if self.tool else Message("user", text)

    def _action(self, message: Message) -> int | None:
        """The number of the action that the model takes; None where it names none."""
        text = message.content
        if self.tool:
            calls = message.tool_calls
            text = str(calls[0].arguments.get("action")) if len(calls) == 1 and calls[0].name == _TOOL else ""
        found = self._named.findall(text)
        return [name.lower() for name in self._names].index(found[-1].lower()) if found else None

    def _seen(self, observation: Any) -> str:
        drawn = self._game.render() if self._game.render_mode == "ansi" else observation
        return _MARKED.sub(r"[\1]", str(drawn)).strip("\n")
