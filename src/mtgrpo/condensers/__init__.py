"""What the model still sees of a long conversation: messages and a token budget -> fewer messages. One file = one way.

How is the class, when is a setting. What was sampled is trained as it was sampled, in the context that it was sampled
in; a condenser only decides what the next context holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from mtgrpo.extension import ConfigError
from mtgrpo.types import Message

Step = tuple[Message, ...]  # what the model said, and what was answered


class When(Enum):
    """When a context is condensed, beside when it would exceed its budget."""

    over_budget = "over_budget"  # only then
    every_turn = "every_turn"  # after every answer of the environment
    on_request = "on_request"  # when the model calls the tool `condense`, which it is then told of


@dataclass(frozen=True)
class Conversation:
    """What there is to condense."""

    opening: tuple[Message, ...]  # system prompt and task; they always stay
    steps: tuple[Step, ...]  # the rest, the oldest first
    budget: int  # tokens that the next context may have
    count: Callable[[Sequence[Message]], int]  # the tokens of a context of these messages
    ask: Callable[[Message], Awaitable[Message]]  # the policy's answer to a message after all of these; it is trained


@dataclass
class Condenser(ABC):
    """Base of all condensers."""

    active: ClassVar[bool] = True  # whether it ever leaves anything out

    when: When = When.over_budget
    max_condensed_tokens: int = 0  # a context's budget; 0 = environment.max_context_length less a turn

    def __post_init__(self) -> None:
        if self.max_condensed_tokens < 0:
            raise ConfigError(f"condenser.max_condensed_tokens must be >= 0, got {self.max_condensed_tokens}")

    @abstractmethod
    async def condense(self, conversation: Conversation) -> list[Message]:
        """The messages of the next context: the opening first, within the budget where that is possible."""


def messages_of(opening: Sequence[Message], steps: Sequence[Step]) -> list[Message]:
    """All in one list."""
    return [*opening, *(message for step in steps for message in step)]


def newest(conversation: Conversation, steps: Sequence[Step], head: Sequence[Message] = ()) -> list[Message]:
    """The opening, `head`, and as many of the newest `steps` as the budget allows."""
    opening = [*conversation.opening, *head]
    low, high = 0, len(steps)  # fewer steps never have more tokens
    while low < high:
        middle = (low + high) // 2
        if conversation.count(messages_of(opening, steps[middle:])) <= conversation.budget:
            high = middle
        else:
            low = middle + 1
    return messages_of(opening, steps[low:])
