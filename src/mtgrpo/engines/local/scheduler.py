"""Which request prefills or decodes how many tokens in the next step, and what is evicted when blocks run out.

A request is a list of tokens of which the first are in the KV cache and the rest are pending: one while it decodes, a
tool's reply at the start of a turn, a whole prompt at the start of a conversation or after it was evicted or preempted.
All are computed in the same forward passes.
"""

import asyncio
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtgrpo.chat.safe_tokenizer import shared_length
from mtgrpo.engines import Key
from mtgrpo.engines.local.kv_cache import BlockTable, KVCache, SharedPrefix
from mtgrpo.engines.local.paged_attention import Row
from mtgrpo.types import Completion, Finish, Sampling

MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 2048}  # in a step, beside the decoding: longer ones are prefilled in chunks
SHORTEST_PREFIX = 32  # tokens; sharing fewer is not worth it


@dataclass(eq=False)
class OpenConversation:
    """What the engine knows of one open conversation."""

    key: Key
    block_table: BlockTable = field(default_factory=BlockTable)
    began: int = -1  # the step before which its first request came

    @property
    def age(self) -> tuple[int, Key]:
        """Conversations in the order in which they began."""
        return self.began, self.key


@dataclass(eq=False)
class Request:
    """One requested turn."""

    conversation: OpenConversation
    tokens: list[int]  # the context and, so far, the output
    sampling: Sampling
    stream: int  # key of its random numbers
    reply: asyncio.Future[Completion]
    output: Completion = field(default_factory=lambda: Completion([], [], [], Finish.LENGTH))  # so far
    since: int = 0  # the step before which it came
    looked: int = -1  # the step in which a prefix was last looked for; -1 = not since its cache was emptied

    @property
    def pending(self) -> int:
        """How many tokens are not in the KV cache yet; the next token can be sampled once there are none."""
        return len(self.tokens) - self.conversation.block_table.end


class Scheduler:
    """The requests in flight and the open conversations."""

    def __init__(self, kv_cache: KVCache, prefill_tokens: int) -> None:
        self._kv_cache, self._prefill_tokens = kv_cache, prefill_tokens
        self._step = 0
        self._conversations: list[OpenConversation] = []
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._prefixes: list[SharedPrefix] = []  # by their tokens, ascending

    @property
    def silent(self) -> bool:
        """Whether an open conversation has no request at present."""
        return len(self._waiting) + len(self._running) < len(self._conversations)

    @property
    def requests(self) -> list[Request]:
        return [*self._running, *self._waiting]

    def open(self, conversation: OpenConversation) -> None:
        self._conversations.append(conversation)

    def close(self, conversation: OpenConversation) -> None:
        """Release the conversation's blocks, drop its requests."""
        for request in [r for r in self.requests if r.conversation is conversation]:
            self.drop(request)
        self._conversations.remove(conversation)
        self._forget(conversation.block_table)

    def ask(self, request: Request) -> None:
        request.since = self._step
        if request.conversation.began < 0:
            request.conversation.began = self._step
        self._align(request)
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        """The request is answered, or nobody waits for it any more. Its blocks stay with the conversation."""
        (self._running if request in self._running else self._waiting).remove(request)

    def reset_cache(self) -> None:
        """Nothing in the KV cache is valid any more: release all blocks; what runs waits for its prefill again."""
        for conversation in self._conversations:
            self._forget(conversation.block_table)
        self._waiting, self._running = self.requests, []
        for request in self._waiting:
            request.looked = -1

    def invalidate_prefix_cache(self) -> None:
        """Conversations keep the prefixes that they have; no other conversation joins them."""
        for prefix in self._prefixes:
            prefix.shared = False
            prefix.source = None

    def next(self) -> list[tuple[Row, Request | None]]:
        """What the next step computes: rows, each with the request that is complete after it and can be sampled."""
        self._step += 1
        if self._waiting:
            self._start()
        rows: list[tuple[Row, Request | None]] = []
        planned: dict[SharedPrefix, int] = {}  # how many tokens of each prefix will be missing after this step
        room, block_length = self._prefill_tokens, self._kv_cache.own.length
        index = 0
        while index < len(self._running):  # which loses requests at its end when memory runs out
            request = self._running[index]
            index += 1
            block_table = request.conversation.block_table
            prefix, cached = block_table.prefix, len(block_table.tokens)
            end = cached + (len(prefix.wanted) if prefix else 0)
            pending = len(request.tokens) - end
            if prefix and prefix.missing and prefix not in planned:
                new = [] if self._waits(prefix) else prefix.wanted[len(prefix.tokens) :][:room]
                room -= len(new)
                planned[prefix] = prefix.missing - len(new)
                if new:
                    rows.append((Row(prefix, new), None))
            if prefix and planned.get(prefix, 0):
                continue  # what the request sees will not all be there
            count = 1 if pending == 1 else min(pending, room)
            if (count == 1 and cached % block_length) or (count and self._reserve(request, count)):
                room -= count if pending > 1 else 0
                row = Row(block_table, request.tokens[end : end + count])
                rows.append((row, request if count == pending else None))
        if not planned:
            return rows
        return [row for row in rows if not isinstance(row[0].block_table, SharedPrefix) or row[0].block_table.users]

    def _waits(self, prefix: SharedPrefix) -> bool:
        """Whether its beginning is being computed for another prefix; copies it as soon as it is there."""
        if (source := prefix.source) is None:
            return False
        count = shared_length(source.wanted, prefix.wanted)
        if len(source.tokens) >= count:
            self._kv_cache.prefixes.copy(source, prefix, count)
            prefix.source = None
            return False
        if any(request.conversation.block_table.prefix is source for request in self._running):
            return True
        self._replace_source(source)
        return self._waits(prefix)

    def _replace_source(self, source: SharedPrefix) -> None:
        """Nobody computes `source` now: the first of those that wait for it computes what they have in common."""
        waiting = [prefix for prefix in self._prefixes if prefix.source is source]
        for prefix in waiting:
            prefix.source = waiting[0] if prefix is not waiting[0] else None

    def _reserve(self, request: Request, count: int) -> bool:
        """Blocks for the next `count` tokens of a running request: evict idle conversations, then preempt the latest.

        The only one that runs evicts those that began before it too. False if the request itself was preempted.
        """
        pool, block_table = self._kv_cache.own, request.conversation.block_table
        while (missing := pool.missing(block_table, count)) > pool.free:
            if self._evict(None if len(self._running) == 1 else request.conversation):
                continue
            victim = self._running.pop()
            victim.looked = -1
            self._waiting.append(victim)
            self._forget(victim.conversation.block_table)
            if victim is request:
                return False
        if missing > 0:
            pool.reserve(block_table, count)
        return True

    def _start(self) -> None:
        """Admit waiting requests as long as there are blocks for all that they have pending.

        Where blocks are short, conversations that began first go first, and take no blocks from one another. Else all
        would compute their contexts again at every turn.
        """
        self._waiting.sort(key=lambda request: (request.since, request.conversation.key))
        self._share([r for r in self._waiting if r.looked < 0 and not r.conversation.block_table.end])
        promised = sum(map(self._missing, self._running))
        admitted: list[Request] = []
        for request in sorted(self._waiting, key=lambda request: request.conversation.age):
            has_room = self._make_room(promised + self._missing(request), request.conversation)
            if not has_room and (self._running or admitted):
                break
            if request.looked < self._step and not request.conversation.block_table.end:  # its prefix may have room now
                waiting = (r for r in self._waiting if not r.conversation.block_table.end)
                self._share([r for r in waiting if r.tokens == request.tokens])
            promised += self._missing(request)
            admitted.append(request)
        self._running += [request for request in self._waiting if request in admitted]
        self._waiting = [request for request in self._waiting if request not in admitted]

    def _missing(self, request: Request) -> int:
        """How many more blocks what the request has pending takes."""
        return self._kv_cache.own.missing(request.conversation.block_table, request.pending)

    def _make_room(self, blocks: int, before: OpenConversation) -> bool:
        """Whether there are so many free blocks, if idle conversations that began after `before` are evicted for it."""
        pool = self._kv_cache.own
        idle = sum(len(conversation.block_table.blocks) for conversation in self._idle(before))
        while pool.free < blocks <= pool.free + idle:
            idle -= self._evict(before)
        return blocks <= pool.free

    def _align(self, request: Request) -> None:
        """Release what the conversation has cached and is not the beginning of the request; the last token is new."""
        block_table, tokens = request.conversation.block_table, request.tokens
        if block_table.prefix and (
            len(tokens) <= block_table.start or tokens[: block_table.start] != block_table.prefix.wanted
        ):
            self._forget(block_table)
        self._kv_cache.own.cut(block_table, shared_length(block_table.tokens, tokens[block_table.start : -1]))

    def _share(self, fresh: Sequence[Request]) -> None:
        """Give requests of which nothing is cached a prefix: an old one, or what they begin with themselves.

        Also one that is alone, for siblings that come later. The prefix is cached once, the rest for each request;
        requests with different prompts have a prefix in common where no more is computed then.
        """
        prompts: dict[tuple[int, ...], list[Request]] = {}
        for request in fresh:
            request.looked = self._step
            prompts.setdefault(tuple(request.tokens[:-1]), []).append(request)
        group: list[Request] = []
        common: list[int] = []
        for prompt in sorted(prompts):
            tokens, requests = list(prompt), prompts[prompt]
            fitting = [p for p in self._prefixes if p.shared and tokens[: len(p.wanted)] == p.wanted]
            old = max(fitting, key=lambda prefix: len(prefix.wanted), default=None)
            if old and 2 * len(requests) * (len(tokens) - len(old.wanted)) <= len(tokens):
                self._attach(requests, old)
                continue
            shared = shared_length(common, tokens)
            together = shared + sum(len(r.tokens) - 1 - shared for r in (*group, *requests))
            apart = len(common) + sum(len(r.tokens) - 1 - len(common) for r in group) + len(tokens)
            # With a prefix of their own they compute `apart - shared` tokens, since `shared` of them are copied.
            if group and shared >= SHORTEST_PREFIX and together <= apart - shared:
                group, common = [*group, *requests], common[:shared]
            else:
                self._begin_prefix(group, common)
                group, common = requests, tokens
        self._begin_prefix(group, common)

    def _begin_prefix(self, group: Sequence[Request], common: list[int]) -> None:
        """Cache `common` once for all of `group`, if there is room; else each caches it.

        What another prefix begins with too is computed once.
        """
        prefix, pool = SharedPrefix(wanted=common), self._kv_cache.prefixes
        if len(common) >= SHORTEST_PREFIX and pool.missing(prefix, len(common)) <= pool.free:
            pool.reserve(prefix, len(common))
            place = bisect(self._prefixes, common, key=lambda p: p.wanted)
            beside = [p for p in self._prefixes[max(0, place - 1) : place + 1] if p.shared]  # they begin most alike
            source = max(beside, key=lambda p: shared_length(p.wanted, common), default=None)
            prefix.source = source if source and shared_length(source.wanted, common) >= SHORTEST_PREFIX else None
            self._prefixes.insert(place, prefix)
            self._attach(group, prefix)

    def _attach(self, group: Sequence[Request], prefix: SharedPrefix) -> None:
        prefix.users += len(group)
        for request in group:
            request.conversation.block_table.prefix = prefix

    def _idle(self, before: OpenConversation | None) -> list[OpenConversation]:
        """Conversations that have blocks, are not running and began after `before`."""
        running = {request.conversation for request in self._running}
        idle = [c for c in self._conversations if c.block_table.blocks and c not in running]
        return [c for c in idle if before is None or c.age > before.age]

    def _evict(self, before: OpenConversation | None) -> int:
        """Evict the idle conversation that began last, and after `before`; how many blocks it had."""
        if not (idle := self._idle(before)):
            return 0
        chosen = max(idle, key=lambda c: c.age).block_table
        count = len(chosen.blocks)
        self._forget(chosen)
        return count

    def _forget(self, block_table: BlockTable) -> None:
        self._kv_cache.own.cut(block_table, 0)
        prefix, block_table.prefix = block_table.prefix, None
        if prefix:
            prefix.users -= 1
            if not prefix.users:
                self._kv_cache.prefixes.cut(prefix, 0)
                self._prefixes.remove(prefix)
                self._replace_source(prefix)
