"""A request, what became of it, and which earlier one it continues."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from mtgrpo.endpoint import Entry, TurnReply, TurnRequest, canonical_json
from mtgrpo.types import Message


@dataclass(eq=False)
class Exchange:
    """A request and what became of it."""

    request: TurnRequest
    messages: tuple[Entry, ...]  # those after the leading system messages
    repeated: int  # the place among them of the last one of the model, if anything follows it; else -1
    tools: bytes  # a digest of the tools
    head: bytes  # of the leading system messages
    before: bytes  # of the messages before the repeated one
    whole: bytes  # of all after the leading ones
    number: int = 0  # in the order in which they came
    work: asyncio.Task[TurnReply] | None = None
    connections: set[object] = field(default_factory=set[object])  # that wait for the reply, or get it just now
    delivered: bool = False  # somebody has it
    reply: TurnReply | None = None
    limit: str = ""  # what cut the turn, or refused it
    turn: int = -1  # its number; -1 = none is recorded
    history: list[Message] = field(default_factory=list[Message])  # of the turn, its own message included

    @staticmethod
    def of(request: TurnRequest) -> Exchange:
        """A request that has just come."""
        leading = 0
        while leading < len(request.messages) and request.messages[leading].message.role == "system":
            leading += 1
        messages, tools = request.messages[leading:], ((t.name, t.description, t.parameters) for t in request.tools)
        places = range(len(messages) - 2, -1, -1) if messages and messages[-1].message.role != "assistant" else ()
        repeated = next((place for place in places if messages[place].message.role == "assistant"), -1)
        before = _chained(sent.meaning for sent in messages[: max(0, repeated)])
        whole = _chained((sent.meaning for sent in messages[max(0, repeated) :]), before)
        head = _chained(sent.meaning for sent in request.messages[:leading])
        return Exchange(request, messages, repeated, _chained(map(canonical_json, tools)), head, before, whole)

    @property
    def lost(self) -> bool:
        """Whether its client has gone without the reply."""
        return not self.connections and not self.delivered

    @property
    def failed(self) -> bool:
        """Whether there will be no reply."""
        work = self.work
        return work is not None and work.done() and (work.cancelled() or work.exception() is not None)


class TurnIndex:
    """Exchanges whose turns are recorded, by all that a request repeats which continues one of them.

    That is its tools, its messages and the reply: by the id of a tool call, or else by what it means. So what it takes
    to find the one that is continued depends on the request alone, not on how many are recorded.
    """

    def __init__(self) -> None:
        self._newest: dict[Hashable, Exchange] = {}

    def add(self, one: Exchange) -> None:
        """One that has its reply; it lets go of its messages. What was cut is continued by none."""
        reply = one.reply
        if reply is not None and reply.finish == "stop":
            reasoning = reply.message.reasoning.strip()
            for answer in (
                *reply.call_ids,
                *((Entry(reply.message).meaning, given) for given in ("", reasoning)),
            ):
                for head in (one.head, None):
                    self._newest[one.tools, head, one.whole, answer] = one
        one.request, one.messages = replace(one.request, messages=()), ()

    def continued(self, by: Exchange, any_system: bool = False) -> Exchange | None:
        """The newest that `by` continues: it repeats its messages and reply, and says more, in no word of the model.

        any_system: also where the leading system messages differ.
        """
        return max(self._found(by, None if any_system else by.head), key=lambda one: one.turn, default=None)

    def _found(self, by: Exchange, head: bytes | None) -> Iterator[Exchange]:
        if by.repeated < 0:
            return
        sent = by.messages[by.repeated]
        for answer in (*sent.ids, (sent.meaning, sent.message.reasoning.strip())):
            if (one := self._newest.get((by.tools, head, by.before, answer))) is not None:
                yield one


def _chained(texts: Iterable[str], digest: bytes = b"") -> bytes:
    """A digest of the texts, or of those that `digest` is of and these."""
    for text in texts:
        digest = hashlib.sha256(digest + text.encode()).digest()
    return digest
