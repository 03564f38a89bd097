"""A conversation that is already written, played with a condenser as if the policy had said it: for demonstrations.

Where nothing is condensed, `replay` lays it out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtgrpo.condensers import Condenser, Conversation
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.extension import ConfigError
from mtgrpo.rollout.chat import Chat
from mtgrpo.rollout.play import Limits, play
from mtgrpo.types import SUMMARY, Attend, Completion, Finish, Message, Sampling, Task, Trajectory

UNLIMITED = 2**40  # tokens


async def rehearse(
    task: Task,
    opening: Opening,
    messages: Sequence[Message],
    chat: Chat,
    condenser: Condenser,
    context_tokens: int,
    max_new_tokens: int,
    attend: Attend | None = None,
) -> Trajectory:
    """`messages` are what the assistant and the tools say after the opening; log-probabilities are set to 0.

    Contexts are condensed as in play with the same two limits. Messages of the assistant whose name is "summary" answer
    a condenser that asks, and are left out where none does. Raises ConfigError where one asks and there is none.
    """
    script = _Script(task, opening, list(messages), chat, condenser)
    limits = Limits(context_tokens, sampled_tokens=UNLIMITED, tool_tokens=UNLIMITED)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return await play(task, _Told(script=script), chat, script.sample, sampling, limits, _Asking(script), attend)


@dataclass
class _Script:
    """What is still to be said."""

    task: Task
    opening: Opening
    messages: list[Message]
    chat: Chat
    condenser: Condenser
    asked: bool = False  # the next thing said answers the condenser

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        """The next message of the assistant, as an engine would have sampled it."""
        while not self.asked and self.messages[0].name == SUMMARY:
            self.messages.pop(0)
        message = self.messages.pop(0)
        if self.asked and message.name != SUMMARY:
            raise ConfigError(
                f"condenser {self.condenser.name} asks for a summary, and the demonstration of task "
                f"{self.task.id} has none; choose another condenser or sft.steps=0"
            )
        self.asked = False
        output = self.chat.encode(replace(message, name=""))
        return Completion(output, [0.0] * len(output), [0] * len(output), Finish.STOP)


@dataclass
class _Told(Environment):
    """Answers what is written."""

    max_turns: int = 2**30
    max_tool_tokens: int = 2**40
    script: _Script | None = None

    async def start(self, task: Task) -> Opening:
        assert self.script is not None
        return self.script.opening

    async def step(self, message: Message) -> Reply:
        assert self.script is not None
        left = self.script.messages
        end = next((i for i, said in enumerate(left) if said.role == "assistant"), len(left))
        answers, self.script.messages = tuple(left[:end]), left[end:]
        return Reply(answers, done=not answers or not self.script.messages)


class _Asking(Condenser):
    """The condenser of the script, which is told when it asks."""

    def __init__(self, script: _Script) -> None:
        super().__init__(script.condenser.when, script.condenser.max_condensed_tokens)
        self._script = script

    @property
    def name(self) -> str:
        return self._script.condenser.name

    async def condense(self, conversation: Conversation) -> list[Message]:
        async def ask(question: Message) -> Message:
            self._script.asked = True
            return await conversation.ask(question)

        return await self._script.condenser.condense(replace(conversation, ask=ask))
