"""Demonstrations: conversations that are already written, laid out in turns as if the policy had sampled them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, Conversation
from mtgrpo.condensers.none import Whole
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import POLICY_ERROR, REFUSED, ConfigError, TaskError, meant
from mtgrpo.rollout.conversation import CONDENSE, TemplateRefusalError, run_rollout
from mtgrpo.types import SUMMARY, UNLIMITED, Attend, Completion, Finish, Limits, Message, Sampling, Task, Trajectory


async def laid_out(
    task: Task, messages: Sequence[Message], environment: Environment, chat: Chat, *contexts: Any
) -> Trajectory:
    """As `demonstrate`, which gets `contexts`, after what `environment` opens with."""
    async with environment.conversation(task) as (_, opening):
        pass  # what it opens with is all that is needed
    return await demonstrate(task, opening, messages, chat, *contexts)


def refused_calls(example: Trajectory, environment: Environment) -> tuple[str, bool]:
    """Why no tool of `environment` takes a call of a demonstration, "" where all are taken; and whether one is taken.

    Where the environment offers none, a call counts as taken: it is text alone.
    """
    offered, refused = [tool.name for tool in example.tools], list[str]()
    calls = [call for turn in example.turns for call in turn.message.tool_calls if call.name != CONDENSE.name]
    for call in calls:
        why = ""
        if call.name not in offered:
            why = f"there is no such tool; {meant(call.name, offered)}the tools are: {', '.join(offered) or 'none'}"
        elif type(environment) is ToolUse and any(call.name == tool.name for tool in environment.tool_specs):
            why = environment.refusal(call)
        if why:
            refused.append(f"calls {call.name}({', '.join(call.arguments)}): {why}")
    first = f"the demonstration of task {example.task.id} {refused[0]}" if refused else ""
    return first, not offered or len(refused) < len(calls)


def written(message: Message, chat: Chat) -> Completion:
    """As if `message` had been sampled."""
    output = chat.encode(replace(message, name=""))
    return Completion(output, [0.0] * len(output), [0] * len(output), Finish.STOP)


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
    there is none, and TaskError where the messages cannot be laid out.
    """
    condenser = condenser or Whole()
    left = [message for message in messages if condenser.active or message.name != SUMMARY]
    script = _Script(task, left, chat, condenser)
    limits = Limits(context_tokens if condenser.active else UNLIMITED)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    world = Scripted(opening, left)
    try:
        shown = unrefused(await run_rollout(task, world, chat, script.sample, sampling, limits, script, attend))
    except TemplateRefusalError as error:
        raise TaskError(*error.args) from error
    if shown.reason == POLICY_ERROR:
        raise TaskError(f"the condenser cannot read the conversation about task {task.id}")
    return shown


def unrefused(shown: Trajectory) -> Trajectory:
    """What was written and not sampled. Raises TaskError where the chat template refuses it."""
    if shown.reason == REFUSED:
        raise TaskError(
            f"the chat template refuses how the conversation about task {shown.task.id} goes on; choose another one "
            "with chat.template=chatml or chat.template=PATH"
        )
    return shown


class _Script(Condenser):
    """Samples the messages that are left. As the condenser it notes when the one that it stands for asks."""

    def __init__(self, task: Task, messages: list[Message], chat: Chat, condenser: Condenser) -> None:
        super().__init__(condenser.when, condenser.max_condensed_tokens)
        self._task, self._messages, self._chat, self._condenser = task, messages, chat, condenser
        self.active = condenser.active
        self._asks = False  # the condenser does: the next message answers it

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        """The next message of the assistant, as an engine would have sampled it."""
        while not self._asks and self._messages[0].name == SUMMARY:
            self._messages.pop(0)
        message = self._messages.pop(0)
        if self._asks and message.name != SUMMARY:
            raise ConfigError(
                f"condenser {self.name} asks for a summary, and the demonstration of task {self._task.id} has none; "
                "choose another condenser or sft.steps=0"
            )
        self._asks = False
        return written(message, self._chat)

    @property
    def name(self) -> str:
        return self._condenser.name

    async def condense(self, conversation: Conversation) -> list[Message]:
        async def ask(question: Message) -> Message:
            self._asks = True
            return await conversation.ask(question)

        return await self._condenser.condense(replace(conversation, ask=ask))


class Scripted(Environment):
    """Answers what is written."""

    def __init__(self, opening: Opening, messages: list[Message]) -> None:
        super().__init__(max_turns=UNLIMITED, max_tool_tokens=UNLIMITED)
        self._opening, self._messages = opening, messages

    async def start(self, task: Task) -> Opening:
        self._name = task.id
        return self._opening

    async def step(self, message: Message) -> Reply:
        """Raises TaskError where the assistant goes on with nothing between, after what would end the conversation."""
        answers = tuple(takewhile(lambda answer: answer.role != "assistant", self._messages))
        del self._messages[: len(answers)]
        if not (answers or message.tool_calls) and any(left.name != SUMMARY for left in self._messages):
            told = f"the demonstration of task {self._name} has two messages of the assistant in a row"
            raise TaskError(f"{told}, of which the first would end it: put them into one")
        return Reply(answers, done=not answers or not self._messages)
