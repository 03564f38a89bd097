"""One conversation of a foreign agent: which recorded turn a request continues, and what is recorded of it.

A request continues the longest recorded turn whose request and reply it repeats. Its context is then that turn's, as it
was recorded, with what is new; any other request is rendered as a whole. All of it belongs to one event loop.
"""

import asyncio
import bisect
import dataclasses
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from mtgrpo.chat import Chat
from mtgrpo.chat.safe_tokenizer import shared_length
from mtgrpo.endpoint import RefusedError, TurnReply, TurnRequest
from mtgrpo.endpoint.exchange import Exchange, TurnIndex
from mtgrpo.errors import ConfigError
from mtgrpo.types import (
    CallOutcome,
    CallRecord,
    Completion,
    Finish,
    Limits,
    Message,
    Sample,
    Sampling,
    Task,
    Trajectory,
    Turn,
)

USED_UP = "The budget of this conversation is used up."  # not empty: agents ask again for what is
MAX_USED_UP_REPLIES = 3  # such replies; then requests are refused
MAX_CHAINS = 32  # conversations with the engine that are open; beyond them the one that was idle for longest is used
MAX_PAID = 1e6  # in all, by rewards that are posted for a conversation or for a turn, also below 0
SETTLE_S = 1.0  # for requests that are under way when the agent has ended

OpenChain = Callable[[int], AbstractAsyncContextManager[Sample]]  # the n-th conversation with the engine, from 0


@dataclass(eq=False)
class _Chain:
    """A conversation with the engine, whose KV cache holds the tokens of the last turn that was sampled in it.

    A turn is sampled in the idle chain that shares the longest prefix with its context, so that the engine computes
    only the rest. An agent whose requests overlap, or whose contexts have little in common, needs several chains.
    """

    sample: Sample
    tokens: list[int] = field(default_factory=list[int])  # of the last context and its output
    busy: bool = False
    last_used: int = 0  # the number of the request that was answered in it last


@dataclass(frozen=True)
class _Context:
    """Where a turn is sampled."""

    parent: Exchange | None  # whose turn it continues
    history: list[Message]
    tokens: list[int]
    new: list[int]  # the tokens beyond the parent's; all of them where it is opened anew
    extends: bool
    rewritten: bool  # it would continue a turn, but for its system prompt
    repeats: bool  # it has a reply that was recorded, perhaps in other words


class AgentSession:
    """Answers the requests of one conversation and records it in `trajectory`."""

    def __init__(
        self,
        task: Task,
        chat: Chat,
        sampling: Sampling,
        limits: Limits,
        open_chain: OpenChain,
        pin_system: bool = False,
        strict: bool = False,
    ) -> None:
        """pin_system: a rewritten system prompt counts as the first one; strict: ignored fields are refused."""
        self._calls: list[CallRecord] = []
        self.trajectory = Trajectory(task, calls=self._calls)
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None  # of the engine
        self.name = ""  # part of the ids of replies; the endpoint sets it
        self._chat, self._limits, self._open_chain = chat, limits, open_chain
        self._sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
        self._pin_system, self._strict = pin_system, strict
        self._exchanges: list[Exchange] = []
        self._index = TurnIndex()
        self._equal: dict[str, list[Exchange]] = {}  # by digest, those that may be asked for again
        self._waiting: dict[object, Exchange] = {}  # by the connection that gets the reply
        self._turns: dict[str, Turn] = {}  # by the id of a reply
        self._sampled_tokens = 0
        self._reserved: dict[Exchange, int] = {}  # the most tokens that what is being sampled may still take
        self._chains: list[_Chain] = []
        self._opened = 0  # chains, those that are just being opened included
        self._open = AsyncExitStack()
        self._closed = False

    @property
    def limit(self) -> str:
        """The limit at which the conversation stands, or ended; "" = none."""
        if self.counts["budget_stops"]:
            return self._exhausted_limit()
        return self._exchanges[-1].limit if self._exchanges else ""

    async def answer(self, request: TurnRequest, connection: object, prefixes: tuple[str, str] = ("", "")) -> TurnReply:
        """The reply, which is on its way to `connection` until `settle`. Raises RefusedError.

        prefixes: of the ids of replies and of tool calls. The turn is sampled to its end even if nobody waits for it.
        """
        if self._closed or self.counts["budget_stops"] >= MAX_USED_UP_REPLIES:
            raise RefusedError("closed", "the conversation of this key has ended")
        if self._strict and request.ignored:
            raise RefusedError("invalid", f"agent.strict=true: {', '.join(request.ignored)} would have no effect")
        exchange = self._find_retried(request)
        if exchange is None:
            exchange = Exchange.of(request)
            exchange.number = len(self._exchanges)
            exchange.work = asyncio.create_task(self._work(exchange, prefixes))
            exchange.work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may be lost
            self._exchanges.append(exchange)
            self._equal.setdefault(request.digest, []).append(exchange)
        else:
            self.counts["retries_joined"] += 1
        exchange.connections.add(connection)
        self._waiting[connection] = exchange
        try:
            return await asyncio.shield(exchange.work)
        except asyncio.CancelledError:
            if exchange.work.cancelled():
                raise RefusedError("closed", "the conversation of this key has ended") from None
            raise

    def settle(self, connection: object, delivered: bool) -> None:
        """The connection has been sent its reply, or has gone."""
        if (exchange := self._waiting.pop(connection, None)) is not None:
            exchange.connections.remove(connection)
            exchange.delivered = exchange.delivered or delivered

    def count(self, request: TurnRequest) -> int:
        """The tokens of the context that the request would have. Raises RefusedError."""
        return len(self._context(Exchange.of(request)).tokens)

    def pay(self, amount: object, reply_id: str = "", most: float = sys.float_info.max) -> None:
        """Pay for the turn of a reply, or for the whole conversation; what is paid adds up. Raises RefusedError.

        most: what it may come to, below 0 too.
        """
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise RefusedError("invalid", f"reward must be a number, got {amount!r:.100}")
        if reply_id and reply_id not in self._turns:
            raise RefusedError("invalid", f"a reward for the reply {reply_id!r:.100}, which this conversation has not")
        turn = self._turns[reply_id] if reply_id else None
        paid = turn.paid if turn else self.trajectory.given or 0.0
        if not (abs(amount) <= most and abs(paid + amount) <= most):  # NaN too
            raise RefusedError("invalid", f"reward={amount!s:.40}: what is paid must be within {-most:g} and {most:g}")
        if turn:
            turn.paid = paid + amount
        else:
            self.trajectory.given = paid + amount

    async def close(self) -> None:
        """Wait a moment for what is being sent, cancel what is being sampled, answer no more."""
        until = time.monotonic() + SETTLE_S
        self._open.push_async_callback(self._end_work)
        async with self._open:  # also where nobody waits for it any more
            while self._waiting and time.monotonic() < until:
                await asyncio.sleep(0.005)

    async def _end_work(self) -> None:
        self._closed = True
        works = [exchange.work for exchange in self._exchanges]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def finish(self, trains: Callable[[Trajectory], Sequence[bool]]) -> Trajectory:
        """The trajectory, once it is closed. Turns that nobody received or `trains` leaves out are not trained.

        Turns that announce other tools than most turns do are auxiliary, unless they continue one that is not: an agent
        may ask for its last answer without tools.
        """
        trajectory = self.trajectory
        recorded = sorted((one for one in self._exchanges if one.turn >= 0), key=lambda exchange: exchange.turn)
        tools = [tuple(tool.name for tool in exchange.request.tools) for exchange in recorded]
        main = Counter(tools).most_common(1)
        for turn, names in zip(trajectory.turns, tools, strict=True):
            continues = turn.parent >= 0 and not trajectory.turns[turn.parent].auxiliary
            turn.auxiliary = names != main[0][0] and not continues
        if leading := [one for one in recorded if not trajectory.turns[one.turn].auxiliary][:1]:
            trajectory.opening, trajectory.tools = leading[0].history[:-1], leading[0].request.tools
            trajectory.turns[leading[0].turn].opens_with = ()
        delivered = [exchange.delivered for exchange in recorded]
        self.counts["discarded"] = delivered.count(False)
        self.counts["auxiliary"] = sum(turn.auxiliary for turn in trajectory.turns)
        chosen = trains(trajectory)
        if len(chosen) != len(delivered):
            raise ValueError(f"agent.train gave {len(chosen)} answers for {len(delivered)} turns; give one for each")
        heard = itertools.compress(trajectory.turns, delivered)
        *_, said = "", *(turn.message.content for turn in heard if not turn.auxiliary)
        keep(trajectory, [has and bool(wanted) for has, wanted in zip(delivered, chosen, strict=True)])
        if trajectory.final != said:  # the last reply, which is not trained, is scored all the same
            trajectory.output = trajectory.output or said
        trajectory.counts = {name: float(number) for name, number in self.counts.items()}
        return trajectory

    def _find_retried(self, request: TurnRequest) -> Exchange | None:
        """The exchange that is asked for again: what was sampled for somebody is not sampled twice."""
        same = [exchange for exchange in self._equal.get(request.digest, []) if not exchange.failed]
        lost = [exchange for exchange in same if exchange.lost]
        if same:  # what somebody has is asked for again as the newest alone
            self._equal[request.digest] = [one for one in same[:-1] if not one.delivered] + same[-1:]
        return lost[0] if lost else same[-1] if same and request.retry > 0 else None

    def _unreserved_tokens(self) -> int:
        return self._limits.sampled_tokens - self._sampled_tokens - sum(self._reserved.values())

    def _exhausted_limit(self) -> str:
        if self.counts["requests"] >= self._limits.requests:
            return "max_requests"
        return "max_trajectory_tokens" if self._sampled_tokens >= self._limits.sampled_tokens else ""

    async def _work(self, exchange: Exchange, prefixes: tuple[str, str]) -> TurnReply:
        """Sample the turn of a request and record it."""
        request = exchange.request
        self.counts.update(f"ignored/{name}" for name in request.ignored)
        of_reply, of_call = prefixes
        reply_id = f"{of_reply}{self.name}-{exchange.number}"
        wanted = min(self._sampling.max_new_tokens, request.max_tokens or math.inf)
        while self._reserved and self._unreserved_tokens() < wanted:  # or one request would cut another
            await asyncio.wait([other.work for other in self._reserved], return_when=asyncio.FIRST_COMPLETED)
        if self._exhausted_limit():
            self.counts["budget_stops"] += 1
            message = Message("assistant", USED_UP)
            self._turns[reply_id] = Turn([], [], [], [], Finish.STOP, message)  # paying for it has no effect
            return TurnReply(message, id=reply_id)
        self.counts["requests"] += 1
        context = self._context(exchange)
        try:
            completion, stop = await self._sample(exchange, context)
            message = self._chat.parse(completion.tokens, request.tools)
            if stop:
                content, reasoning = message.content.partition(stop)[0], message.reasoning.partition(stop)[0]
                message = dataclasses.replace(message, content=content, reasoning=reasoning)
            self._record(exchange, context, completion, message)
        finally:
            self._reserved.pop(exchange, None)
        reply = TurnReply(
            message,
            tuple(f"{of_call}{self.name}-{exchange.number}-{n}" for n in range(len(message.tool_calls))),
            id=reply_id,
            finish="length" if completion.finish is Finish.LENGTH else "stop_string" if stop else "stop",
            context_tokens=len(context.tokens),
            output_tokens=len(completion.tokens),
            stop=stop,
        )
        self._turns[reply_id] = self.trajectory.turns[exchange.turn]
        self._index.add(exchange, reply)
        return reply

    async def _sample(self, exchange: Exchange, context: _Context) -> tuple[Completion, str]:
        """The turn, and the stop string that ended it if one did. Raises RefusedError without room."""
        limits, request = self._limits, exchange.request
        others = {} if request.max_tokens is None else {"": request.max_tokens}
        used = limits.sampled_tokens - self._unreserved_tokens()
        limit, room = limits.of_turn(self._sampling, len(context.tokens), used, **others)
        if len(context.tokens) >= limits.context_tokens:
            self.counts["overflow"] += 1
            exchange.limit = "max_context_length"
            raise RefusedError("overflow", f"{len(context.tokens)} tokens > {limits.context_tokens - 1} maximum")
        self._reserved[exchange] = room
        began = time.perf_counter()
        try:
            async with self._chain(context) as chain:
                completion = await chain.sample(
                    context.tokens, dataclasses.replace(self._sampling, max_new_tokens=room)
                )
                completion, stop = self._cut(completion, request.stop)
                chain.tokens = [*context.tokens, *completion.tokens]
        except Exception as error:
            self.failure = error
            raise RefusedError("broken", f"the engine failed: {type(error).__name__}: {error}") from error
        exchange.asked_s, exchange.ended_s = began, time.perf_counter()
        self.trajectory.sample_s += exchange.ended_s - began
        exchange.limit = limit if completion.finish is Finish.LENGTH else ""
        return completion, stop

    def _cut(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The completion up to the token that completes a stop string, and this string."""
        tokens = completion.tokens

        def first_stop(count: int) -> str:
            text = self._chat.decode(tokens[:count])
            places = [(text.find(stop), stop) for stop in stops if stop in text]
            return min(places)[1] if places else ""

        if not stops or not first_stop(len(tokens)):
            return completion, ""
        count = bisect.bisect_left(range(len(tokens)), True, lo=1, key=lambda count: bool(first_stop(count)))
        cut = {name: getattr(completion, name)[:count] for name in ("tokens", "logprobs", "versions", "kept")}
        return dataclasses.replace(completion, **cut, finish=Finish.STOP), first_stop(count)

    def _record(self, exchange: Exchange, context: _Context, completion: Completion, message: Message) -> None:
        parent, turns = context.parent, self.trajectory.turns
        self.counts["exact" if context.extends else "chains"] += 1
        self.counts["rewritten_system"] += context.rewritten
        if parent is not None:
            parent.delivered = True  # or it could not be continued
            answers = context.history[len(parent.history) :]
            turns[parent.turn].observations = turns[parent.turn].observations or tuple(answers)
        exchange.turn, exchange.history = len(turns), [*context.history, message]
        offered = {tool.name for tool in exchange.request.tools}  # other names, the model's own, are none of metrics
        names = [call.name if call.name in offered else "" for call in message.tool_calls]
        self._calls += [CallRecord(name, CallOutcome.unseen) for name in names]
        self._sampled_tokens += len(completion.tokens)
        number = parent.turn if parent is not None and context.extends else -1
        turns.append(Turn.of(completion, message, context.new, number))
        turns[-1].asked_s, turns[-1].ended_s = exchange.asked_s, exchange.ended_s
        turns[-1].opens_with = context.history if parent is None else ()

    def _context(self, exchange: Exchange) -> _Context:
        """Where the turn is sampled. Raises RefusedError where the chat template has no place for the messages."""
        tools, history = exchange.request.tools, [sent.message for sent in exchange.request.messages]
        parent = self._index.continued(exchange)
        similar = None if parent is not None else self._index.continued(exchange, any_system=True)
        marks = {"rewritten": similar is not None, "repeats": self._index.repeats(exchange)}
        if self._pin_system:
            parent = parent or similar
        try:
            if parent is not None:
                answers = [sent.message for sent in exchange.messages[exchange.repeated + 1 :]]
                history, turn = [*parent.history, *answers], self.trajectory.turns[parent.turn]
                new = self._chat.extend(parent.history, answers, tools, turn.output[-1])
                if new is not None:
                    tokens = [*self.trajectory.context(parent.turn), *turn.output, *new]
                    return _Context(parent, history, tokens, new, extends=True, **marks)
            tokens = self._chat.open(history, tools)
            return _Context(parent, history, tokens, tokens, extends=False, **marks)
        except ConfigError as error:
            raise RefusedError("invalid", str(error)) from error

    @asynccontextmanager
    async def _chain(self, context: _Context) -> AsyncGenerator[_Chain]:
        """An idle conversation with the engine that has computed most of the context, or a new one."""
        idle = [chain for chain in self._chains if not chain.busy]
        shared = [shared_length(chain.tokens, context.tokens) for chain in idle]
        best = max(range(len(idle)), key=lambda i: shared[i], default=0)
        if context.repeats and not context.extends:
            self.counts["drifted"] += 1
            self.counts["drifted_tokens"] += len(context.tokens) - max(shared, default=0)
        if idle and 2 * shared[best] >= len(idle[best].tokens):
            chain = idle[best]
        elif idle and self._opened >= MAX_CHAINS:
            chain = min(idle, key=lambda chain: chain.last_used)
        else:
            self._opened += 1  # before it is awaited: several requests may open one at once
            chain = _Chain(await self._open.enter_async_context(self._open_chain(self._opened - 1)))
            self._chains.append(chain)
        chain.busy, chain.last_used = True, self.counts["requests"]
        try:
            yield chain
        finally:
            chain.busy = False


def keep(trajectory: Trajectory, chosen: Sequence[bool]) -> None:
    """Leave the chosen turns to be trained, each in its context; the others become `untrained`."""
    turns, left = trajectory.turns, itertools.compress(itertools.count(), chosen)
    numbers = {-1: -1} | {index: number for number, index in enumerate(left)}
    for index, turn in reversed(list(enumerate(turns))):  # a context is made of turns before it
        if chosen[index]:
            if turn.parent not in numbers:
                turn.new_context = trajectory.context(index)
            turn.parent = numbers.get(turn.parent, -1)
    trajectory.untrained += [turn for turn, wanted in zip(turns, chosen, strict=True) if not wanted]
    trajectory.turns = list(itertools.compress(turns, chosen))
