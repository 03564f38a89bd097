"""Demonstrations: conversations that are already written, laid out in turns as if the policy had sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, Conversation
from mtgrpo.condensers.none import Whole
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.rollout.conversation import run_rollout
from mtgrpo.types import SUMMARY, UNLIMITED, Attend, Completion, Finish, Limits, Message, Sampling, Task, Trajectory


async def demonstrate(
    task: Task,
    opening: Opening,
    messages: Sequence[Message],
    chat: Chat,
    condenser: Condenser | None = None,
    context_tokens: int = UNLIMITED,
    max_new_tokens: int = 1,
    attend: Attend | None = None,
) -> Trajectory:
    """`messages` are what the assistant and the tools say after the opening; log-probabilities are set to 0.

    Contexts are condensed as in a rollout with the same two limits, if at all. Messages of the assistant whose name is
    "summary" answer a condenser that asks, and are left out where none does. Raises ConfigError where one asks and
    there is none.
    """
    condenser = condenser or Whole()
    script = _Script(task, opening, [m for m in messages if condenser.active or m.name != SUMMARY], chat, condenser)
    limits = Limits(context_tokens if condenser.active else UNLIMITED)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    environment, asking = _ScriptedEnvironment(script), _ScriptedCondenser(script)
    return await run_rollout(task, environment, chat, script.sample, sampling, limits, asking, attend)


@dataclass
class _Script:
    """The messages that are left."""

    task: Task
    opening: Opening
    messages: list[Message]
    chat: Chat
    condenser: Condenser
    asks: bool = False  # the condenser does: the next message answers it

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        """The next message of the assistant, as an engine would have sampled it."""
        while not self.asks and self.messages[0].name == SUMMARY:
            self.messages.pop(0)
        message = self.messages.pop(0)
        if self.asks and message.name != SUMMARY:
            raise ConfigError(
                f"condenser {self.condenser.name} asks for a summary, and the demonstration of task "
                f"{self.task.id} has none; choose another condenser or sft.steps=0"
            )
        self.asks = False
        output = self.chat.encode(replace(message, name=""))
        return Completion(output, [0.0] * len(output), [0] * len(output), Finish.STOP)


class _ScriptedEnvironment(Environment):
    """Answers what is written."""

    def __init__(self, script: _Script) -> None:
        super().__init__(max_turns=UNLIMITED, max_tool_tokens=UNLIMITED)
        self._script = script

    async def start(self, task: Task) -> Opening:
        return self._script.opening

    async def step(self, message: Message) -> Reply:
        messages = self._script.messages
        answers = tuple(takewhile(lambda answer: answer.role != "assistant", messages))
        del messages[: len(answers)]
        return Reply(answers, done=not answers or not messages)


class _ScriptedCondenser(Condenser):
    """The condenser of the script, which notes when it requests a summary."""

    def __init__(self, script: _Script) -> None:
        super().__init__(script.condenser.when, script.condenser.max_condensed_tokens)
        self._script = script

    @property
    def active(self) -> bool:
        return self._script.condenser.active

    @property
    def name(self) -> str:
        return self._script.condenser.name

    async def condense(self, conversation: Conversation) -> list[Message]:
        async def ask(question: Message) -> Message:
            self._script.asks = True
            return await conversation.ask(question)

        return await self._script.condenser.condense(replace(conversation, ask=ask))
