"""Demonstrations: conversations that are already written, laid out in turns as if the policy had sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, Conversation
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.rollout.conversation import Limits, run_rollout
from mtgrpo.types import SUMMARY, Attend, Completion, Finish, Message, Sampling, Task, Trajectory, Turn

UNLIMITED = 2**40  # tokens


def demonstrate(task: Task, opening: Opening, messages: Sequence[Message], chat: Chat) -> Trajectory:
    """`messages` are what the assistant and the tools say after the opening; log-probabilities are set to 0."""
    messages = [message for message in messages if message.name != SUMMARY]  # no condenser requests one
    trajectory = Trajectory(task)
    history = list(opening.messages)
    new_context, parent = chat.open(history, opening.tools), -1
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        output = chat.encode(message)
        count = len(output)
        turn = Turn(new_context, output, [0.0] * count, [0] * count, Finish.STOP, message, parent)
        trajectory.turns.append(turn)
        answers = _answers(messages[index + 1 :])
        turn.observations = answers
        history.append(message)
        if not answers:
            break
        added = chat.extend(history, answers, opening.tools)
        history.extend(answers)
        parent = len(trajectory.turns) - 1 if added is not None else -1
        new_context = chat.open(history, opening.tools) if added is None else added
    return trajectory


async def demonstrate_condensed(
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

    Contexts are condensed as in a rollout with the same two limits. Messages of the assistant whose name is "summary"
    answer a condenser that asks, and are left out where none does. Raises ConfigError where one asks and there is none.
    """
    script = _Script(task, opening, list(messages), chat, condenser)
    limits = Limits(context_tokens, sampled_tokens=UNLIMITED, tool_tokens=UNLIMITED)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    environment, asking = _ScriptedEnvironment(script=script), _ScriptedCondenser(script)
    return await run_rollout(task, environment, chat, script.sample, sampling, limits, asking, attend)


@dataclass
class _Script:
    """The messages that are left."""

    task: Task
    opening: Opening
    messages: list[Message]
    chat: Chat
    condenser: Condenser
    asked: bool = False  # the next message answers the condenser

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
class _ScriptedEnvironment(Environment):
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


class _ScriptedCondenser(Condenser):
    """The condenser of the script, which notes when it requests a summary."""

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


def _answers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """What stands before the assistant's next message."""
    end = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return tuple(messages[:end])
