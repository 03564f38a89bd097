"""A conversation that is already written, laid out in turns as if the policy had said it: for demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from mtgrpo.environments import Opening
from mtgrpo.rollout.chat import Chat
from mtgrpo.types import SUMMARY, Finish, Message, Task, Trajectory, Turn


def replay(task: Task, opening: Opening, messages: Sequence[Message], chat: Chat) -> Trajectory:
    """`messages` are what the assistant and the tools say after the opening; log-probabilities are set to 0."""
    messages = [message for message in messages if message.name != SUMMARY]  # nobody asks for one
    trajectory = Trajectory(task)
    history = list(opening.messages)
    new_context, extends = chat.open(history, opening.tools), False
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        output = chat.encode(message)
        count = len(output)
        turn = Turn(new_context, output, [0.0] * count, [0] * count, Finish.STOP, message, extends)
        trajectory.turns.append(turn)
        answers = _answers(messages[index + 1 :])
        turn.observations = answers
        history.append(message)
        if not answers:
            break
        added = chat.extend(history, answers, opening.tools)
        history.extend(answers)
        extends = added is not None
        new_context = chat.open(history, opening.tools) if added is None else added
    return trajectory


def _answers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """What stands before the assistant's next message."""
    end = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return tuple(messages[:end])
