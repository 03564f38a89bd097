"""What the way to vLLM over HTTP costs, and whether servers sample while the trainer computes (`make vllm-cpu`).

    http        engine=server with one server: each turn is a request over HTTP
    in_process  the same vLLM, with the same settings and variables, asked the same in Python (rollout_vllm.py)

The multi-turn conversations of rollout.py, 64 of them, in float32; both begin with an empty prefix cache, and one
sleeps while the other plays. Then as many conversations are sampled without end, alone and while a thread trains.

    server.http_overhead.SIZE      seconds of http / seconds of in_process - 1, the median of pairs
    server.while_training.SIZE     tokens/s sampled while the trainer computes / tokens/s sampled alone
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from rollout import (
    LONGEST_CONTEXT,
    VLLM,
    Conversation,
    Ours,
    Outputs,
    Vllm,
    build_rival,
    check,
    deviation,
    useful,
    workloads,
)
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.server import Server
from mtgrpo.model import tiny
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights

ARGUMENTS = ["--max-num-seqs", "64", "--disable-log-stats"]
COPIES = 2  # of the 32 conversations
WATCHED_S = 20.0


class Served(Ours):
    """engine=server; its server is stopped while others play."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self._model, self._repetition = model, 0
        settings = Server(python=str(VLLM / "bin" / "python"), arguments=ARGUMENTS)
        self._engine = settings.start(
            ModelWeights(model), deterministic=True, longest_context=LONGEST_CONTEXT, folder=folder
        )
        self._runner = asyncio.Runner()
        self._runner.run(self._engine.load_weights(ModelWeights(model, 0)))
        (self._replica,) = self._engine._replicas
        guard = self._replica.process.program.pid
        self._group = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
        self._signal(signal.SIGSTOP)

    def play(self, conversations: Sequence[Conversation]) -> tuple[float, Outputs]:
        """After the prefix cache was dropped."""
        self._signal(signal.SIGCONT)
        found = super().play(conversations)
        self._signal(signal.SIGSTOP)
        return found

    def while_training(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        """Tokens/s alone and while a thread trains, and the thread's steps/s alone and beside."""
        self._signal(signal.SIGCONT)
        found = self._runner.run(self._beside(conversations))
        self._signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        """Stop the server, end the event loop."""
        self._signal(signal.SIGCONT)
        self._runner.run(self._engine.close())
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._group, number)

    async def _play_all(self, conversations: Sequence[Conversation]) -> Outputs:
        await self._replica.ask("POST", "/reset_prefix_cache")
        return await asyncio.gather(*(self._play(i, c) for i, c in enumerate(conversations)))

    async def _beside(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        tokens = 0

        async def endlessly(number: int, conversation: Conversation) -> None:
            nonlocal tokens
            async with self._engine.conversation(Key(0, "beside", str(number), 0)) as sample:
                while True:
                    completion = await sample(conversation.prompt, Sampling(max_new_tokens=8))
                    tokens += len(completion.tokens)

        async def rate(seconds: float) -> float:
            before, began = tokens, time.perf_counter()
            await asyncio.sleep(seconds)
            return (tokens - before) / (time.perf_counter() - began)

        training_alone = await asyncio.to_thread(self._train, WATCHED_S)
        work = [asyncio.create_task(endlessly(i, c)) for i, c in enumerate(conversations)]
        await asyncio.sleep(2)
        alone = await rate(WATCHED_S)
        trained = asyncio.create_task(asyncio.to_thread(self._train, WATCHED_S))
        beside = await rate(WATCHED_S)
        steps = await trained
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return {
            "tokens_per_s_alone": round(alone, 1),
            "tokens_per_s_while_training": round(beside, 1),
            "training_steps_per_s_alone": round(training_alone, 3),
            "training_steps_per_s_while_sampling": round(steps, 3),
        }

    def _train(self, seconds: float) -> float:
        """Forward and backward of 4 x 256 tokens, again and again: an update's work. Steps/s."""
        ids = torch.randint(10, self._model.config.vocab_size, (4, 256))
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            self._model(input_ids=ids).logits.log_softmax(-1)[..., 0].sum().backward()
            self._model.zero_grad()
            steps += 1
        return steps / (time.perf_counter() - began)


def measure(size: str, repeats: int, quick: bool) -> tuple[dict[str, Any], dict[str, float | None]]:
    """Both measurements with a model of this size."""
    shape = tiny.SHAPES[f"tiny-{size}"]
    model, rival = tiny.build_model(shape, 0).eval(), build_rival(shape)
    conversations = workloads(shape.vocabulary, quick)["multi_turn"] * COPIES
    conversations = [Conversation(nth, c.prompt, c.turns) for nth, c in enumerate(conversations)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rival.save_pretrained(folder)
        direct = Vllm(folder, threads=len(os.sched_getaffinity(0)), tuned=False, as_served=True)
        stack.callback(direct.close)
        served = Served(model, folder)
        stack.callback(served.close)
        sides = {"http": served.play, "in_process": direct.play}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats + 1):
            for name, play in sides.items():
                took, played = play(conversations)
                check(conversations, played)
                if repeat:
                    seconds[name].append(took)
                else:  # warms it up
                    assert deviation(rival, conversations, played) < 1e-2, f"{name} does not sample from the model"
        pairs = zip(seconds["http"], seconds["in_process"], strict=True)
        overhead = statistics.median(http / direct - 1 for http, direct in pairs)
        beside = served.while_training(conversations)
    share = beside["tokens_per_s_while_training"] / beside["tokens_per_s_alone"]
    ratios = {f"server.http_overhead.{size}": round(overhead, 3), f"server.while_training.{size}": round(share, 3)}
    detail = {"tokens": useful(conversations), "seconds": seconds, "beside": beside, "vllm_versions": direct.versions}
    print(f"{size}: {ratios}\n{detail}", flush=True)
    return detail, ratios


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, one repeat; no file")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    sizes, repeats = (["2m"], 1) if given.quick else (["2m", "30m"], given.repeats)
    detail: dict[str, Any] = {}
    ratios: dict[str, float | None] = {}
    for size in sizes:
        detail[size], found = measure(size, repeats, given.quick)
        ratios |= found
    record.finish("server", ratios, detail, None if given.quick else "server.json")


if __name__ == "__main__":
    main()
