"""One conversation of a foreign agent: which recorded turn a request continues, and what is recorded of it.

A request continues the longest recorded turn whose request and reply it repeats. Its context is then that turn's, as it
was recorded, with what is new; any other request is rendered as a whole. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from mtgrpo.chat import Chat
from mtgrpo.chat.safe_tokenizer import shared_length
from mtgrpo.endpoint import RefusedError, Reply, Request
from mtgrpo.endpoint.exchange import Exchange
from mtgrpo.errors import ConfigError
from mtgrpo.types import CallRecord, Completion, Finish, Message, Outcome, Sample, Sampling, Task, Trajectory, Turn

USED_UP = "The budget of this conversation is used up."  # not empty: agents ask again for what is
MOST_USED_UP = 3  # such replies; then requests are refused
SETTLE_S = 1.0  # for requests that are under way when the agent has ended

OpenChain = Callable[[int], AbstractAsyncContextManager[Sample]]  # the n-th conversation with the engine, from 0


@dataclass(frozen=True)
class Budget:
    """What an agent may use in one conversation."""

    context_tokens: int  # context and output of one turn together
    sampled_tokens: int  # over the whole trajectory
    requests: int  # that sample a turn


@dataclass(eq=False)
class _Chain:
    """A conversation with the engine, which keeps what it has computed. Contexts that are alike share one in turn."""

    sample: Sample | None = None
    tokens: list[int] = field(default_factory=list[int])  # the last context and output
    busy: bool = True


@dataclass(frozen=True)
class _Context:
    """Where a turn is sampled."""

    parent: Exchange | None  # whose turn it continues
    answers: list[Message]  # what it has beyond the parent's; [] without a parent
    history: list[Message]
    tokens: list[int]
    new: list[int]  # the tokens beyond the parent's; all of them where it is opened anew
    extends: bool
    rewritten: bool  # it would continue a turn, but for its system prompt


class Session:
    """Answers the requests of one conversation and records it in `trajectory`."""

    def __init__(
        self,
        task: Task,
        chat: Chat,
        sampling: Sampling,
        budget: Budget,
        open_chain: OpenChain,
        pin_system: bool = False,
        strict: bool = False,
    ) -> None:
        """pin_system: a rewritten system prompt counts as the first one; strict: ignored fields are refused."""
        self.trajectory = Trajectory(task)
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None  # of the engine
        self.name = ""  # part of the ids of replies; the endpoint sets it
        self._chat, self._budget, self._open_chain = chat, budget, open_chain
        self._sampling = dataclasses.replace(sampling, stop_ids=[*sampling.stop_ids, *chat.stop_ids])
        self._pin_system, self._strict = pin_system, strict
        self._exchanges: list[Exchange] = []
        self._recorded: list[Exchange] = []  # of each turn
        self._reserved: dict[Exchange, int] = {}  # the most tokens that what is being sampled may still take
        self._chains: list[_Chain] = []
        self._open = AsyncExitStack()
        self._closed = False

    @property
    def limit(self) -> str:
        """The limit at which the conversation stands, or ended; "" = none."""
        if self.counts["budget_stops"]:
            return self._used_up()
        return self._exchanges[-1].limit if self._exchanges else ""

    async def answer(self, request: Request, connection: object, prefixes: tuple[str, str] = ("", "")) -> Reply:
        """The reply, which is on its way to `connection` until `settle`. Raises RefusedError.

        prefixes: of the ids of replies and of tool calls. The turn is sampled to its end even if nobody waits for it.
        """
        if self._closed or self.counts["budget_stops"] >= MOST_USED_UP:
            raise RefusedError("closed", "the conversation of this key has ended")
        if self._strict and request.ignored:
            raise RefusedError("invalid", f"agent.strict=true: {', '.join(request.ignored)} would have no effect")
        exchange = self._retried(request)
        if exchange is None:
            exchange = Exchange.of(request)
            exchange.number = len(self._exchanges)
            exchange.work = asyncio.create_task(self._work(exchange, prefixes))
            exchange.work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may be lost
            self._exchanges.append(exchange)
        else:
            self.counts["retries_joined"] += 1
        assert exchange.work is not None
        exchange.connections.add(connection)
        try:
            return await asyncio.shield(exchange.work)
        except asyncio.CancelledError:
            if exchange.work.cancelled():
                raise RefusedError("closed", "the conversation of this key has ended") from None
            raise

    def settle(self, connection: object, delivered: bool) -> None:
        """The connection has been sent its reply, or has gone."""
        for exchange in self._exchanges:
            if connection in exchange.connections:
                exchange.connections.remove(connection)
                exchange.delivered = exchange.delivered or delivered

    def count(self, request: Request) -> int:
        """The tokens of the context that the request would have. Raises RefusedError."""
        return len(self._context(Exchange.of(request)).tokens)

    def reward(self, amount: float, reply_id: str = "") -> None:
        """Pay for the turn of a reply, or for the whole conversation; what is paid adds up. Raises RefusedError."""
        if not math.isfinite(amount):
            raise RefusedError("invalid", f"reward={amount}: give a finite number")
        if not reply_id:
            self.trajectory.given = (self.trajectory.given or 0.0) + amount
            return
        numbers = [e.turn for e in self._recorded if e.reply is not None and e.reply.id == reply_id]
        if not numbers:
            raise RefusedError("invalid", f"a reward for the reply {reply_id!r}, which this conversation has not")
        self.trajectory.turns[numbers[0]].paid += amount

    async def close(self) -> None:
        """Wait a moment for what is being sent, cancel what is being sampled, answer no more."""
        until = time.monotonic() + SETTLE_S
        while any(exchange.connections for exchange in self._exchanges) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self._closed = True
        works = [exchange.work for exchange in self._exchanges if exchange.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await self._open.aclose()

    def finish(self, trains: Callable[[Trajectory], Sequence[bool]]) -> Trajectory:
        """The trajectory, once it is closed. Turns that nobody received or `trains` leaves out are not trained.

        Turns that announce other tools than most turns do are auxiliary, unless they continue one that is not: an agent
        may ask for its last answer without tools.
        """
        trajectory = self.trajectory
        tools = [tuple(tool.name for tool in exchange.request.tools) for exchange in self._recorded]
        main = Counter(tools).most_common(1)
        for turn, names in zip(trajectory.turns, tools, strict=True):
            continues = turn.parent >= 0 and not trajectory.turns[turn.parent].auxiliary
            turn.auxiliary = names != main[0][0] and not continues
        delivered = [exchange.delivered for exchange in self._recorded]
        self.counts["discarded"] = delivered.count(False)
        self.counts["auxiliary"] = sum(turn.auxiliary for turn in trajectory.turns)
        chosen = trains(trajectory)
        if len(chosen) != len(delivered):
            raise ValueError(f"agent.train gave {len(chosen)} answers for {len(delivered)} turns; give one for each")
        keep(trajectory, [has and bool(wanted) for has, wanted in zip(delivered, chosen, strict=True)])
        trajectory.counts = {name: float(number) for name, number in self.counts.items()}
        return trajectory

    def _retried(self, request: Request) -> Exchange | None:
        """The exchange that is asked for again: what was sampled for somebody is not sampled twice."""
        same = [e for e in self._exchanges if e.request.digest == request.digest and not e.failed]
        lost = [exchange for exchange in same if exchange.lost]
        return lost[0] if lost else same[-1] if same and request.retry > 0 else None

    def _unreserved(self) -> int:
        return self._budget.sampled_tokens - self.trajectory.sampled_tokens - sum(self._reserved.values())

    def _used_up(self) -> str:
        if self.counts["requests"] >= self._budget.requests:
            return "max_requests"
        return "max_trajectory_tokens" if self.trajectory.sampled_tokens >= self._budget.sampled_tokens else ""

    async def _work(self, exchange: Exchange, prefixes: tuple[str, str]) -> Reply:
        """Sample the turn of a request and record it."""
        request = exchange.request
        self.counts.update(f"ignored/{name}" for name in request.ignored)
        of_reply, of_call = prefixes
        reply_id = f"{of_reply}{self.name}-{exchange.number}"
        wanted = min(self._sampling.max_new_tokens, request.max_tokens or math.inf)
        while self._reserved and self._unreserved() < wanted:  # or one request would cut another
            others = [other.work for other in self._reserved if other.work is not None]
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        if self._used_up():
            self.counts["budget_stops"] += 1
            exchange.reply = Reply(reply_id, Message("assistant", USED_UP), "stop", 0, 0)
            return exchange.reply
        self.counts["requests"] += 1
        context = self._context(exchange)
        try:
            completion, stop = await self._sample(exchange, context)
            message = self._chat.parse(completion.tokens)
            if stop:
                content, reasoning = message.content.partition(stop)[0], message.reasoning.partition(stop)[0]
                message = dataclasses.replace(message, content=content, reasoning=reasoning)
            self._record(exchange, context, completion, message)
        finally:
            self._reserved.pop(exchange, None)
        cut = "length" if completion.finish is Finish.LENGTH else "stop_string" if stop else "stop"
        calls = tuple(f"{of_call}{self.name}-{exchange.number}-{n}" for n in range(len(message.tool_calls)))
        exchange.reply = Reply(reply_id, message, cut, len(context.tokens), len(completion.tokens), calls, stop)
        return exchange.reply

    async def _sample(self, exchange: Exchange, context: _Context) -> tuple[Completion, str]:
        """The turn, and the stop string that ended it if one did. Raises RefusedError without room."""
        limits, request = self._budget, exchange.request
        rooms = {
            "max_new_tokens": self._sampling.max_new_tokens,
            "max_context_length": limits.context_tokens - len(context.tokens),
            "max_trajectory_tokens": self._unreserved(),
        }
        if rooms["max_context_length"] < 1:
            self.counts["overflow"] += 1
            exchange.limit = "max_context_length"
            raise RefusedError("overflow", f"{len(context.tokens)} tokens > {limits.context_tokens - 1} maximum")
        if request.max_tokens is not None:
            rooms[""] = request.max_tokens
        limit = min(rooms, key=lambda name: rooms[name])
        self._reserved[exchange] = rooms[limit]
        began = time.perf_counter()
        try:
            async with self._chain(context) as (chain, sample):
                completion = await sample(
                    context.tokens, dataclasses.replace(self._sampling, max_new_tokens=rooms[limit])
                )
                completion, stop = self._cut(completion, request.stop)
                chain.tokens = [*context.tokens, *completion.tokens]
        except Exception as error:
            self.failure = error
            raise RefusedError("broken", f"the engine failed: {type(error).__name__}: {error}") from error
        self.trajectory.sample_s += time.perf_counter() - began
        exchange.limit = limit if completion.finish is Finish.LENGTH else ""
        return completion, stop

    def _cut(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The completion up to the token that completes a stop string, and this string."""
        tokens = completion.tokens

        def found(count: int) -> str:
            text = self._chat.decode(tokens[:count])
            places = [(text.find(stop), stop) for stop in stops if stop in text]
            return min(places)[1] if places else ""

        if not stops or not found(len(tokens)):
            return completion, ""
        low, high = 0, len(tokens)  # found in `high` tokens, not in `low`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle, high)
        cut = Completion(
            tokens[:high], completion.logprobs[:high], completion.versions[:high], Finish.STOP, completion.kept[:high]
        )
        return cut, found(high)

    def _record(self, exchange: Exchange, context: _Context, completion: Completion, message: Message) -> None:
        parent, trajectory = context.parent, self.trajectory
        self.counts["exact" if context.extends else "chains"] += 1
        self.counts["rewritten_system"] += context.rewritten
        if parent is not None:
            parent.delivered = True  # or it could not be continued
            turn = trajectory.turns[parent.turn]
            turn.observations = turn.observations or tuple(context.answers)
        exchange.turn, exchange.history = len(trajectory.turns), [*context.history, message]
        trajectory.calls = [*trajectory.calls, *(CallRecord(call.name, Outcome.unseen) for call in message.tool_calls)]
        number = parent.turn if parent is not None and context.extends else -1
        trajectory.turns.append(Turn.of(completion, message, context.new, number))
        self._recorded.append(exchange)

    def _context(self, exchange: Exchange) -> _Context:
        """Where the turn is sampled. Raises RefusedError where the chat template has no place for the messages."""
        request = exchange.request
        parent, rewritten = exchange.parent(self._recorded), False
        if parent is None and (found := exchange.parent(self._recorded, any_system=True)):
            rewritten = True
            parent = found if self._pin_system else None
        try:
            if parent is None:
                history = [said.message for said in request.messages]
                tokens = self._chat.open(history, request.tools)
                return _Context(None, [], history, tokens, tokens, extends=False, rewritten=rewritten)
            answers = [said.message for said in exchange.messages[len(parent.rest) + 1 :]]
            history, turn = [*parent.history, *answers], self.trajectory.turns[parent.turn]
            new = self._chat.extend(parent.history, answers, request.tools, turn.output[-1])
            if new is None:
                tokens = self._chat.open(history, request.tools)
                return _Context(parent, answers, history, tokens, tokens, extends=False, rewritten=rewritten)
            tokens = [*self.trajectory.context(parent.turn), *turn.output, *new]
            return _Context(parent, answers, history, tokens, new, extends=True, rewritten=rewritten)
        except ConfigError as error:
            raise RefusedError("invalid", str(error)) from error

    @asynccontextmanager
    async def _chain(self, context: _Context) -> AsyncGenerator[tuple[_Chain, Sample]]:
        """An idle conversation with the engine that has computed most of the context, or a new one."""
        idle = [chain for chain in self._chains if not chain.busy]
        shared = [shared_length(chain.tokens, context.tokens) for chain in idle]
        best = max(range(len(idle)), key=lambda i: shared[i], default=0)
        repeats = self._recorded and any(message.role == "assistant" for message in context.history)
        if repeats and not context.extends:
            self.counts["drifted"] += 1
            self.counts["drifted_tokens"] += len(context.tokens) - max(shared, default=0)
        if idle and 2 * shared[best] >= len(idle[best].tokens):
            chain = idle[best]
        else:
            chain = _Chain()
            self._chains.append(chain)
            chain.sample = await self._open.enter_async_context(self._open_chain(len(self._chains) - 1))
        chain.busy = True
        try:
            assert chain.sample is not None
            yield chain, chain.sample
        finally:
            chain.busy = False


def keep(trajectory: Trajectory, chosen: Sequence[bool]) -> None:
    """Leave the chosen turns to be trained, each in its context; the others become `untrained`."""
    numbers: dict[int, int] = {-1: -1}  # of the turns that are left
    left: list[Turn] = []
    contexts = {
        index: trajectory.context(index)
        for index, turn in enumerate(trajectory.turns)
        if chosen[index] and turn.parent >= 0 and not chosen[turn.parent]
    }
    for index, turn in enumerate(trajectory.turns):
        if not chosen[index]:
            trajectory.untrained.append(turn)
            continue
        numbers[index] = len(left)
        turn.parent = numbers.get(turn.parent, -1)
        turn.new_context = contexts.get(index, turn.new_context)
        left.append(turn)
    trajectory.turns = left
