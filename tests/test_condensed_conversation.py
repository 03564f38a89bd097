"""Ten thousand random conversations with every condenser: no context above its budget, no sampled token touched."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mtgrpo.chat import Chat, ChatSettings, open_chat
from mtgrpo.condensers import Condenser, When
from mtgrpo.condensers.attention import Attention
from mtgrpo.condensers.drop_oldest import DropOldest
from mtgrpo.condensers.keep_last import KeepLast
from mtgrpo.condensers.recall import Recall
from mtgrpo.condensers.summarize import Summarize
from mtgrpo.condensers.truncate_tools import TruncateTools
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.rollout.conversation import CONDENSE, run_rollout
from mtgrpo.types import CallRecord, Completion, Finish, Limits, Message, Sampling, Task, ToolCall, ToolSpec, Trajectory

END, ASKS = 1, 2
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}


class Letters(Chat):
    """One token per character, one before and one after each message."""

    stop_ids = (END,)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [token for message in messages for token in self._all(message)] + [ROLES["assistant"]]

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], ended: int | None = None
    ) -> list[int] | None:
        return self.open(new, tools) if len(history) % 5 else None  # now and then it cannot be proven

    def parse(self, output: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        text = "".join(chr(token) for token in output if token not in (END, ASKS))
        calls = (ToolCall(CONDENSE.name, {}),) if ASKS in output and CONDENSE in tools else ()
        return Message("assistant", text, tool_calls=calls)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def encode(self, message: Message) -> list[int]:
        return [*([ASKS] if message.tool_calls else []), *map(ord, message.content), END]

    def _all(self, message: Message) -> list[int]:
        return [ROLES[message.role], *self.encode(message)]


@dataclass
class Chatter(Environment):
    """Says something of random length after every turn."""

    rng: random.Random | None = None

    async def start(self, task: Task) -> Opening:
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        assert self.rng is not None
        role = self.rng.choice(("tool", "user"))
        return Reply((Message(role, words(self.rng, 60)),), done=self.rng.random() < 0.05, calls=(CallRecord("next"),))


def words(rng: random.Random, most: int) -> str:
    return "".join(rng.choices("abcde ", k=rng.randint(1, most)))


def condenser(rng: random.Random) -> Condenser:
    settings = {"when": rng.choice(list(When)), "max_condensed_tokens": rng.choice([0, 150, 200, 300])}
    kinds = (KeepLast, DropOldest, TruncateTools, Recall, Summarize, Attention)
    return rng.choice(kinds)(**settings)


async def conversation(rng: random.Random) -> tuple[Trajectory, list[tuple[list[int], list[int]]], int, Condenser]:
    """One conversation, what the engine was asked and said in each turn, and the budget of its contexts."""
    said: list[tuple[list[int], list[int]]] = []

    async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
        output = [*([ASKS] if rng.random() < 0.2 else []), *map(ord, words(rng, 30)), END][: sampling.max_new_tokens]
        said.append((list(tokens), output))
        finish = Finish.STOP if output[-1] == END else Finish.LENGTH
        return Completion(output, [-1.0] * len(output), [0] * len(output), finish)

    async def attend(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        assert len(tokens) <= limits.context_tokens
        assert all(0 <= start <= end <= len(tokens) for start, end in spans)
        assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
        return [rng.random() for _ in spans]

    limits = Limits(context_tokens=rng.choice([260, 400]), sampled_tokens=10_000, tool_tokens=10_000)
    sampling = Sampling(max_new_tokens=rng.choice([32, 60]))
    chosen = condenser(rng)
    task = Task("t", (Message("system", words(rng, 20)), Message("user", words(rng, 20))))
    environment = Chatter(max_turns=rng.randint(1, 20), rng=rng)
    played = await run_rollout(task, environment, Letters(), sample, sampling, limits, chosen, attend)
    most = limits.context_tokens - sampling.max_new_tokens
    return played, said, min(chosen.max_condensed_tokens or most, most), chosen


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_conversations(count: int) -> None:
    condensed: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(number)
        played, said, budget, chosen = asyncio.run(conversation(rng))
        opening = Letters().open(played.task.messages, ())[:-1]
        assert len(played.turns) == len(said)
        for index, (turn, (context, output)) in enumerate(zip(played.turns, said, strict=True)):
            assert played.context(index) == context
            assert turn.output == output  # whatever the condenser did to the messages
            assert context[: len(opening)] == opening
            if not turn.auxiliary:
                assert len(context) <= budget
        condensed[chosen.name] += played.condensed
        assert (played.condense_s > 0) >= (played.condensed > 0)
        assert played.tokens_after <= budget * played.condensed
    assert min(condensed[kind] for kind in condensed) > count // 10, condensed
    assert len(condensed) == 6


async def test_a_request_to_condense_is_answered_and_stands_in_no_condensed_context() -> None:
    chat = open_chat(load_tokenizer("tiny-calculator"), ChatSettings())
    asked, contexts = ToolCall(CONDENSE.name, {}), list[str]()
    added = [ToolCall("calculator", {"expression": f"{n} + {n}"}) for n in range(3)]
    script = [
        Message("assistant", tool_calls=(asked, added[0])),
        Message("assistant", tool_calls=(added[1],)),
        Message("assistant", tool_calls=(asked, added[2])),
        Message("assistant", "done"),
    ]

    async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
        contexts.append(chat.decode(tokens))
        output = chat.encode(script.pop(0))
        return Completion(output, [-1.0] * len(output), [0] * len(output), Finish.STOP)

    keep = KeepLast(when=When.on_request, keep_last_n_steps=2)
    task, environment = Task("t", (Message("user", "q"),)), ToolUse(tools=["calculator"])
    await run_rollout(task, environment, chat, sample, Sampling(), Limits(4000), keep)
    assert [context.count('"name": "condense", "arguments"') for context in contexts] == [0, 0, 0, 0]
    assert contexts[1].count('"name": "calculator", "arguments"') == 1 and contexts[1].count("<tool_response>") == 1
