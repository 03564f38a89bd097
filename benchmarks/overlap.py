"""Do slow tools hold up other conversations? Sampling of several turns with tools that take log-normal times.

tool_overlap   seconds of everything / the larger of two that cannot be beaten: the same tokens with tools that take
               no time, and the longest conversation by itself, its tools included
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence

import record  # before torch
from rollout import LONGEST_CONTEXT, Conversation, workloads
from slow_tool import delay_s
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.model import tiny
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights


async def play(engine: LocalEngine, number: int, conversation: Conversation, delays_s: Sequence[float]) -> None:
    """One conversation; after turn n its tool takes `delays_s[n]`."""
    context = list(conversation.prompt)
    async with engine.conversation(Key(0, "benchmark", str(conversation.task), number)) as sample:
        for (count, reply), delay in zip(conversation.turns, delays_s, strict=True):
            context += (await sample(context, Sampling(max_new_tokens=count))).tokens
            await asyncio.sleep(delay)
            context += reply


def measure(
    engine: LocalEngine,
    model: PreTrainedModel,
    conversations: Sequence[Conversation],
    delays_s: Sequence[Sequence[float]],
) -> float:
    """Seconds until all are over, from an empty KV cache."""

    async def run() -> float:
        await engine.load_weights(ModelWeights(model, engine.version + 1))
        began = time.perf_counter()
        await asyncio.gather(
            *(play(engine, i, c, d) for i, (c, d) in enumerate(zip(conversations, delays_s, strict=True)))
        )
        return time.perf_counter() - began

    return asyncio.run(run())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer conversations, one repeat; no file")
    given = parser.parse_args()
    shape = tiny.SHAPES["tiny-2m"]
    model = record.load("tiny-2m")
    engine = Local().start(ModelWeights(model), deterministic=False, longest_context=LONGEST_CONTEXT)
    conversations = workloads(shape.vocabulary, given.quick)["multi_turn"]
    rng = random.Random(0)
    slow = [[*(delay_s(rng) for _ in c.turns[1:]), 0.0] for c in conversations]
    quick = [[0.0 for _ in c.turns] for c in conversations]
    longest = max(range(len(conversations)), key=lambda i: sum(slow[i]))
    seconds: dict[str, list[float]] = {"everything": [], "decoding": [], "longest": []}
    measure(engine, model, conversations, quick)
    for _ in range(1 if given.quick else given.repeats):
        seconds["everything"].append(measure(engine, model, conversations, slow))
        seconds["decoding"].append(measure(engine, model, conversations, quick))
        seconds["longest"].append(
            measure(engine, model, conversations[longest : longest + 1], slow[longest : longest + 1])
        )
    median = {name: statistics.median(values) for name, values in seconds.items()}
    one_by_one = sum(map(sum, slow)) + median["decoding"]
    lockstep = sum(max((d[turn] for d in slow if turn < len(d)), default=0.0) for turn in range(3)) + median["decoding"]
    for name, value in median.items():
        print(f"{name:12}{value:8.2f} s")
    print(f"in lockstep, a turn at a time, at least {lockstep:.2f} s; tools one after the other {one_by_one:.2f} s")
    ratios: dict[str, float | None] = {
        "rollout.tool_overlap": round(median["everything"] / max(median["decoding"], median["longest"]), 3)
    }
    print(json.dumps(ratios))
    detail = {"seconds": seconds, "lockstep_s": lockstep, "one_by_one_s": one_by_one}
    record.finish("overlap", ratios, detail, None if given.quick else "overlap.json")


if __name__ == "__main__":
    main()
