"""Sampling over HTTP: several servers that hold the same weights, each in a process of its own.

A request is a list of token ids, so that any server can go on with any conversation. Of a turn that is interrupted for
new weights what was sampled stays, and the rest is sampled with them; one whose server is lost is sampled elsewhere.
Conversations stay with the server that has their KV cache, and siblings share one, unless it is much busier than the
others.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtgrpo.engines import Answer, Key, RunningEngine, stream_key
from mtgrpo.engines.server.replica import HANGS_S, HEALTH, Replica
from mtgrpo.errors import EngineError
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.runtime.together import together
from mtgrpo.types import Completion, Finish, Sampling
from mtgrpo.weights.push import PROVEN, TOP, LostError, Proof, ProofError, Push
from mtgrpo.weights.source import WeightSource

HEALTH_S = 10.0  # between two looks at whether the servers answer
ARRIVES_S = 0.05  # for a request that was sent to arrive, and for an answer
LOSSES = 4  # servers that may be lost during one turn
RESTARTS = 3  # of one server that answers nothing in between
BUSIER = 1.5  # times the mean load: where a server has more, conversations of its tasks begin elsewhere
REACHED_S = 5.0  # for a server that is said to be running


@dataclass(slots=True, eq=False)
class _Conversation:
    key: Key
    replica: Replica | None = None  # that has its KV cache


@dataclass(slots=True, eq=False)
class _Request:
    key: Key
    tokens: int
    sampling: Sampling
    sampled: int = 0
    asked: bool = False  # whether a server works on it


class ServerEngine(RunningEngine):
    """A running engine; see the module. `load_weights` brings new weights to all servers, and has each prove them."""

    shares_weights = False

    def __init__(
        self, replicas: Sequence[Replica], push: Push, longest_context: int, start_timeout_s: float, sleeps: bool,
        exchange: Path,
    ) -> None:  # fmt: skip
        """An engine over servers that are not started yet.

        sleeps: they share a GPU with the trainer, and give its memory back while they sleep. exchange: the folder for
        weights, which is removed at the end.
        """
        super().__init__(longest_context)
        self._replicas, self._push = list(replicas), push
        self._start_timeout_s, self._exchange = start_timeout_s, exchange
        self._sleeps, self._asleep = sleeps, False
        self._config: dict[str, Any] = {}  # of the model
        self._proof: Proof | None = None  # of the present version
        self._requests: list[_Request] = []
        self._going = True
        self._changed = asyncio.Condition()  # of what requests wait for
        self._syncing = asyncio.Lock()  # of what servers hold
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: Exception | None = None  # why no more is sampled

    @property
    def requests(self) -> list[str]:
        return [
            f"{r.key}: sampled {r.sampled} of at most {r.sampling.max_new_tokens} tokens after a context of {r.tokens}"
            for r in self._requests
        ]

    @contextmanager
    def _open(self, key: Key) -> Generator[Answer]:
        """The servers' own prefix caches decide how long the KV cache of a conversation stays."""
        yield partial(self._ask, _Conversation(key))

    async def _ask(
        self, conversation: _Conversation, tokens: Sequence[int], sampling: Sampling, stream: int
    ) -> Completion:
        request = _Request(conversation.key, len(tokens), sampling)
        self._requests.append(request)
        try:
            return await self._sample(conversation, request, tokens, stream)
        finally:
            self._requests.remove(request)

    async def _sample(
        self, conversation: _Conversation, request: _Request, tokens: Sequence[int], stream: int
    ) -> Completion:
        """Until the turn has ended. What a server gives that is interrupted is kept; of one that is lost is nothing."""
        sampled, losses = Completion([], [], [], Finish.LENGTH), 0
        while True:
            await self._ready()
            replica = conversation.replica = self._route(conversation)
            rest = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(sampled.tokens))
            load = len(tokens) + request.sampling.max_new_tokens
            version, request.asked = self.version, True
            replica.load += load
            answer = asyncio.ensure_future(
                replica.sample([*tokens, *sampled.tokens], rest, stream + len(sampled.tokens))
            )
            try:
                await asyncio.wait([answer, replica.lost], return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise LostError(f"{replica.name} does not answer any more")
                part = answer.result()
            except LostError as error:
                self._lose(replica, error)
                losses += 1
                if losses == LOSSES:
                    raise EngineError(f"{losses} servers were lost during one turn; the last: {error}") from error
                continue
            finally:
                answer.cancel()
                replica.load -= load
                request.asked = False
            replica.restarts = 0
            sampled.tokens.extend(part.tokens)
            sampled.logprobs.extend(part.logprobs)
            sampled.versions.extend([version] * len(part.tokens))
            sampled.kept.extend(part.kept)
            request.sampled = len(sampled.tokens)
            if part.finish is not None:
                return replace(sampled, finish=part.finish)

    async def _ready(self) -> None:
        """Wait until sampling goes on and a server is there."""

        def is_ready() -> bool:
            return self._failed is not None or (self._going and any(r.alive for r in self._replicas))

        await self._until(is_ready)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise EngineError(str(self._failed)) from self._failed

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _route(self, conversation: _Conversation) -> Replica:
        """The server of the turn before; at first the one that its task's siblings go to, unless it is too busy."""
        alive = [replica for replica in self._replicas if replica.alive]
        if conversation.replica in alive:
            return conversation.replica
        mean = sum(replica.load for replica in alive) / len(alive)
        ranked = sorted(alive, key=lambda replica: stream_key(conversation.key.task, replica.name))
        return next(replica for replica in ranked if replica.load <= BUSIER * mean)

    def _lose(self, replica: Replica, error: LostError) -> None:
        """Ask `replica` for nothing until it has come back and holds the present weights."""
        if not replica.lost.done():
            replica.alive = False
            replica.lost.set_result(None)
            self.notes.append(f"engine: lost a server; what it was asked for is asked elsewhere: {error}")
            self._spawn(self._revive(replica))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _revive(self, replica: Replica) -> None:
        """Start it again, or wait until somebody has; after too many times in a row do without it."""
        try:
            while not replica.alive:
                await self._until(lambda: not self._asleep)  # the trainer has the memory
                replica.restarts += 1
                if replica.restarts > RESTARTS:
                    raise EngineError(f"{replica.name} was lost {RESTARTS} times and answered nothing in between")
                try:
                    await self._bring(replica, self._start_timeout_s)
                    while not replica.alive:
                        await self._until(lambda: self._push.current)
                        async with self._syncing:
                            await self._update(replica)
                    self.notes.append(f"engine: {replica.name} is back")
                except LostError as error:
                    self.notes.append(f"engine: {error}")
        except Exception as error:
            replica.gone = True
            self.notes.append(f"engine: doing without {replica.name}: {error}")
            if isinstance(error, ProofError) or all(other.gone for other in self._replicas):
                self._failed = error
        await self._notify()

    async def _bring(self, replica: Replica, timeout_s: float) -> None:
        """Until it answers and is known to serve this model."""
        if replica.process:
            await replica.process.stop()
            await replica.process.start()
        await replica.wait_ready(timeout_s)
        await replica.check(self._config, self._longest)
        await self._push.meet(replica)
        replica.lost = asyncio.get_running_loop().create_future()

    async def _update(self, replica: Replica) -> None:
        """Let it take over what was written last and prove that it has; raises ProofError where it has not.

        What changes under way, in training, is proven the next time.
        """
        assert self._proof is not None, "weights are written first"
        await self._push.load(replica)
        await replica.reset_cache()
        if not self._push.current:
            return
        await replica.label(self._proof.version)
        apart = self._proof.check(await replica.likeliest(self._proof.tokens, TOP), replica.name)
        self.metrics |= {"proof_nats": apart, "proof_bound_nats": self._proof.bound}
        replica.alive = True

    async def _watch(self) -> None:
        """Find servers that are lost while nobody asks them for anything, or that hang."""
        while True:
            await asyncio.sleep(HEALTH_S)
            await self._each(lambda replica: replica.ask("GET", HEALTH, timeout_s=HANGS_S))

    async def _each(self, work: Callable[[Replica], Awaitable[None]], among: Sequence[Replica] | None = None) -> None:
        """Do `work` with all servers at once, those that are alive if not told otherwise."""

        async def one(replica: Replica) -> None:
            try:
                await work(replica)
            except LostError as error:
                self._lose(replica, error)

        alive = [replica for replica in self._replicas if replica.alive]
        await together(map(one, alive if among is None else among))

    async def load_weights(self, source: WeightSource) -> None:
        """Bring the present weights of `source` to all servers. The first time they are started, or looked at.

        Requests in flight go on with the new weights, where they are. Raises ConfigError for what the user got wrong,
        ProofError where a server does not hold the weights.
        """
        began, going = time.perf_counter(), self._going
        await self.pause()
        async with self._syncing:
            first, self.version = self._proof is None, source.version
            written = await asyncio.to_thread(self._push.write, source)
            context = self._recent[:PROVEN] or ordinary_tokens(source.config, min(PROVEN, self._longest)).tolist()
            self._proof = await asyncio.to_thread(Proof.of, source, context)
            if first:
                await self._start(source)
            await self._awake()
            await self._each(self._update, self._replicas if first else None)
        seconds = time.perf_counter() - began
        self.sync_s += seconds
        self.metrics |= {"push_s": seconds, "push_bytes": float(written)}
        self.metrics["servers"] = float(sum(replica.alive for replica in self._replicas))
        self._raise_failure()
        if going:
            await self.resume()

    async def _start(self, source: WeightSource) -> None:
        """All servers at once, so that what is wrong is told before anything is sampled."""
        self._config = source.config.to_dict()
        limits_s = [self._start_timeout_s if replica.process else REACHED_S for replica in self._replicas]
        await together(self._bring(replica, limit_s) for replica, limit_s in zip(self._replicas, limits_s, strict=True))
        self._spawn(self._watch())

    async def pause(self) -> None:
        """Sample nothing until `resume`; what requests in flight have is kept."""
        self._going = False
        while any(request.asked for request in self._requests):
            await self._each(lambda replica: replica.abort())  # once more for those that had not arrived
            await asyncio.sleep(ARRIVES_S)

    async def resume(self) -> None:
        self._going = True
        await self._notify()

    async def sleep(self) -> None:
        """Pause; servers that share the trainer's GPU give their memory back."""
        await self.pause()
        if self._sleeps:
            async with self._syncing:  # one that is coming back sleeps too
                await self._each(lambda replica: replica.sleep())
            self._asleep = True

    async def wake(self) -> None:
        await self._awake()
        await self.resume()

    async def _awake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the trainer has not in use is theirs
            await self._each(lambda replica: replica.wake())
            self._asleep = False
            await self._notify()

    async def close(self) -> None:
        self._failed = self._failed or EngineError("the engine is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self._replicas:
            if replica.alive:
                replica.lost.set_result(None)
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        shutil.rmtree(self._exchange, ignore_errors=True)
        await self._notify()
