"""Sampling in this process, with the very weights that are trained, so that nothing is sent.

Where they are trained in other processes, a copy of the model is here, and gets them after each update.

All conversations go forward together: a step decodes one token of each, or prefills tokens that are new in it. The KV
cache stays between turns, so a new turn prefills only what is new; siblings share the blocks of their prompt. The loop
runs inside the event loop, between the coroutines of the conversations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtgrpo.engines import Answer, Key, RunningEngine
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.decoder import Forward
from mtgrpo.engines.local.kv_cache import BLOCK_SIZE, BlockTable, KVCache, check_room, memory_bytes, token_bytes
from mtgrpo.engines.local.paged_attention import BatchPlan, BatchPlanner, KernelPlan, Row, attend
from mtgrpo.engines.local.planner import choose_planner
from mtgrpo.engines.local.sampling import sample, uniforms
from mtgrpo.engines.local.scheduler import MAX_PREFILL_TOKENS, OpenConversation, Request, Scheduler
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.out_of_memory import explained
from mtgrpo.model.rounding import Reference, distance, plain_logprobs, reference
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.types import Completion, Finish, Sampling
from mtgrpo.weights.source import ModelWeights, WeightSource

CHECK_TOKENS = 16  # tokens of a context that are computed again after each update
PROBE_TOKENS = 3 * BLOCK_SIZE  # tokens that are computed again at the start
DECODED = 8  # of these, one at a time


def start_engine(settings: Local, source: WeightSource, deterministic: bool, longest_context: int) -> LocalEngine:
    """See `Local.start`."""
    own = source.here()
    model, reason = own.model, own.traits.unsupported_reason
    if not reason and len(set(source.traits.caches)) > 1:
        reason = f"the layers of {type(model).__name__} have keys of different shapes"
    if reason:
        raise ConfigError(f"engine=local cannot sample from this model: {reason}; choose another model or engine")
    total = memory_bytes(model.device)
    check_room(settings.cache_share, total, token_bytes(model), longest_context)
    source.traits.limit_without_windows.check(longest_context)
    kv_cache = KVCache(model, int(settings.cache_share * total / token_bytes(model)), longest_context)
    engine = LocalEngine(own, deterministic, kv_cache, longest_context, settings.keep_stale_cache, settings.compiled)
    engine.shares_weights = own is source
    engine.check()
    return engine


class LocalEngine(RunningEngine):
    """A running engine. When the weights change, the KV cache is reset: contexts are prefilled again.

    With `keep_stale` open conversations keep theirs; new ones do not share it.
    """

    shares_weights = True

    def __init__(
        self, source: ModelWeights, deterministic: bool, kv_cache: KVCache, longest_context: int,
        keep_stale: bool = False, compiled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(longest_context)
        self.version = source.version
        self._model = model = source.model
        self._source: WeightSource = source
        self._changes = source.changes  # of the weights that caches and copies are of
        self._deterministic, self._keep_stale = deterministic, keep_stale
        self._forward = Forward(model)
        self._kv_cache = kv_cache
        self._scheduler = Scheduler(kv_cache, MAX_PREFILL_TOKENS[model.device.type])
        self._planner, self._kernels_note = choose_planner(model, kv_cache, compiled)
        self._bound = 0.0  # nats that rounding explained when it was last measured
        self._changed = asyncio.Event()
        self._going = asyncio.Event()  # unset while asleep
        self._going.set()
        self._closed = False
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def requests(self) -> list[str]:
        return [
            f"{r.conversation.key}: sampled {len(r.output.tokens)} of at most {r.sampling.max_new_tokens} tokens, "
            f"{r.pending} of {len(r.tokens)} still to be computed"
            for r in self._scheduler.requests
        ]

    def check(self) -> None:
        """Compare with the model's own forward pass, through the KV cache; leaves fused decoding where that is wrong.

        Raises ConfigError when decoding through the model's own modules is wrong too.
        """
        context = ordinary_tokens(self._model.config, min(PROBE_TOKENS, self._longest)).to(self._model.device)
        expected = reference(self._model, context)
        self._bound = expected.bound
        apart, fault = self._compare(context, expected)
        if fault and not isinstance(self._planner, BatchPlanner):
            self._planner, self._kernels_note = choose_planner(self._model, self._kv_cache, compiled=False)
            self.notes.append(f"engine: log-probabilities by compiled kernels {fault}: torch's are used")
            apart, fault = self._compare(context, expected)
        if self._forward.fused and fault:
            self._leave_fused(apart, expected)
            _, fault = self._compare(context, expected)
        if fault:
            raise ConfigError(
                f"engine=local cannot sample from {type(self._model).__name__}: over {len(context)} tokens its "
                f"log-probabilities {fault}; choose another model or engine"
            )
        path = "fused decoding" if self._forward.fused else "decoding through the model's own modules"
        self.notes.append(f"engine: local, {path}{self._kernels_note}; a KV cache of {self._kv_cache.tokens:,} tokens")

    def _compare(self, context: Tensor, expected: Reference) -> tuple[float, str]:
        """How far decoding is from `expected` over `context`, in nats, and what is wrong with that, if anything."""
        try:
            logprobs = self._through_cache(context)
        except Exception as error:  # whatever compiling or starting kernels meets on a GPU
            if isinstance(self._planner, BatchPlanner):
                raise
            return torch.nan, f"fail ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        apart = distance(expected.logprobs, logprobs)
        if not isinstance(self._planner, BatchPlanner):  # which may prefill by other kernels than it decodes
            apart = max(apart, distance(expected.logprobs[-DECODED:], logprobs[-DECODED:]))
        return apart, "" if apart <= expected.bound else _differ(apart, expected)

    @torch.inference_mode()
    def _through_cache(self, context: Tensor) -> Tensor:
        """Log-probabilities [n, vocabulary] of the next token: two chunks of prefill, then some steps of decoding."""
        block_table, logprobs, third = BlockTable(), list[Tensor](), len(context) // 3
        try:
            for tokens in (context[:third], context[third:-DECODED], *context[third:][-DECODED:].split(1)):
                if len(tokens):
                    self._kv_cache.own.reserve(block_table, len(tokens))
                    _, hidden = self._compute([Row(block_table, tokens.tolist())])
                    logprobs.append(self._forward.logits(hidden[: len(tokens)]).log_softmax(-1))
        finally:
            self._kv_cache.own.cut(block_table, 0)
        return torch.cat(logprobs)

    def _compute(self, rows: Sequence[Row]) -> tuple[BatchPlan | KernelPlan, Tensor]:
        """One forward pass over new tokens: its plan, and their final hidden states."""
        plan = self._planner.plan(rows)
        attention = plan if isinstance(plan, KernelPlan) else partial(attend, self._kv_cache, plan)
        return plan, self._forward(plan.ids, plan.positions, attention)

    def _leave_fused(self, apart: float, expected: Reference) -> None:
        self._forward.fused = None
        self.notes.append(
            f"engine: log-probabilities of fused decoding {_differ(apart, expected)}: from here on the model decodes "
            "through its own modules, more slowly"
        )

    @contextmanager
    def _open(self, key: Key) -> Generator[Answer]:
        conversation = OpenConversation(key)
        self._scheduler.open(conversation)
        try:
            yield partial(self._ask, conversation)
        finally:
            self._scheduler.close(conversation)
            self._changed.set()

    async def _ask(
        self, conversation: OpenConversation, tokens: Sequence[int], sampling: Sampling, stream: int
    ) -> Completion:
        if self._closed:
            raise EngineError("the engine is closed")
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(conversation, list(tokens), sampling, stream, reply)
        self._scheduler.ask(request)
        if self._loop_task is None or self._loop_task.done():
            self._changed = asyncio.Event()  # of the event loop that runs now
            self._loop_task = asyncio.create_task(self._run())
        self._changed.set()
        try:
            return await reply
        finally:
            if request in self._scheduler.requests:  # nobody waits for it any more
                self._scheduler.drop(request)
                self._changed.set()

    async def answer(self, key: Key, tokens: Sequence[int], sampling: Sampling, stream: int) -> Completion:
        """One turn, of a conversation of its own; stream: the key of its random numbers."""
        with self._open(key) as answer:
            return await answer(tokens, sampling, stream)

    def interrupt(self) -> None:
        """Answer all requests with what they have."""
        for request in self._scheduler.requests:
            self._scheduler.drop(request)
            if not request.reply.done():
                request.reply.set_result(request.output)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Of the next token after each of `tokens`, as it decodes: [n, vocabulary]."""
        return self._forward.logprobs(torch.tensor(tokens, device=self._model.device))

    async def attend(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        """See `Forward.attention_scores`, by the weights as they are."""
        self._notice_weights()
        return self._forward.attention_scores(tokens, spans)

    async def load_weights(self, source: WeightSource) -> None:
        """The weights of `source` have changed: copy them, unless they are shared, and take them over.

        Raises EngineError for another model than the one that is shared, or where a copy differs from it afterwards.
        """
        if not self.shares_weights:
            self._copy_weights(source)
        elif source.model is self._model:
            self._source = source
        else:
            raise EngineError(
                f"engine=local samples from the model it was started with, and was given another {source.model_name}: "
                "train that model, or start another engine"
            )
        self.version = source.version
        self._take_over_weights()

    @torch.no_grad()
    def _copy_weights(self, source: WeightSource) -> None:
        began, own = time.perf_counter(), self._model.state_dict()
        for name, weight in source.tensors(None):
            own[name].copy_(weight)
        context = self._checked_context()
        expected = source.logprobs(context.tolist())
        logprobs = plain_logprobs(self._model, context).to(expected.logprobs.device)
        if not (apart := distance(expected.logprobs, logprobs)) <= expected.bound:
            raise EngineError(f"engine=local: log-probabilities of the copied weights {_differ(apart, expected)}")
        self.sync_s += time.perf_counter() - began

    async def sleep(self) -> None:
        self._going.clear()
        self._scheduler.reset_cache()
        self._kv_cache.release()
        if self._forward.fused:
            self._forward.fused.release()
        self._changes = -1  # which are taken over before the next step

    async def wake(self) -> None:
        if not self._going.is_set():
            self._kv_cache.allocate()
            self._going.set()

    async def close(self) -> None:
        self._closed = True
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        self._fail_requests(EngineError("the engine is closed"))
        self._kv_cache.release()

    async def _run(self) -> None:
        """Step while there is work. An error in a step reaches every conversation that waits for the engine."""
        try:
            while self._scheduler.requests:
                await self._settle()
                if self._going.is_set():
                    with explained("sampling"):
                        self._step()
                else:
                    await self._going.wait()
        except ConfigError as error:  # no memory is left: the run ends
            self._fail_requests(error)
        except Exception as error:
            broken = EngineError(f"decoding failed: {type(error).__name__}: {error}")
            broken.__cause__ = error
            self._fail_requests(broken)

    def _fail_requests(self, error: ConfigError | EngineError) -> None:
        """Answer all with `error`; what a step may have left in the KV cache is not known."""
        self._scheduler.reset_cache()
        for request in self._scheduler.requests:
            self._scheduler.drop(request)
            if not request.reply.done():
                request.reply.set_exception(error)

    async def _settle(self) -> None:
        """Let conversations that were answered speak again.

        In deterministic mode the next step waits until every open conversation has requested its next turn, so that
        the batch does not depend on the speed of tools.
        """
        await asyncio.sleep(0)
        while self._deterministic:
            if self._changed.is_set():  # a conversation that ended may have let another in
                self._changed.clear()
                await asyncio.sleep(0)
            elif self._scheduler.silent:
                began = time.perf_counter()
                await self._changed.wait()
                self.waited_s += time.perf_counter() - began
            else:
                return

    def _notice_weights(self) -> None:
        """Weights that several updates of one rollout batch change are sampled from at once, before they are loaded."""
        if self._source.changes != self._changes:
            self._take_over_weights()

    @torch.inference_mode()
    def _take_over_weights(self) -> None:
        """Drop what was computed from other weights than the present ones; check the new ones on a recent context."""
        began = time.perf_counter()
        if self._keep_stale:
            self._scheduler.invalidate_prefix_cache()
        else:
            self._scheduler.reset_cache()
        if self._forward.fused:
            self._forward.fused.copy_weights()
            self._check_fused()
        self._changes = self._source.changes
        self.sync_s += time.perf_counter() - began

    def _checked_context(self) -> Tensor:
        recent = self._recent[:CHECK_TOKENS] or ordinary_tokens(self._model.config, CHECK_TOKENS).tolist()
        return torch.tensor(recent, device=self._model.device)

    def _check_fused(self) -> None:
        """Whether the fused path still computes what the model does, on the beginning of a requested context."""
        context = self._checked_context()
        logprobs = self._forward.logprobs(context)
        if not distance(plain_logprobs(self._model, context), logprobs) <= self._bound:
            expected = reference(self._model, context)
            self._bound = expected.bound
            if not (apart := distance(expected.logprobs, logprobs)) <= expected.bound:
                self._leave_fused(apart, expected)

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute the pending tokens; sample one for each request that has no more of them."""
        self._notice_weights()
        rows = self._scheduler.next()
        if not rows:
            return
        plan, hidden = self._compute([row for row, _ in rows])
        ready = [(i, request) for i, (_, request) in enumerate(rows) if request]
        if ready:
            self._sample([request for _, request in ready], hidden[plan.last[[i for i, _ in ready]]])

    def _sample(self, requests: Sequence[Request], hidden: Tensor) -> None:
        """Sample one token for each request and answer those that are finished."""
        keys = np.array([request.stream for request in requests], dtype=np.uint64)
        counters = np.array([len(request.output.tokens) for request in requests], dtype=np.uint64)
        logits = self._forward.logits(hidden)
        settings = [request.sampling for request in requests]
        sampled = sample(logits, settings, uniforms(keys, counters), self._planner.library)
        for request, token, logprob, kept in zip(requests, sampled.tokens, sampled.logprobs, sampled.kept, strict=True):
            output = request.output
            request.tokens.append(token)
            output.tokens.append(token)
            output.logprobs.append(logprob)
            output.versions.append(self.version)
            if kept is not None:
                output.kept.append(kept)
            stopped = token in request.sampling.stop_ids
            if stopped or len(output.tokens) >= request.sampling.max_new_tokens:
                self._scheduler.drop(request)
                if not request.reply.done():  # else it was given up, and is about to say so
                    request.reply.set_result(replace(output, finish=Finish.STOP if stopped else Finish.LENGTH))


def _differ(apart: float, expected: Reference) -> str:
    return (
        f"differ from the model's own forward pass by {apart:.2g} nats, of which rounding explains {expected.bound:.2g}"
    )
