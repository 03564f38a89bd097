"""Sampling over HTTP: several servers that hold the same weights, each in a process of its own.

A request is a list of token ids, so that any server can go on with any conversation. Of a turn that is interrupted for
new weights what was sampled stays, and the rest is sampled with them; one whose server is lost is sampled elsewhere.
Conversations stay with the server that has their KV cache, and siblings share one, unless it is much busier than the
others.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtgrpo.engines import Answer, Key, RunningEngine, stream_key
from mtgrpo.engines.server import OWN, VLLM, Server, Sync, local, vllm
from mtgrpo.engines.server.push import IPC, NCCL, PROOF_TOKENS, TOP, Adapter, Files, Nothing, Proof, ProofError, Push
from mtgrpo.engines.server.replica import ANSWER_TIMEOUT_S, HEALTH, Answered, LostError, Process, Replica, ServerProcess
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import device_of_process
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.runtime.files import find_near
from mtgrpo.runtime.isolation import run_in_thread, run_isolated
from mtgrpo.runtime.workers import together
from mtgrpo.types import Completion, Finish, Sampling
from mtgrpo.weights.source import WeightSource

HEALTH_S = 10.0  # between two looks at whether the servers answer
ARRIVAL_S = 0.05  # for a request that was sent to arrive, and for an answer
MAX_LOSSES = 4  # servers that may be lost during one turn
MAX_RESTARTS = 3  # of one server that answers nothing in between
MAX_RELATIVE_LOAD = 1.5  # times the mean load: where a server has more, conversations of its tasks begin elsewhere
CONNECT_S = 5.0  # for a server that is said to be running
SHARED_MEMORY = Path("/dev/shm")
COPIES = 3  # of the weights that may lie there at once: the old ones, the new ones, and room
PUSHES: dict[Sync, type[Push]] = {
    Sync.none: Nothing, Sync.adapter: Adapter, Sync.files: Files, Sync.ipc: IPC, Sync.nccl: NCCL
}  # fmt: skip
STARTED = {VLLM: (vllm.command, vllm.environment), OWN: (local.command, local.environment)}  # here, by kind


def launched(settings: Server, model: str, dtype: str, longest: int, more: Sequence[str], lora_rank: int) -> list[str]:
    """The words after `mtgrpo launch` that start such a server on any machine; `more`: for its command line."""
    words = [settings.kind, "--model", model, "--dtype", dtype, "--max-length", str(longest)]
    words += ["--tensor-parallel", str(settings.tensor_parallel), "--lora-rank", str(lora_rank)]
    words += ["--memory-fraction", str(settings.memory_fraction)] if settings.memory_fraction else []
    words += ["--python", str(find_near(settings.python).absolute())] if settings.kind == VLLM else []
    return [*words, *(f"--argument={word}" for word in (*settings.arguments, *more))]


def _make_folder(source: WeightSource, shared: Path | None) -> Path:
    """A new folder for weights: in memory where there is room; in `shared`, for servers elsewhere, always the same."""
    if shared is not None:
        place = shared.absolute() / "mtgrpo-exchange"
        shutil.rmtree(place, ignore_errors=True)  # a run that was killed has left it
        place.mkdir(parents=True)
        return place
    needed = COPIES * source.size * source.dtype.itemsize
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > needed
    return Path(tempfile.mkdtemp(prefix="mtgrpo-", dir=SHARED_MEMORY if in_memory else None))


@dataclass(slots=True, eq=False)
class _Conversation:
    key: Key
    replica: Replica | None = None  # that has its KV cache


@dataclass(slots=True, eq=False)
class _Request:
    key: Key
    context: int  # tokens
    sampling: Sampling
    output: Completion = field(default_factory=lambda: Completion([], [], [], Finish.LENGTH))  # so far


class ServerEngine(RunningEngine):
    """A running engine; see the module. `load_weights` brings new weights to all servers, and has each prove them."""

    shares_weights = False

    def __init__(self, settings: Server, source: WeightSource, longest_context: int, folder: Path | None) -> None:
        """See `Server.start`: an engine over servers that are not started yet."""
        super().__init__(longest_context)
        way, _ = settings.way(source.lora is not None)
        shared = (folder or Path.cwd()) if settings.url or settings.elsewhere else None
        self._exchange = _make_folder(source, shared)  # removed at the end
        interface = settings.interface()
        try:
            self._push = PUSHES[way](self._exchange, source, settings.exact)
            self._replicas = [interface(f"the server at {url}", url) for url in settings.url] or [
                interface(f"server {number}", "http://server", self._prepare(settings, number, folder))
                for number in range(settings.replicas)
            ]
        except ConfigError:
            shutil.rmtree(self._exchange)
            raise
        self._start_timeout_s = settings.start_timeout_s
        self._sleeps = settings.shares_gpu and device_of_process().type == "cuda"  # gives the trainer's GPU back then
        self._asleep = False
        self._config: dict[str, Any] = {}  # of the model
        self._proof: Proof | None = None  # of the present version
        self._requests: list[_Request] = []
        self._losses, self._most_requests, self._measured = 0, 0, time.perf_counter()
        self._going = True
        self._changed = asyncio.Condition()  # of what requests wait for
        self._syncing = asyncio.Lock()  # of what servers hold
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: Exception | None = None  # why no more is sampled

    def _prepare(self, settings: Server, number: int, logs: Path | None) -> ServerProcess:
        """Server `number`, not started yet; on this machine it listens on a socket in the folder of the exchange."""
        push, dtype = self._push, str(self._push.dtype).removeprefix("torch.")
        log = (logs or self._exchange) / f"server_{number}.log"
        if settings.elsewhere:
            words = launched(settings, push.served, dtype, self._longest, push.words, push.rank)
            return settings.elsewhere(words, push.variables, settings.tensor_parallel, log)
        socket = self._exchange / f"server_{number}"
        command, environment = STARTED[settings.kind]
        words = command(settings, push.served, dtype, self._longest, ["--uds", str(socket), *push.words], push.rank)
        variables = {**environment(settings, number), **push.variables}
        return Process([settings.program, *words], variables, log, self._exchange, socket)

    @property
    def requests(self) -> list[str]:
        return [
            f"{r.key}: sampled {len(r.output.tokens)} of at most {r.sampling.max_new_tokens} tokens after a context "
            f"of {r.context}"
            for r in self._requests
        ]

    @contextmanager
    def _open(self, key: Key) -> Generator[Answer]:
        """The servers' own prefix caches decide how long the KV cache of a conversation stays."""
        yield partial(self._ask, _Conversation(key))

    async def _ask(
        self, conversation: _Conversation, tokens: Sequence[int], sampling: Sampling, stream: int
    ) -> Completion:
        """Until the turn has ended. What a server gives that is interrupted is kept; of one that is lost is nothing."""
        request, losses = _Request(conversation.key, len(tokens), sampling), 0
        output = request.output
        self._requests.append(request)
        self._most_requests = max(self._most_requests, len(self._requests))
        try:
            while True:
                await self._until(lambda: bool(self._failed or (self._going and any(r.alive for r in self._replicas))))
                self._raise_failure()
                replica = conversation.replica = self._route(conversation)
                version, count = self.version, len(output.tokens)
                rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - count)
                try:
                    part = await self._sample(replica, [*tokens, *output.tokens], rest, stream + count)
                except LostError as error:
                    self._lose(replica, error)
                    losses += 1
                    if losses == MAX_LOSSES:
                        raise EngineError(f"{losses} servers were lost during one turn; the last: {error}") from error
                    continue
                replica.restarts = 0
                output.tokens.extend(part.tokens)
                output.logprobs.extend(part.logprobs)
                output.versions.extend([version] * len(part.tokens))
                output.kept.extend(part.kept)
                if part.finish is not None:
                    return replace(output, finish=part.finish)
        finally:
            self._requests.remove(request)

    async def _sample(self, replica: Replica, tokens: Sequence[int], sampling: Sampling, seed: int) -> Answered:
        """What `replica` gives after `tokens`. Raises LostError, also where others find out that it is lost."""
        load = len(tokens) + sampling.max_new_tokens
        replica.add_load(load)
        answer = asyncio.ensure_future(replica.sample(tokens, sampling, seed))
        try:
            await asyncio.wait([answer, replica.lost], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise LostError(f"{replica.name} does not answer any more")
            return answer.result()
        finally:
            answer.cancel()
            replica.add_load(-load)

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
        alive = [replica for replica in alive if not replica.leaving] or alive
        if conversation.replica in alive:
            return conversation.replica
        mean = sum(replica.load for replica in alive) / len(alive)
        ranked = sorted(alive, key=lambda replica: stream_key(conversation.key.task, replica.name))
        return next(replica for replica in ranked if replica.load <= MAX_RELATIVE_LOAD * mean)

    def _lose(self, replica: Replica, error: LostError) -> None:
        """Ask `replica` for nothing until it has come back and holds the present weights."""
        if not replica.lost.done():
            replica.alive = replica.leaving = False
            replica.lost.set_result(None)
            self._losses += 1
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
                if replica.restarts > MAX_RESTARTS:
                    raise EngineError(f"{replica.name} was lost {MAX_RESTARTS} times and answered nothing in between")
                try:
                    await self._start(replica)
                    async with self._syncing:  # what is asked of it still goes on, where it was not lost for all
                        await self._meet(replica)
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

    async def _bring(self, replica: Replica) -> None:
        """Until it answers and is known to serve this model."""
        await self._start(replica)
        await self._meet(replica)

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        running = not (replica.process or replica.restarts)  # it is said to be
        await replica.wait_ready(CONNECT_S if running else self._start_timeout_s)

    async def _meet(self, replica: Replica) -> None:
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
        ask = partial(replica.likeliest, self._proof.tokens, TOP)
        late = LostError(f"{replica.name} gave no proof of its weights within engine.start_timeout_s")
        apart = self._proof.check(await run_isolated(ask, self._start_timeout_s, late), replica.name)
        self.metrics |= {"proof_nats": apart, "proof_bound_nats": self._proof.bound}
        replica.alive = not replica.lost.done()  # else it begins anew

    async def _watch(self) -> None:
        """Find servers that are lost while nobody asks them for anything, or that hang."""
        noted = False
        while True:
            await asyncio.sleep(HEALTH_S)
            try:
                await self._each(lambda replica: replica.ask("GET", HEALTH, timeout_s=ANSWER_TIMEOUT_S))
                await self._each(self._leave)
            except Exception as error:  # of a cluster, say, that cannot be asked
                if not noted:
                    what = f"{type(error).__name__}: {error}"
                    self.notes.append(f"engine: looking after the servers failed, and is tried again: {what}")
                noted = True

    async def _leave(self, replica: Replica) -> None:
        """Empty a server whose machine is about to go, where others are there; once it is, it begins anew elsewhere."""
        going = replica.process is not None and await asyncio.to_thread(replica.process.is_leaving)
        replica.leaving = going and any(
            other.alive and not other.leaving for other in self._replicas if other != replica
        )
        if replica.leaving and not replica.load:
            raise LostError(f"{replica.name} leaves a machine that is about to go")

    async def _each(self, work: Callable[[Replica], Awaitable[None]], among: Sequence[Replica] | None = None) -> None:
        """Do `work` with all servers at once, those that are alive if not told otherwise."""

        async def attempt(replica: Replica) -> None:
            try:
                await work(replica)
            except LostError as error:
                self._lose(replica, error)

        alive = [replica for replica in self._replicas if replica.alive]
        await together(map(attempt, alive if among is None else among))

    async def load_weights(self, source: WeightSource) -> None:
        """Bring the present weights of `source` to all servers. The first time they are started, or looked at.

        Requests in flight go on with the new weights, where they are. Raises ConfigError for what the user got wrong,
        ProofError where a server does not hold the weights.
        """
        began, going = time.perf_counter(), self._going
        await self._pause()
        async with self._syncing:
            first, self.version = self._proof is None, source.version
            written = await run_in_thread(lambda: self._push.write(source), bounded=False)
            count = min(PROOF_TOKENS, self._longest - 1)  # and one is sampled
            context = self._recent[:count] or ordinary_tokens(source.config, count).tolist()
            self._proof = await run_in_thread(lambda: Proof(source, context), bounded=False)
            if first:  # all at once, so that what is wrong is told before anything is sampled
                self._config = source.config.to_dict()
                for replica in self._replicas:
                    replica.lost = asyncio.get_running_loop().create_future()
                await self._each(self._bring, self._replicas)
                self._spawn(self._watch())
            await self._awake()
            there = [replica for replica in self._replicas if not replica.lost.done()]
            await self._each(self._update, there if first else None)
        seconds = time.perf_counter() - began
        self.sync_s += seconds
        self.metrics |= {"push_s": seconds, "push_bytes": float(written)}
        self._measure()
        self._raise_failure()
        if going:
            await self._resume()

    def _measure(self) -> None:
        """What servers have done since the last time."""
        now, busy_s = time.perf_counter(), sum(replica.take_busy_s() for replica in self._replicas)
        there = sum(replica.alive for replica in self._replicas)
        self.metrics |= {"servers": float(there), "servers_lost": float(self._losses)}
        self.metrics["idle_share"] = max(0.0, 1 - busy_s / (now - self._measured) / max(1, there))
        self.metrics["requests_max"], self._most_requests = float(self._most_requests), len(self._requests)
        self._measured = now

    async def _pause(self) -> None:
        """Sample nothing until `_resume`; what requests in flight have is kept."""
        self._going = False
        while any(replica.load for replica in self._replicas):
            await self._each(lambda replica: replica.abort())  # once more for those that had not arrived
            await asyncio.sleep(ARRIVAL_S)

    async def _resume(self) -> None:
        self._going = True
        await self._notify()

    async def sleep(self) -> None:
        """See `RunningEngine.sleep`; servers that share the trainer's GPU give their memory back."""
        await self._pause()
        if self._sleeps:
            async with self._syncing:  # one that is coming back sleeps too
                await self._each(lambda replica: replica.sleep())
            self._asleep = True

    async def wake(self) -> None:
        await self._awake()
        await self._resume()

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
