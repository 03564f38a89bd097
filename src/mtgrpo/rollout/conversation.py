"""The one turn loop: context -> completion -> message -> environment -> next context, until the conversation ends."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from mtgrpo.chat import Chat
from mtgrpo.chat.safe_tokenizer import shared_length
from mtgrpo.condensers import Condenser, Conversation, Step, When, how_many_fit, messages_of, newest
from mtgrpo.condensers.none import Whole
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.extension import awaited, misgiven, place
from mtgrpo.text import head_and_tail
from mtgrpo.types import Attend, Finish, Message, Sample, Sampling, Status, Task, ToolSpec, Trajectory, Turn

CONDENSE = ToolSpec(
    "condense", "Make room: forget the older part of this conversation.", {"type": "object", "properties": {}}
)


CHARS_PER_TOKEN = 16  # more than a tokenizer makes into one on average; an answer of more exceeds max_tool_tokens


@dataclass(frozen=True)
class Limits:
    """What one conversation may use, beside `environment.max_turns` and `sampling.max_new_tokens`."""

    context_tokens: int  # context and output of one turn together
    sampled_tokens: int  # the policy's, over the whole trajectory
    tool_tokens: int  # the environment's, over the whole trajectory


def visible_tools(tools: tuple[ToolSpec, ...], condenser: Condenser) -> tuple[ToolSpec, ...]:
    """The tools that the model gets: the environment's, and `condense` where it may request that.

    Raises ConfigError where both have the same name.
    """
    if not condenser.active or condenser.when is not When.on_request:
        return tools
    if any(tool.name == CONDENSE.name for tool in tools):
        raise ConfigError(
            f"condenser.when=on_request: the environment has a tool {CONDENSE.name} of its own; rename it"
        )
    return (*tools, CONDENSE)


class _LimitError(Exception):
    """A limit was reached; its name is the message."""


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

    Reaching a limit ends it with status TRUNCATED and the limit's name as the reason. What the environment raises is
    not caught here: a failure is not an outcome of the policy. Raises ConfigError for a condenser whose budget does not
    hold the opening, or that gives other messages than it may.
    """
    sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
    async with environment.conversation(task) as (running, opening):
        trajectory = Trajectory(task)
        if tuple(opening.messages) != task.messages:
            trajectory.opening = tuple(opening.messages)
        state = RolloutState(trajectory, opening, chat, sample, sampling, limits, condenser or Whole(), attend)
        try:
            await _converse(state, running)
        except _LimitError as limit:
            trajectory.status = Status.TRUNCATED
            trajectory.reason = str(limit)
        return trajectory


async def _converse(state: RolloutState, environment: Environment) -> None:
    """Turn by turn, until the environment has done or a limit is reached: then _LimitError."""
    trajectory = state.trajectory
    for spoken in range(1, environment.max_turns + 1):
        turn = await state.turn()
        if environment.settled(turn.message, turn.logprobs):
            return
        message, asked = state.requested(turn.message)
        reply: Any = Reply()
        if message is not None:
            began = time.perf_counter()
            reply = await awaited(environment.step, message)
            trajectory.tool_s += time.perf_counter() - began
        if not isinstance(reply, Reply) or not math.isfinite(reply.reward):
            raise misgiven(environment.step, reply, "give a Reply with a finite reward")
        most = environment.max_tool_tokens * CHARS_PER_TOKEN  # to tokenise far more would hold up all conversations
        messages = tuple(dataclasses.replace(one, content=head_and_tail(one.content, most)) for one in reply.messages)
        turn.observations, turn.paid = (*messages, *asked), float(reply.reward)
        trajectory.calls = (*trajectory.calls, *reply.calls)
        if reply.done:
            return
        if spoken < environment.max_turns:
            await state.go_on(turn, messages, environment.max_tool_tokens, asked)
    raise _LimitError("max_turns")


class RolloutState:
    """One conversation while it runs: its messages so far, and the context of the next turn."""

    def __init__(
        self,
        trajectory: Trajectory,
        opening: Opening,
        chat: Chat,
        sample: Sample,
        sampling: Sampling,
        limits: Limits,
        condenser: Condenser,
        attend: Attend | None,
    ) -> None:
        self.trajectory = trajectory
        self._chat, self._sample, self._sampling = chat, sample, sampling
        self._limits, self._condenser, self._attend = limits, condenser, attend
        self._tools = visible_tools(opening.tools, condenser)
        self._opening = opening.messages
        self._all: list[Step] = []  # the messages since the opening
        self._steps: list[Step] = []  # what of it the present context holds
        self._context = self._new = chat.open(opening.messages, self._tools)
        self._extends = False
        self._tool_tokens = 0
        most = max(1, limits.context_tokens - sampling.max_new_tokens)
        self._budget = min(condenser.max_condensed_tokens or most, most)
        self._longest_aside = max(1, (self._budget - len(self._context)) // 2)
        if condenser.active and len(self._context) > self._budget:
            raise ConfigError(
                f"condenser {condenser.name}: system prompt and task {trajectory.task.id} have "
                f"{len(self._context)} tokens, its budget is {self._budget}; set condenser.max_condensed_tokens or "
                "environment.max_context_length higher, or sampling.max_new_tokens lower"
            )

    def requested(self, message: Message) -> tuple[Message | None, tuple[Message, ...]]:
        """What is left of a message for the environment, if anything, and the answer to a request to condense."""
        calls = tuple(call for call in message.tool_calls if call.name != CONDENSE.name)
        if CONDENSE not in self._tools or len(calls) == len(message.tool_calls):
            return message, ()
        left = dataclasses.replace(message, tool_calls=calls) if calls else None
        return left, (Message("tool", "done", name=CONDENSE.name),)

    async def turn(self, auxiliary: bool = False) -> Turn:
        """Sample the next turn. _LimitError without room, or where a limit cuts it (auxiliary turns may be cut)."""
        sampling, limits, trajectory = self._sampling, self._limits, self.trajectory
        rooms = {
            "max_new_tokens": sampling.max_new_tokens,
            "max_context_length": limits.context_tokens - len(self._context),
            "max_trajectory_tokens": limits.sampled_tokens - trajectory.sampled_tokens,
        }
        if auxiliary:
            rooms["max_condensed_tokens"] = self._longest_aside
        limit = min(rooms, key=lambda name: rooms[name])
        if rooms[limit] < 1:
            raise _LimitError("max_context_length" if rooms["max_context_length"] < 1 else limit)
        began = time.perf_counter()
        completion = await self._sample(self._context, dataclasses.replace(sampling, max_new_tokens=rooms[limit]))
        trajectory.sample_s += time.perf_counter() - began
        parent = len(trajectory.turns) - 1 if self._extends else -1
        turn = Turn.of(completion, self._chat.parse(completion.tokens), self._new, parent, auxiliary)
        trajectory.turns.append(turn)
        if completion.finish is Finish.LENGTH and not auxiliary:
            raise _LimitError(limit)
        return turn

    async def go_on(self, turn: Turn, answers: Sequence[Message], most: int, asked: Sequence[Message] = ()) -> None:
        """Make the context of the next turn, after `turn` was answered; condense it where that is due.

        asked: the answer to a request to condense, which no condensed context holds. Raises _LimitError when the
        environment has added more than `most` tokens at once, or too many in all.
        """
        before, told = self._steps, (*answers, *asked)
        if answers:
            self._all.append((turn.message, *answers))
        self._steps = [*before, (turn.message, *told)]
        extension = self._extension(before, turn, told)
        whole = [*self._context, *turn.output, *extension] if extension is not None else self._open(self._messages())
        self._count_tool_tokens(len(extension) if extension is not None else self._spelled(answers), most)
        due = asked or self._condenser.when is When.every_turn or len(whole) > self._budget
        if self._condenser.active and due and await self._condense(before, turn, told, len(whole)):
            return
        self._context, self._extends = whole, extension is not None
        self._new = whole if extension is None else extension

    def _count_tool_tokens(self, fresh: int, most: int) -> None:
        self._tool_tokens += fresh
        if fresh > most:
            raise _LimitError("max_tool_tokens")
        if self._tool_tokens > self._limits.tool_tokens:
            raise _LimitError("max_trajectory_tool_tokens")

    async def _condense(self, before: Sequence[Step], turn: Turn, answers: Sequence[Message], tokens: int) -> bool:
        """Let the condenser choose the messages of the next context; false when it leaves them as they are."""

        async def ask(question: Message) -> Message:
            return await self._ask(conversation, before, turn, answers, question)

        conversation = Conversation(
            opening=self._opening,
            steps=tuple(self._all),
            budget=self._budget,
            count=self._count,
            ask=ask,
            attention=self._attention,
        )
        began, sampled_s = time.perf_counter(), self.trajectory.sample_s
        messages: Any = await awaited(self._condenser.condense, conversation)
        if not isinstance(messages, list):
            raise misgiven(self._condenser.condense, messages, "give a list of messages")
        self.trajectory.condense_s += time.perf_counter() - began - (self.trajectory.sample_s - sampled_s)
        asked = self.trajectory.turns[-1].auxiliary
        if messages == self._messages() and not asked and tokens <= self._budget:
            return False
        context = self._open(messages) if messages else []
        self._check(messages, len(context), tokens, asked)
        self._steps = _steps(messages[len(self._opening) :])
        self._context = self._new = context
        self._extends = False
        self.trajectory.condensed += 1
        self.trajectory.tokens_before += tokens
        self.trajectory.tokens_after += len(context)
        return True

    async def _ask(
        self, whole: Conversation, before: Sequence[Step], turn: Turn, answers: Sequence[Message], question: Message
    ) -> Message:
        """What the policy says to `question` after all of this, in a turn that the environment never sees."""
        if self.trajectory.turns[-1].auxiliary:
            raise ConfigError(f"condenser {self._condenser.name} asked the policy twice; it may once")
        extension = self._extension(before, turn, [*answers, question])
        context = [*self._context, *turn.output, *(extension or [])]
        room = self._limits.context_tokens - self._longest_aside
        if extension is not None and len(context) <= room:
            self._context, self._new, self._extends = context, extension, True
        else:  # as much of the end as there is room for
            steps = tuple(self._steps)

            def count(messages: Sequence[Message]) -> int:
                return len(self._open([*messages, question]))

            known = dataclasses.replace(whole, steps=steps, budget=room, count=count)
            self._context = self._new = self._open([*newest(known, steps), question])
            self._extends = False
        return (await self.turn(auxiliary=True)).message

    async def _attention(self, steps: Sequence[Step]) -> list[float]:
        """The shares of attention that `steps` get at the end of a context of the newest of them, the others 0."""
        if self._attend is None:
            raise ConfigError(f"condenser {self._condenser.name} needs attention, which this engine does not measure")
        held = steps[len(steps) - how_many_fit(self._opening, steps, self._count, self._limits.context_tokens) :]
        tokens = self._open(messages_of(self._opening, held))
        begun = (self._open(messages_of(self._opening, held[:count])) for count in range(len(held)))
        # A template may write the last message otherwise than those before: a step ends where the contexts differ.
        ends = [*accumulate((shared_length(tokens, part) for part in begun), max), len(tokens)]
        return [0.0] * (len(steps) - len(held)) + await self._attend(tokens, list(pairwise(ends)))

    def _check(self, messages: Sequence[Message], tokens: int, given: int, asked: bool) -> None:
        """Raises ConfigError for what a condenser may not do; that a summary is too long is no fault of its own."""
        name, where = f"condenser {self._condenser.name}", place(self._condenser.condense)
        if not messages:
            raise ConfigError(f"{name} gave no messages; it must give the opening at least{where}")
        if tuple(messages[: len(self._opening)]) != tuple(self._opening):
            raise ConfigError(f"{name} changed system prompt or task; its messages must begin with the opening{where}")
        if tokens > max(given, self._budget) and not asked:
            raise ConfigError(f"{name} made a context of {tokens} tokens from one of {given}; it must not grow{where}")
        if tokens > self._budget:
            raise _LimitError("max_condensed_tokens")

    def _messages(self) -> list[Message]:
        return [*self._opening, *(message for step in self._steps for message in step)]

    def _open(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.open(messages, self._tools)

    def _count(self, messages: Sequence[Message]) -> int:
        return len(self._open(messages))

    def _extension(self, before: Sequence[Step], turn: Turn, answers: Sequence[Message]) -> list[int] | None:
        history = [*self._opening, *(message for step in before for message in step), turn.message]
        return self._chat.extend(history, answers, self._tools, turn.output[-1])

    def _spelled(self, answers: Sequence[Message]) -> int:
        return sum(len(self._chat.encode(Message("assistant", message.content))) for message in answers)


def _steps(messages: Sequence[Message]) -> list[Step]:
    """The messages after the opening, cut before each message of the model."""
    found: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant" or not found:
            found.append([])
        found[-1].append(message)
    return [tuple(step) for step in found]
