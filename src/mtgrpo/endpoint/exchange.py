"""A request, what became of it, and which earlier one it continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtgrpo.endpoint import Reply, Request, Said
from mtgrpo.types import Message


@dataclass(eq=False)
class Exchange:
    """A request and what became of it."""

    request: Request
    messages: tuple[Said, ...]  # those after the leading system messages
    head: list[str]  # what the leading ones mean
    rest: list[str]  # what the others mean
    number: int = 0  # in the order in which they came
    work: asyncio.Task[Reply] | None = None
    connections: set[object] = field(default_factory=set[object])  # that wait for the reply, or get it just now
    delivered: bool = False  # somebody has it
    reply: Reply | None = None
    limit: str = ""  # what cut the turn, or refused it
    turn: int = -1  # its number; -1 = none is recorded
    history: list[Message] = field(default_factory=list[Message])  # of the turn, its own message included

    @staticmethod
    def of(request: Request) -> Exchange:
        """A request that has just come."""
        leading = 0
        while leading < len(request.messages) and request.messages[leading].message.role == "system":
            leading += 1
        meanings = [said.meaning for said in request.messages]
        return Exchange(request, request.messages[leading:], meanings[:leading], meanings[leading:])

    @property
    def lost(self) -> bool:
        """Whether its client has gone without the reply."""
        return not self.connections and not self.delivered

    @property
    def failed(self) -> bool:
        """Whether there will be no reply."""
        work = self.work
        return work is not None and work.done() and (work.cancelled() or work.exception() is not None)

    def parent(self, recorded: Sequence[Exchange], any_system: bool = False) -> Exchange | None:
        """The longest, then newest, of the recorded ones that this one continues.

        any_system: also where the leading system messages differ.
        """
        found = [one for one in recorded if self._continues(one) and (any_system or self.head == one.head)]
        return max(reversed(found), key=lambda one: len(one.rest), default=None)

    def _continues(self, other: Exchange) -> bool:
        """Whether it repeats the messages and the reply of `other`, which ended by itself, and says more."""
        count, reply = len(other.rest), other.reply
        return (
            reply is not None
            and reply.finish == "stop"
            and len(self.messages) > count + 1
            and self.request.tools == other.request.tools
            and self.rest[:count] == other.rest
            and _repeats(self.messages[count], reply)
            and all(said.message.role != "assistant" for said in self.messages[count + 1 :])
        )


def _repeats(said: Said, reply: Reply) -> bool:
    """Whether a message of the model is this reply: by the id of a tool call, or else by what it means."""
    if said.message.role != "assistant":
        return False
    if set(said.ids) & set(reply.call_ids):
        return True
    reasoning = said.message.reasoning.strip()
    return said.meaning == Said(reply.message).meaning and reasoning in ("", reply.message.reasoning.strip())
