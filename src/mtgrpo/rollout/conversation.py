"""The one turn loop: context -> completion -> message -> environment -> next context, until the conversation ends."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Any, SupportsFloat, cast

from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser, Conversation, Step, When, how_many_fit, messages_of, newest
from mtgrpo.condensers.none import Whole
from mtgrpo.environments import Environment, Opening, Reply, copied
from mtgrpo.errors import POLICY_ERROR, REFUSED, ConfigError, PolicyError
from mtgrpo.parts.extension import awaited, misgiven, place
from mtgrpo.runtime.text import head_and_tail
from mtgrpo.types import (
    Attend,
    Finish,
    Limits,
    Message,
    Sample,
    Sampling,
    Status,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

CONDENSE = ToolSpec(
    "condense", "Make room: forget the older part of this conversation.", {"type": "object", "properties": {}}
)
CHARS_PER_TOKEN = 16  # more than a tokenizer makes into one on average; an answer of more exceeds max_tool_tokens


def visible_tools(tools: tuple[ToolSpec, ...], condenser: Condenser) -> tuple[ToolSpec, ...]:
    """The tools that the model gets: the environment's, and `condense` where it may request that.

    Raises ConfigError where both have the same name.
    """
    if not condenser.active or condenser.when is not When.on_request:
        return tools
    if any(tool.name == CONDENSE.name for tool in tools):
        raise ConfigError(f"condenser.when=on_request: the environment has its own tool {CONDENSE.name}; rename it")
    return (*tools, CONDENSE)


class TemplateRefusalError(ConfigError):
    """The chat template refuses how a conversation goes on, whatever the policy says in it."""


class _LimitError(Exception):
    """A limit was reached, or the template has REFUSED; the message is its name."""


async def run_rollout(
    task: Task,
    environment: Environment,
    chat: Chat,
    sample: Sample,
    sampling: Sampling,
    limits: Limits,
    condenser: Condenser | None = None,
    attend: Attend | None = None,
) -> Trajectory:
    """Run one conversation about `task`.

    Reaching a limit ends it with status TRUNCATED and the limit's name as the reason; so do a PolicyError, and a chat
    template that refuses what the policy said. What the environment raises otherwise is not caught here: a failure is
    not an outcome of the policy. Raises ConfigError for a condenser whose budget does not hold the opening, or that
    gives other messages than it may, and TemplateRefusalError.
    """
    trajectory = Trajectory(copied(task))  # a reward may change what it finds, as tools may
    sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
    async with environment.conversation(task) as (running, opening):
        if tuple(opening.messages) != task.messages:
            trajectory.opening = tuple(opening.messages)
        state = _State(trajectory, opening, chat, sample, sampling, limits, condenser or Whole(), attend)
        try:
            await _converse(state, running)
        except _LimitError as limit:
            trajectory.status, trajectory.reason = Status.TRUNCATED, str(limit)
        except PolicyError:
            trajectory.status, trajectory.reason = Status.TRUNCATED, POLICY_ERROR
        return trajectory


async def _converse(state: _State, environment: Environment) -> None:
    """Turn by turn, until the environment has done or a limit is reached: then _LimitError."""
    for number in range(1, environment.max_turns + 1):
        turn = await state.turn()
        if environment.settled(turn.message, turn.logprobs):
            return
        message, done = state.split(turn.message)
        reply = await _step(environment, message, state.trajectory) if message is not None else Reply()
        turn.observations, turn.paid = (*reply.messages, *done), float(reply.reward)
        if reply.done:
            return
        if number < environment.max_turns:
            await state.go_on(turn, reply.messages, done, environment.max_tool_tokens)
    raise _LimitError("max_turns")


async def _step(environment: Environment, message: Message, trajectory: Trajectory) -> Reply:
    """The environment's answer, cut where it is so long that to tokenise it would hold up all conversations."""
    began = time.perf_counter()
    reply: Any = await awaited(environment.step, message)
    trajectory.tool_s += time.perf_counter() - began
    paid: Any = reply.reward if isinstance(reply, Reply) else None
    if not isinstance(paid, SupportsFloat) or not math.isfinite(paid):
        raise misgiven(environment.step, reply, "give a Reply with a finite reward")
    trajectory.calls = (*trajectory.calls, *reply.calls)
    most = environment.max_tool_tokens * CHARS_PER_TOKEN
    messages = (dataclasses.replace(answer, content=head_and_tail(answer.content, most)) for answer in reply.messages)
    return dataclasses.replace(reply, messages=tuple(messages))


@dataclass(eq=False)
class _State:
    """One conversation while it runs: its messages so far, and the context of the next turn."""

    trajectory: Trajectory
    opening: Opening
    chat: Chat
    sample: Sample
    sampling: Sampling
    limits: Limits
    condenser: Condenser
    attend: Attend | None

    def __post_init__(self) -> None:
        self._tools = self.trajectory.tools = visible_tools(self.opening.tools, self.condenser)
        self._opening = self.opening.messages
        self._all: list[Step] = []  # the messages since the opening
        self._steps: list[Step] = []  # what of it the present context holds
        self._set_context(self._open(self._opening))
        self._tool_tokens = 0
        most = max(1, self.limits.context_tokens - self.sampling.max_new_tokens)
        self._budget = min(self.condenser.max_condensed_tokens or most, most)
        self._longest_aside = max(1, (self._budget - len(self._context)) // 2)
        if self.condenser.active and len(self._context) > self._budget:
            raise ConfigError(
                f"condenser {self.condenser.name}: system prompt and task {self.trajectory.task.id} have "
                f"{len(self._context)} tokens, its budget is {self._budget}; set condenser.max_condensed_tokens or "
                "environment.max_context_length higher, or sampling.max_new_tokens lower"
            )

    def split(self, message: Message) -> tuple[Message | None, tuple[Message, ...]]:
        """What is left of a message for the environment, if anything, and the answer to a request to condense."""
        calls = tuple(call for call in message.tool_calls if call.name != CONDENSE.name)
        if CONDENSE not in self._tools or len(calls) == len(message.tool_calls):
            return message, ()
        rest = dataclasses.replace(message, tool_calls=calls) if calls else None
        return rest, (Message("tool", "done", name=CONDENSE.name),)

    async def turn(self, auxiliary: bool = False) -> Turn:
        """Sample the next turn. _LimitError without room, or where a limit cuts it (auxiliary turns may be cut)."""
        trajectory = self.trajectory
        others = {"max_condensed_tokens": self._longest_aside} if auxiliary else {}
        limit, room = self.limits.of_turn(self.sampling, len(self._context), trajectory.sampled_tokens, **others)
        if room < 1:
            raise _LimitError(limit)
        began = time.perf_counter()
        completion = await self.sample(self._context, dataclasses.replace(self.sampling, max_new_tokens=room))
        ended = time.perf_counter()
        trajectory.sample_s += ended - began
        message = self.chat.parse(completion.tokens, self._tools)
        turn = Turn.of(completion, message, self._new, self._parent, auxiliary)
        turn.asked_s, turn.ended_s = began, ended
        trajectory.turns.append(turn)
        if completion.finish is Finish.LENGTH and not auxiliary:
            raise _LimitError(limit)
        return turn

    async def go_on(self, turn: Turn, answers: Sequence[Message], done: Sequence[Message], most: int) -> None:
        """Make the context of the next turn, after `turn` was answered; condense it where that is due.

        done: the answer to a request to condense, which no condensed context holds. Raises _LimitError when the
        environment has added more than `most` tokens at once, or too many in all.
        """
        if answers or not done:
            said, _ = self.split(turn.message)
            self._all.append((said or turn.message, *answers))
        self._steps.append((turn.message, *answers, *done))
        extension = self._extension()
        if extension is not None:
            context, fresh = [*self._context, *turn.output, *extension], len(extension)
        else:
            context = self._open(messages_of(self._opening, self._steps))
            fresh = sum(len(self.chat.encode(Message("assistant", answer.content))) for answer in answers)
        self._tool_tokens += fresh
        if fresh > most:
            raise _LimitError("max_tool_tokens")
        if self._tool_tokens > self.limits.tool_tokens:
            raise _LimitError("max_trajectory_tool_tokens")
        due = done or self.condenser.when is When.every_turn or len(context) > self._budget
        if not (self.condenser.active and due and await self._condense(len(context))):
            self._set_context(context, extension)

    def _set_context(self, tokens: list[int], extension: list[int] | None = None) -> None:
        """The context of the next turn: the last turn and its `extension`; None = it begins a segment."""
        self._context, self._new = tokens, tokens if extension is None else extension
        self._parent = -1 if extension is None else len(self.trajectory.turns) - 1

    async def _condense(self, tokens: int) -> bool:
        """Let the condenser choose the messages of the next context; false when it leaves its `tokens` as they are."""
        conversation = Conversation(
            opening=self._opening,
            steps=tuple(self._all),
            budget=self._budget,
            count=self._count,
            ask=lambda question: self._ask(conversation, question),
            attention=self._attention,
        )
        trajectory = self.trajectory
        began, sampled_s = time.perf_counter(), trajectory.sample_s
        messages: Any = await awaited(self.condenser.condense, conversation)
        if not isinstance(messages, list) or not all(isinstance(one, Message) for one in cast("list[Any]", messages)):
            raise misgiven(self.condenser.condense, messages, "give a list of messages")
        trajectory.condense_s += time.perf_counter() - began - (trajectory.sample_s - sampled_s)
        has_asked = trajectory.turns[-1].auxiliary
        if messages == messages_of(self._opening, self._steps) and not has_asked and tokens <= self._budget:
            return False
        context = self._open(messages) if messages else []
        self._check(messages, len(context), tokens, has_asked)
        self._steps = _steps(messages[len(self._opening) :])
        self._set_context(context)
        trajectory.condensed += 1
        trajectory.tokens_before += tokens
        trajectory.tokens_after += len(context)
        return True

    async def _ask(self, whole: Conversation, question: Message) -> Message:
        """What the policy says to `question` after all of this, in a turn that the environment never sees."""
        turn = self.trajectory.turns[-1]
        if turn.auxiliary:
            raise ConfigError(f"condenser {self.condenser.name} asked the policy twice; it may once")
        extension = self._extension(question)
        context = [*self._context, *turn.output, *(extension or [])]
        room = self.limits.context_tokens - self._longest_aside
        if extension is not None and len(context) <= room:
            self._set_context(context, extension)
        else:  # as much of the end as there is room for

            def count(messages: Sequence[Message]) -> int:
                return self._count([*messages, question])

            present = dataclasses.replace(whole, steps=tuple(self._steps), budget=room, count=count)
            self._set_context(self._open([*newest(present, present.steps), question]))
        return (await self.turn(auxiliary=True)).message

    async def _attention(self, steps: Sequence[Step]) -> list[float]:
        """The shares of attention that `steps` get at the end of a context of the newest of them, the others 0."""
        if self.attend is None:
            raise ConfigError(f"condenser {self.condenser.name} needs attention, which this engine does not measure")
        held = steps[len(steps) - how_many_fit(self._opening, steps, self._count, self.limits.context_tokens) :]
        messages = messages_of(self._opening, held)
        tokens, counts = self._open(messages), [*accumulate(map(len, held), initial=len(self._opening))][:-1]
        # A template may write the last message otherwise than those before: a step ends where the contexts differ.
        ends = [*accumulate(self.chat.shared(messages, counts, self._tools), max), len(tokens)]
        return [0.0] * (len(steps) - len(held)) + await self.attend(tokens, list(pairwise(ends)))

    def _check(self, messages: Sequence[Message], tokens: int, before: int, has_asked: bool) -> None:
        """Raises ConfigError for what a condenser may not do; that a summary is too long is no fault of its own."""
        name, where = f"condenser {self.condenser.name}", place(self.condenser.condense)
        if not messages:
            raise ConfigError(f"{name} gave no messages; it must give the opening at least{where}")
        if tuple(messages[: len(self._opening)]) != tuple(self._opening):
            raise ConfigError(f"{name} changed system prompt or task; its messages must begin with the opening{where}")
        if tokens > max(before, self._budget) and not has_asked:
            raise ConfigError(f"{name} made a context of {tokens} tokens from one of {before}; it must not grow{where}")
        if tokens > self._budget:
            raise _LimitError("max_condensed_tokens")

    def _open(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self.chat.open(messages, self._tools)
        except ConfigError as error:
            since = messages[len(self._opening) :]
            if not since:
                raise
            try:
                self.chat.open([*self._opening, *_plain(since)], self._tools)
            except ConfigError:
                raise TemplateRefusalError(*error.args) from error
            raise _LimitError(REFUSED) from error

    def _count(self, messages: Sequence[Message]) -> int:
        return len(self._open(messages))

    def _extension(self, *question: Message) -> list[int] | None:
        """The tokens from the last output to the next turn, `question` included; None: they extend no such context."""
        *before, (message, *answers) = self._steps
        history = [*messages_of(self._opening, before), message]
        ended = self.trajectory.turns[-1].output[-1]
        return self.chat.extend(history, [*answers, *question], self._tools, ended)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """As if the policy had said the simplest that has such answers: a call where a tool does, a text elsewhere."""
    plain: list[Message] = []
    for message, after in zip_longest(messages, messages[1:]):
        calls = (ToolCall(CONDENSE.name, {}),) if after and after.role == "tool" else ()
        if message.role == "assistant":
            plain.append(Message("assistant", "" if calls else "text", tool_calls=calls))
        elif not (message.role == "tool" and plain and plain[-1].role == "tool"):  # of several calls it is the first
            plain.append(message)
    return plain


def _steps(messages: Sequence[Message]) -> list[Step]:
    """The messages after the opening, cut before each message of the model."""
    steps: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant" or not steps:
            steps.append([])
        steps[-1].append(message)
    return [tuple(step) for step in steps]
