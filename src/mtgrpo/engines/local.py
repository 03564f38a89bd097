"""Sampling in this process, with the very weights that are trained: nothing is copied, nothing is synchronised.

All conversations decode together, one token a step. Keys and values stay between turns, so a new turn computes only its
new tokens; siblings with the same prompt share one prefill. The decode loop runs inside the event loop, between the
coroutines of the conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.engines import Engine, Key
from mtgrpo.engines.cache import SlotCache
from mtgrpo.engines.sampling import sample, stream_key, uniforms
from mtgrpo.extension import ConfigError
from mtgrpo.model.attention import other_layers
from mtgrpo.model.logprobs import head_logits
from mtgrpo.types import Completion, EngineError, Finish, Sample, Sampling

PREFILL_SHARE = 0.25  # prefill once this share of the live conversations waits for it: batched, yet seldom stalling


@dataclass
class Local(Engine):
    """Decode in this process (CPU or one GPU)."""

    def start(self, model: PreTrainedModel, deterministic: bool) -> LocalEngine:
        """An engine over `model`'s own weights. Raises ConfigError for models that keep more than keys and values."""
        if others := other_layers(model):
            raise ConfigError(
                f"engine=local cannot sample from {type(model).__name__}: it has layers that are not softmax attention "
                f"({others})"
            )
        return LocalEngine(model, deterministic)


@dataclass(eq=False)
class _Conversation:
    key: Key
    slot: int = -1  # where its keys and values lie; -1 = nowhere yet
    cached: list[int] = field(default_factory=list[int])  # the tokens whose keys and values lie in the slot
    version: int = 0  # the policy version that computed them
    turns: int = 0


@dataclass(eq=False)
class _Request:
    conversation: _Conversation
    tokens: Sequence[int]
    sampling: Sampling
    stream: int  # key of its random numbers
    reply: asyncio.Future[Completion]
    output: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class LocalEngine:
    """A running engine. `version` is set by whoever updates the weights; older caches are then recomputed."""

    def __init__(self, model: PreTrainedModel, deterministic: bool) -> None:
        self.version = 0
        self._model = model
        self._deterministic = deterministic
        self._cache = SlotCache()
        self._open: list[_Conversation] = []  # within a step, index = slot
        self._waiting: list[_Request] = []
        self._decoding: list[_Request] = []
        self._unanswered: list[_Request] = []  # these two, and those within the present step
        self._changed = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def conversation(self, key: Key) -> AsyncGenerator[Sample]:
        """Open a conversation; its keys and values are dropped when the context ends."""
        conversation = _Conversation(key)
        self._open.append(conversation)

        async def sample_turn(tokens: Sequence[int], sampling: Sampling) -> Completion:
            return await self._submit(conversation, tokens, sampling)

        try:
            yield sample_turn
        finally:
            self._close(conversation)

    def _close(self, conversation: _Conversation) -> None:
        """Forget the conversation; its slot is given away at the next step."""
        self._open.remove(conversation)
        self._waiting = [r for r in self._waiting if r.conversation is not conversation]
        self._decoding = [r for r in self._decoding if r.conversation is not conversation]
        self._unanswered = [r for r in self._unanswered if r.conversation is not conversation]
        self._changed.set()

    async def _submit(self, conversation: _Conversation, tokens: Sequence[int], sampling: Sampling) -> Completion:
        key = conversation.key
        stream = stream_key(key.seed, key.scope, key.task, key.sibling, conversation.turns)
        conversation.turns += 1
        request = _Request(conversation, tokens, sampling, stream, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._unanswered.append(request)
        self._changed.set()
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())
        return await request.reply

    async def _run(self) -> None:
        """Step while there is work. An error in a step reaches every conversation that waits for the engine."""
        try:
            while self._waiting or self._decoding:
                await self._settle()
                self._step()
        except Exception as error:
            for request in self._unanswered:
                request.conversation.cached = []  # what the step has left of it is not known
                if not request.reply.done():
                    broken = EngineError(f"decoding failed: {type(error).__name__}: {error}")
                    broken.__cause__ = error
                    request.reply.set_exception(broken)
            self._waiting, self._decoding, self._unanswered = [], [], []

    async def _settle(self) -> None:
        """Let conversations that were answered speak again.

        In deterministic mode the next step waits until every open conversation has asked for its next turn, so that
        the batch does not depend on the speed of tools.
        """
        await asyncio.sleep(0)
        while self._deterministic:
            if self._changed.is_set():  # whoever ended may have let another in, which is on its way
                self._changed.clear()
                await asyncio.sleep(0)
            elif len(self._waiting) + len(self._decoding) < len(self._open):
                await self._changed.wait()
            else:
                return

    @torch.no_grad()
    def _step(self) -> None:
        self._assign_slots()
        if self._waiting and len(self._waiting) >= PREFILL_SHARE * len(self._decoding):
            self._prefill()
        if self._decoding:
            self._decode()

    def _assign_slots(self) -> None:
        """Give the open conversations the slots 0, 1, ...: new ones fill the gaps, then the last ones move into them.

        The result depends on who has come and gone since the last step, not on the order in which they did.
        """
        count = len(self._open)
        used = {conversation.slot for conversation in self._open}
        gaps = [slot for slot in range(count) if slot not in used]
        placeless = [conversation for conversation in self._open if not 0 <= conversation.slot < count]
        for gap, conversation in zip(gaps, sorted(placeless, key=lambda c: (c.slot, c.key)), strict=True):
            if conversation.cached:
                self._cache.copy(conversation.slot, gap, len(conversation.cached))
            conversation.slot = gap
        self._open.sort(key=lambda conversation: conversation.slot)

    def _prefill(self) -> None:
        """Compute keys and values of all new tokens of the waiting requests, and sample each one's first token."""
        requests = sorted(self._waiting, key=lambda request: request.conversation.key)
        self._waiting = []
        leaders: dict[tuple[int, ...], _Request] = {}
        leader_of: list[_Request] = []
        for request in requests:
            fresh = not request.conversation.cached
            leader_of.append(leaders.setdefault(tuple(request.tokens), request) if fresh else request)
        computed = [r for r, leader in zip(requests, leader_of, strict=True) if r is leader]
        hidden = dict(zip(map(id, computed), self._prefill_rows(computed), strict=True))
        for request, leader in zip(requests, leader_of, strict=True):
            if request is not leader:
                conversation = request.conversation
                conversation.cached = list(request.tokens)
                conversation.version = self.version
                self._cache.copy(leader.conversation.slot, conversation.slot, len(conversation.cached))
        self._sample(requests, torch.stack([hidden[id(leader)] for leader in leader_of]))

    def _prefill_rows(self, requests: list[_Request]) -> Tensor:
        """The final hidden state of each request's last token [requests, hidden]; right-padded rows."""
        new: list[Sequence[int]] = []
        starts: list[int] = []
        for request in requests:
            conversation = request.conversation
            reused = self._reusable(conversation, request.tokens)
            new.append(request.tokens[reused:])
            starts.append(reused)
            conversation.cached = list(request.tokens)
            conversation.version = self.version
        width = max(map(len, new))
        ids = torch.zeros(len(new), width, dtype=torch.long)
        for row, tokens in enumerate(new):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        slots = torch.tensor([r.conversation.slot for r in requests])
        hidden = self._forward(ids, positions, slots)
        return hidden[torch.arange(len(new)), torch.tensor([len(tokens) - 1 for tokens in new])]

    def _reusable(self, conversation: _Conversation, tokens: Sequence[int]) -> int:
        """How many leading tokens need no computation; at least the last one always does."""
        if conversation.version != self.version:
            return 0
        cached = conversation.cached
        limit = min(len(cached), len(tokens) - 1)
        if cached[:limit] == list(tokens[:limit]):
            return limit
        return next(i for i in range(limit) if cached[i] != tokens[i])

    def _decode(self) -> None:
        """Feed every conversation its last token. Idle slots compute a token that is never kept."""
        ids = torch.zeros(len(self._open), 1, dtype=torch.long)
        for request in self._decoding:
            ids[request.conversation.slot, 0] = request.output[-1]
        positions = torch.tensor([[len(c.cached)] for c in self._open])
        hidden = self._forward(ids, positions, None)
        for request in self._decoding:
            request.conversation.cached.append(request.output[-1])
        requests, self._decoding = self._decoding, []
        self._sample(requests, hidden[[r.conversation.slot for r in requests], 0])

    def _forward(self, ids: Tensor, positions: Tensor, slots: Tensor | None) -> Tensor:
        """Final hidden states [rows, width, hidden]; writes keys and values. `slots` None = slots 0..rows-1."""
        device = self._model.device
        ids, positions = ids.to(device), positions.to(device)
        mask = self._cache.at(positions, slots)
        output = self._model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True
        )
        return output.last_hidden_state

    def _sample(self, requests: list[_Request], hidden: Tensor) -> None:
        """Sample one token for each request; finished ones are answered, the rest go on decoding."""
        keys = np.array([r.stream for r in requests], dtype=np.uint64)
        counters = np.array([len(r.output) for r in requests], dtype=np.uint64)
        logits = head_logits(self._model, hidden)
        tokens, logprobs = sample(logits, [r.sampling for r in requests], uniforms(keys, counters))
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.output.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if token in request.sampling.stop_ids:
                self._finish(request, Finish.STOP)
            elif len(request.output) >= request.sampling.max_new_tokens:
                self._finish(request, Finish.LENGTH)
            else:
                self._decoding.append(request)

    def _finish(self, request: _Request, finish: Finish) -> None:
        self._unanswered.remove(request)
        if not request.reply.done():  # a cancelled conversation has nobody waiting
            request.reply.set_result(Completion(request.output, request.logprobs, request.versions, finish))
