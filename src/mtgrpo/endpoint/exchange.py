"""A request, what became of it, and which earlier one it continues."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Hashable, Iterable
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
    work: asyncio.Task[TurnReply] = field(init=False)
    connections: set[object] = field(default_factory=set[object])  # that wait for the reply, or get it just now
    delivered: bool = False  # somebody has it
    limit: str = ""  # what cut the turn, or refused it
    turn: int = -1  # its number; -1 = none is recorded
    asked_s: float = 0.0  # when it was sampled, as in the turn
    ended_s: float = 0.0
    history: list[Message] = field(default_factory=list[Message])  # of the turn, its own message included

    @staticmethod
    def of(request: TurnRequest) -> Exchange:
        """A request that has just come."""
        system = tuple(itertools.takewhile(lambda sent: sent.message.role == "system", request.messages))
        messages = request.messages[len(system) :]
        tools = ((tool.name, tool.description, tool.parameters) for tool in request.tools)
        of_model = [place for place, sent in enumerate(messages) if sent.message.role == "assistant"]
        repeated = of_model[-1] if of_model and of_model[-1] < len(messages) - 1 else -1
        before = _chained(sent.meaning for sent in messages[: max(0, repeated)])
        whole = _chained((sent.meaning for sent in messages[max(0, repeated) :]), before)
        head = _chained(sent.meaning for sent in system)
        return Exchange(request, messages, repeated, _chained(map(canonical_json, tools)), head, before, whole)

    @property
    def lost(self) -> bool:
        """Whether its client has gone without the reply."""
        return not self.connections and not self.delivered

    @property
    def failed(self) -> bool:
        """Whether there will be no reply."""
        return self.work.done() and (self.work.cancelled() or self.work.exception() is not None)


class TurnIndex:
    """Exchanges whose turns are recorded, by all that a request repeats which continues one of them.

    That is its tools, its messages and the reply: by the id of a tool call, or else by what it means. So what it takes
    to find the one that is continued depends on the request alone, not on how many are recorded.
    """

    def __init__(self) -> None:
        self._newest: dict[Hashable, Exchange] = {}
        self._said: set[Hashable] = set()  # digests of what requests said, and what replies mean

    def add(self, exchange: Exchange, reply: TurnReply) -> None:
        """One that has its reply; it lets go of its messages. What was cut is continued by none."""
        meanings = [(reply.meaning, reasoning) for reasoning in ("", reply.message.reasoning.strip())]
        for answer in (*reply.ids, *meanings) if reply.finish == "stop" else ():
            for head in (exchange.head, None):
                self._newest[exchange.tools, head, exchange.whole, answer] = exchange
        self._said |= {exchange.whole, reply.meaning}
        exchange.request, exchange.messages = replace(exchange.request, messages=()), ()

    def continued(self, by: Exchange, any_system: bool = False) -> Exchange | None:
        """The newest that `by` continues: it repeats its messages and reply, and says more, in no word of the model.

        any_system: also where the leading system messages differ.
        """
        if by.repeated < 0:
            return None
        sent, head = by.messages[by.repeated], None if any_system else by.head
        answers = (*sent.ids, (sent.meaning, sent.message.reasoning.strip()))
        earlier = [self._newest.get((by.tools, head, by.before, answer)) for answer in answers]
        return max((one for one in earlier if one is not None), key=lambda one: one.turn, default=None)

    def repeats(self, by: Exchange) -> bool:
        """Whether `by` has the reply of a recorded turn: in its words, or in others where it was given."""
        digest = b""
        for sent in by.messages:
            if sent.message.role == "assistant" and not self._said.isdisjoint((digest, sent.meaning)):
                return True
            digest = _chained([sent.meaning], digest)
        return False


def _chained(texts: Iterable[str], digest: bytes = b"") -> bytes:
    """A digest of the texts, or of those that `digest` is of and these."""
    for text in texts:
        digest = hashlib.sha256(digest + text.encode()).digest()
    return digest
