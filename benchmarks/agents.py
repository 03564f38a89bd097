"""What the turns of a foreign agent cost in training: the forest against a row of its own for each turn.

An agent of 20 turns, 4 siblings: a prompt of 400 tokens, in each turn 60 sampled and 60 answered, recorded by sessions
of the endpoint. Where it `drifts` it rewrites each answer as a whole, as agents do that strip thoughts or put calls
into words, so that every request is rendered again. Both sides compute the same loss and gradient (checked) from the
same turns with the same weights, forward and backward.
    agents.vs_stepwise = processor time of a step on rows of single turns, packed without padding / on the forest
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import record  # before torch
import torch
from forest import Sides, agree

from mtgrpo.chat import Chat, ChatSettings, open_chat
from mtgrpo.endpoint import Entry, TurnRequest
from mtgrpo.endpoint.session import AgentSession
from mtgrpo.model import tiny
from mtgrpo.types import Completion, Finish, Limits, Message, Sample, Sampling, Task, Trajectory

SIDES = ("forest", "per_turn_packed")
TOKEN_BUDGET = 4096
WORDS = ("Tom", "buys", "sells", "pens", "cards", "finds", "more", "times", "number", "grows")


@dataclass(frozen=True)
class Foreign:
    """The conversations of an agent."""

    turns: int
    drifts: bool
    siblings: int
    prompt: int = 400
    sampled: int = 60
    observed: int = 60
    padded_rows: int = 0

    def play(self, vocabulary: int) -> list[Trajectory]:
        """The same whenever it is called."""
        rng, chat = random.Random(11), open_chat(tiny.load_tokenizer(), ChatSettings())
        prompt = said(chat, rng, self.prompt)
        return [asyncio.run(self._converse(chat, prompt, rng)) for _ in range(self.siblings)]

    async def _converse(self, chat: Chat, prompt: str, rng: random.Random) -> Trajectory:
        async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
            output = chat.encode(Message("assistant", said(chat, rng, self.sampled)))
            return Completion(output, [-1.0] * len(output), [0] * len(output), Finish.STOP)

        @asynccontextmanager
        async def chain(number: int) -> AsyncGenerator[Sample]:
            yield sample

        session = AgentSession(Task("agent", ()), chat, Sampling(), Limits(10**6), chain)
        messages = [Entry(Message("user", prompt))]
        for number in range(self.turns):
            reply = await session.answer(TurnRequest(tuple(messages), (), str(number)), number)
            session.settle(number, delivered=True)
            text = said(chat, rng, self.sampled) if self.drifts else reply.message.content
            messages += [
                Entry(Message("assistant", text)),
                Entry(Message("user", said(chat, rng, self.observed))),
            ]
        await session.close()
        trajectory = session.finish(lambda trajectory: [True] * len(trajectory.turns))
        trajectory.reward = rng.gauss(0, 1)
        return trajectory


def said(chat: Chat, rng: random.Random, tokens: int) -> str:
    """A text of about so many tokens."""
    text = ""
    while len(chat.encode(Message("assistant", text))) < tokens:
        text += f" {rng.choice(WORDS)} {rng.randrange(1000)}"
    return text


def measure(turns: int, siblings: int, drifts: bool, repeats: int) -> dict[str, float]:
    """One agent, both sides."""
    sides = Sides("2m", Foreign(turns, drifts, siblings), TOKEN_BUDGET)  # pyright: ignore[reportArgumentType]
    agree(sides, SIDES)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            step = sides.step(side)
            began = time.process_time()
            step()
            times[side].append(time.process_time() - began)
            sides.model.zero_grad(set_to_none=True)
    forest, rows = (statistics.median(times[side]) for side in SIDES)
    ours, theirs = (sides.work(side) for side in SIDES)
    found = {"forest_s": forest, "stepwise_s": rows, "ratio": rows / forest, "ideal": theirs.flops / ours.flops}
    return {name: round(value, 3) for name, value in found.items()} | {
        "forest_tokens": ours.tokens,
        "stepwise_tokens": theirs.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an agent of 5 turns, one repeat; writes no file")
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    turns, repeats = (5, 1) if arguments.quick else (20, arguments.repeats)
    siblings = arguments.siblings
    detail = {name: measure(turns, siblings, name == "drift", repeats) for name in ("exact", "drift")}
    ratios: dict[str, float | None] = {
        "agents.vs_stepwise": detail["exact"]["ratio"],
        "agents.vs_stepwise_drift": detail["drift"]["ratio"],
    }
    settings = {"threads": torch.get_num_threads(), "turns": turns, "siblings": siblings, "repeats": repeats}
    record.finish("agents", ratios, {**detail, **settings}, None if arguments.quick else "agents.json")


if __name__ == "__main__":
    main()
