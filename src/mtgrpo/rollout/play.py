"""The one turn loop: context -> completion -> message -> environment -> next context, until the conversation ends."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, Step, When
from mtgrpo.condensers.none import Whole
from mtgrpo.environments import Environment, Opening
from mtgrpo.extension import ConfigError
from mtgrpo.rollout.chat import Chat
from mtgrpo.types import Finish, Message, Sample, Sampling, Status, Task, ToolSpec, Trajectory, Turn

CONDENSE = ToolSpec(
    "condense", "Make room: forget the older part of this conversation.", {"type": "object", "properties": {}}
)


@dataclass(frozen=True)
class Limits:
    """What one conversation may use, beside `environment.max_turns` and `sampling.max_new_tokens`."""

    context_tokens: int  # context and output of one turn together
    sampled_tokens: int  # the policy's, over the whole trajectory
    tool_tokens: int  # the environment's, over the whole trajectory


class _LimitError(Exception):
    """A limit was reached; its name is the message."""


async def play(
    task: Task,
    environment: Environment,
    chat: Chat,
    sample: Sample,
    sampling: Sampling,
    limits: Limits,
    condenser: Condenser | None = None,
) -> Trajectory:
    """Play one conversation about `task`.

    Reaching a limit ends it with status TRUNCATED and the limit's name as the reason. What the environment raises
    (tool outage, time-out) is not caught here: a failure is not an outcome of the policy. Raises ConfigError for a
    condenser whose budget does not hold the opening, or that gives other messages than it may.
    """
    environment = copy.copy(environment)
    opening = await environment.start(task)
    sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
    playing = _Playing(Trajectory(task), opening, chat, sample, sampling, limits, condenser or Whole())
    trajectory = playing.trajectory
    try:
        for spoken in range(1, environment.max_turns + 1):
            turn = await playing.turn()
            if playing.asks_to_condense(turn.message):
                await playing.go_on(
                    turn, (Message("tool", "done", name=CONDENSE.name),), limits.tool_tokens, asked=True
                )
                continue
            began = time.perf_counter()
            reply = await environment.step(turn.message)
            trajectory.tool_s += time.perf_counter() - began
            turn.observations = reply.messages
            trajectory.tool_calls += reply.tool_calls
            trajectory.tool_errors += reply.tool_errors
            if reply.done:
                return trajectory
            if spoken < environment.max_turns:
                await playing.go_on(turn, reply.messages, environment.max_tool_tokens)
        raise _LimitError("max_turns")
    except _LimitError as limit:
        trajectory.status = Status.TRUNCATED
        trajectory.reason = str(limit)
        return trajectory


class _Playing:
    """One conversation while it is played: what was said, and the context of the next turn."""

    def __init__(
        self,
        trajectory: Trajectory,
        opening: Opening,
        chat: Chat,
        sample: Sample,
        sampling: Sampling,
        limits: Limits,
        condenser: Condenser,
    ) -> None:
        self.trajectory = trajectory
        self._chat, self._sample, self._sampling = chat, sample, sampling
        self._limits, self._condenser = limits, condenser
        told = condenser.active and condenser.when is When.on_request
        self._tools = (*opening.tools, CONDENSE) if told else opening.tools
        self._opening = opening.messages
        self._steps: list[Step] = []  # what the present context holds beside the opening
        self._context = self._new = chat.open(opening.messages, self._tools)
        self._extends = False
        self._tool_tokens = 0
        room = condenser.max_condensed_tokens or max(1, limits.context_tokens - sampling.max_new_tokens)
        self._budget = min(room, limits.context_tokens)
        if condenser.active and len(self._context) > self._budget:
            raise ConfigError(
                f"condenser {type(condenser).__name__}: system prompt and task {trajectory.task.id} have "
                f"{len(self._context)} tokens, its budget is {self._budget}; set condenser.max_condensed_tokens or "
                "environment.max_context_length higher, or sampling.max_new_tokens lower"
            )

    def asks_to_condense(self, message: Message) -> bool:
        """Whether the model called the tool for it, and nothing else."""
        return CONDENSE in self._tools and [call.name for call in message.tool_calls] == [CONDENSE.name]

    async def turn(self, aside: bool = False) -> Turn:
        """Sample the next turn. Raises _LimitError where there is no room, or a limit cut it; an aside may be cut."""
        sampling, limits, trajectory = self._sampling, self._limits, self.trajectory
        rooms = {
            "max_new_tokens": sampling.max_new_tokens,
            "max_context_length": limits.context_tokens - len(self._context),
            "max_trajectory_tokens": limits.sampled_tokens - trajectory.sampled_tokens,
        }
        limit = min(rooms, key=lambda name: rooms[name])
        if rooms[limit] < 1:
            raise _LimitError("max_context_length" if rooms["max_context_length"] < 1 else limit)
        began = time.perf_counter()
        completion = await self._sample(self._context, dataclasses.replace(sampling, max_new_tokens=rooms[limit]))
        trajectory.sample_s += time.perf_counter() - began
        turn = Turn(
            new_context=self._new,
            output=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish=completion.finish,
            message=self._chat.parse(completion.tokens),
            extends=self._extends,
            kept=completion.kept,
            aside=aside,
        )
        trajectory.turns.append(turn)
        if completion.finish is Finish.LENGTH and not aside:
            raise _LimitError(limit)
        return turn

    async def go_on(self, turn: Turn, answers: Sequence[Message], most: int, asked: bool = False) -> None:
        """Make the context of the next turn, after `turn` was answered; condense it where that is due.

        Raises _LimitError when the environment has said more than `most` tokens at once, or too many in all.
        """
        before = self._steps
        self._steps = [*before, (turn.message, *answers)]
        extension = self._extension(before, turn.message, answers)
        whole = [*self._context, *turn.output, *extension] if extension is not None else self._open(self._messages())
        self._count_tool_tokens(len(extension) if extension is not None else self._spelled(answers), most)
        due = asked or self._condenser.when is When.every_turn or len(whole) > self._budget
        if self._condenser.active and due and await self._condense(before, turn, answers, len(whole)):
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
            told = [*answers, question]
            extension = self._extension(before, turn.message, told)
            messages = [*self._messages(), question]
            self._new = self._open(messages) if extension is None else extension
            self._extends = extension is not None
            self._context = [*self._context, *turn.output, *extension] if extension is not None else self._new
            return (await self.turn(aside=True)).message

        conversation = Conversation(
            opening=self._opening,
            steps=tuple(self._steps),
            budget=self._budget,
            count=lambda messages: len(self._open(messages)),
            ask=ask,
        )
        messages = await self._condenser.condense(conversation)
        if messages == self._messages() and not self.trajectory.turns[-1].aside:
            return False
        context = self._open(messages) if messages else []
        self._check(messages, len(context), tokens)
        self._steps = _steps(messages[len(self._opening) :])
        self._context = self._new = context
        self._extends = False
        return True

    def _check(self, messages: Sequence[Message], tokens: int, given: int) -> None:
        """Raises ConfigError for what a condenser may not do."""
        name = f"condenser {type(self._condenser).__name__}"
        if not messages:
            raise ConfigError(f"{name} gave no messages; it must give the opening at least")
        if tuple(messages[: len(self._opening)]) != tuple(self._opening):
            raise ConfigError(f"{name} changed system prompt or task; its messages must begin with the opening")
        if tokens > max(given, self._budget):
            raise ConfigError(f"{name} made a context of {tokens} tokens from one of {given}; it must not grow")
        if tokens > self._budget:
            raise _LimitError("max_context_length")

    def _messages(self) -> list[Message]:
        return [*self._opening, *(message for step in self._steps for message in step)]

    def _open(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.open(messages, self._tools)

    def _extension(self, before: Sequence[Step], said: Message, answers: Sequence[Message]) -> list[int] | None:
        history = [*self._opening, *(message for step in before for message in step), said]
        return self._chat.extend(history, answers, self._tools)

    def _spelled(self, answers: Sequence[Message]) -> int:
        return sum(len(self._chat.encode(Message("assistant", message.content))) for message in answers)


def _steps(messages: Sequence[Message]) -> list[Step]:
    """The messages after the opening, cut before each thing the model said."""
    found: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant" or not found:
            found.append([])
        found[-1].append(message)
    return [tuple(step) for step in found]
