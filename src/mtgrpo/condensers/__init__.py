"""What the model still sees of a long conversation: messages and a token budget -> fewer messages. One file = one way.

How is the class, when is a setting. What was sampled is trained as it was sampled, in the context that it was sampled
in; a condenser only decides what the next context holds.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from mtgrpo.parts import Part
from mtgrpo.types import Message

Step = tuple[Message, ...]  # a message of the model, and the replies to it


class When(Enum):
    """When a context is condensed, beside when it would exceed its budget."""

    over_budget = "over_budget"  # only then
    every_turn = "every_turn"  # after every answer of the environment
    on_request = "on_request"  # when the model calls the tool `condense`, which it then gets


@dataclass(frozen=True)
class Conversation:
    """What there is to condense."""

    opening: tuple[Message, ...]  # system prompt and task; they always stay
    steps: tuple[Step, ...]  # all since then, the oldest first, whether the present context holds them or not
    budget: int  # tokens that the next context may have
    count: Callable[[Sequence[Message]], int]  # the tokens of a context of these messages
    ask: Callable[[Message], Awaitable[Message]]  # once: the policy's answer to a message at the end; it is trained
    attention: Callable[[Sequence[Step]], Awaitable[list[float]]]  # that each gets from the end of a context of all


@dataclass
class Condenser(Part, ABC, max_condensed_tokens=">= 0"):
    """Base of all condensers."""

    when: When = When.over_budget
    max_condensed_tokens: int = 0  # a context's budget; 0 = environment.max_context_length less a turn

    attends: ClassVar[bool] = False  # whether it needs attention, which only engine=local can measure
    active = True  # whether it ever leaves anything out

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @abstractmethod
    async def condense(self, conversation: Conversation) -> list[Message]:
        """The messages of the next context: the opening first, within the budget where that is possible."""


def messages_of(opening: Sequence[Message], steps: Sequence[Step]) -> list[Message]:
    """All in one list."""
    return [*opening, *(message for step in steps for message in step)]


def best_and_newest(conversation: Conversation, best: Sequence[int], start: int) -> list[Message]:
    """The opening, the steps numbered `best`, the best first, and those from `start`; of `best` what the budget holds.

    Where it does not hold the last ones, as many of them as it does.
    """
    for count in range(len(best), 0, -1):
        chosen = [conversation.steps[i] for i in sorted(best[:count])]
        messages = messages_of(conversation.opening, [*chosen, *conversation.steps[start:]])
        if conversation.count(messages) <= conversation.budget:
            return messages
    return newest(conversation, conversation.steps[start:])


def newest(
    conversation: Conversation, steps: Sequence[Step], head: Sequence[Message] = (), share: float = 1.0
) -> list[Message]:
    """The opening, `head`, and as many of the newest `steps` as that share of the budget holds."""
    opening = [*conversation.opening, *head]
    fitting = how_many_fit(opening, steps, conversation.count, conversation.budget * share)
    return messages_of(opening, steps[len(steps) - fitting :])


def how_many_fit(
    opening: Sequence[Message], steps: Sequence[Step], count: Callable[[Sequence[Message]], int], budget: float
) -> int:
    """How many of the newest `steps` after `opening` have at most `budget` tokens together with it."""

    def tokens(number: int) -> int:
        return count(messages_of(opening, steps[len(steps) - number :]))

    high = 1  # from the end, since only a little of a long conversation may fit
    while high <= len(steps) and tokens(high) <= budget:
        high *= 2
    low = high // 2
    return low + bisect_right(range(low + 1, min(high, len(steps) + 1)), budget, key=tokens)
