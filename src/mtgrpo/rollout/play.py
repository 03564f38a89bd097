"""The one turn loop: context -> completion -> message -> environment -> longer context, until the conversation ends."""

from __future__ import annotations

import copy
import dataclasses
import time
from dataclasses import dataclass

from mtgrpo.environments import Environment
from mtgrpo.rollout.chat import Chat
from mtgrpo.types import Completion, Finish, Message, Sample, Sampling, Status, Task, Trajectory, Turn


@dataclass(frozen=True)
class Limits:
    """What one conversation may use, beside `environment.max_turns` and `sampling.max_new_tokens`."""

    context_tokens: int  # context and output of one turn together
    sampled_tokens: int  # the policy's, over the whole trajectory
    tool_tokens: int  # the environment's, over the whole trajectory


async def play(
    task: Task, environment: Environment, chat: Chat, sample: Sample, sampling: Sampling, limits: Limits
) -> Trajectory:
    """Play one conversation about `task`.

    Reaching a limit ends it with status TRUNCATED and the limit's name as the reason. What the environment raises
    (tool outage, time-out) is not caught here: a failure is not an outcome of the policy.
    """
    environment = copy.copy(environment)
    opening = await environment.start(task)
    sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
    trajectory = Trajectory(task)
    messages = list(opening.messages)
    context = new_context = chat.open(messages, opening.tools)
    extends, tool_tokens = False, 0
    while True:
        room = min(
            sampling.max_new_tokens,
            limits.sampled_tokens - trajectory.sampled_tokens,
            limits.context_tokens - len(context),
        )
        if room < 1:
            name = "max_trajectory_tokens" if len(context) < limits.context_tokens else "max_context_length"
            return _truncated(trajectory, name)
        began = time.perf_counter()
        completion = await sample(context, dataclasses.replace(sampling, max_new_tokens=room))
        sampled = time.perf_counter()
        trajectory.sample_s += sampled - began
        turn = _turn(completion, chat.parse(completion.tokens), new_context, extends)
        trajectory.turns.append(turn)
        if completion.finish is Finish.LENGTH:
            return _truncated(trajectory, _length_limit(room, sampling, limits, context))
        reply = await environment.step(turn.message)
        trajectory.tool_s += time.perf_counter() - sampled
        turn.observations = reply.messages
        trajectory.tool_calls += reply.tool_calls
        trajectory.tool_errors += reply.tool_errors
        if reply.done:
            return trajectory
        if len(trajectory.turns) >= environment.max_turns:
            return _truncated(trajectory, "max_turns")
        history = [*messages, turn.message]
        messages = [*history, *reply.messages]
        added = chat.extend(history, reply.messages, opening.tools)
        if added is None:
            context = new_context = chat.open(messages, opening.tools)
            extends = False
            fresh = sum(len(chat.encode(Message("assistant", message.content))) for message in reply.messages)
        else:
            context, new_context, extends = [*context, *completion.tokens, *added], added, True
            fresh = len(added)
        tool_tokens += fresh
        if fresh > environment.max_tool_tokens:
            return _truncated(trajectory, "max_tool_tokens")
        if tool_tokens > limits.tool_tokens:
            return _truncated(trajectory, "max_trajectory_tool_tokens")


def _turn(completion: Completion, message: Message, new_context: list[int], extends: bool) -> Turn:
    return Turn(
        new_context=new_context,
        output=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish=completion.finish,
        message=message,
        extends=extends,
        kept=completion.kept,
    )


def _length_limit(room: int, sampling: Sampling, limits: Limits, context: list[int]) -> str:
    """Which limit cut the turn."""
    if room == sampling.max_new_tokens:
        return "max_new_tokens"
    return "max_context_length" if room == limits.context_tokens - len(context) else "max_trajectory_tokens"


def _truncated(trajectory: Trajectory, reason: str) -> Trajectory:
    trajectory.status = Status.TRUNCATED
    trajectory.reason = reason
    return trajectory
