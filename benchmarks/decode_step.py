"""What one decoding step of the local engine asks of the host: kernels, and processor time. No GPU is needed.

    kernels             operations that a step of 28 layers launches on a GPU, with and without adapters, prefix or not
    decode.queue_ms     processor time of a step with 250 requests waiting, minus that with none (the best of several)

The model has the layers of Qwen3 in toy widths, so that time is the host's; attention takes the way of a GPU. The
requests that wait have prompts of 32,768 tokens, for which neither blocks nor a prefix are free.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import record  # before torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mtgrpo.engines import Key
from mtgrpo.engines.local import paged_attention
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.engines.local.kv_cache import KVCache
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import DType, LoRA, ModelSettings
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights

LAYERS, LONG = 28, 32_768
CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=LONG + 64, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts what is no view of a tensor; on a GPU each is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = NotImplemented
        if func is not torch.ops.aten.rms_norm.default:  # one kernel on a GPU
            with self:  # what is composed of other operations is counted as those
                found = func.decompose(*args, **(kwargs or {}))
        if found is NotImplemented:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor | tuple) and not func.is_view and "view" not in func.name():
                self.counts[func.name()] += 1
        return found


def build(folder: str, rank: int = 0) -> PreTrainedModel:
    """The toy, with adapters of `rank` if that is not 0."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return load_model(ModelSettings(folder, DType.bfloat16, lora=LoRA(rank)), 0)


def prompt(number: int, length: int) -> list[int]:
    """Different tokens for each number."""
    return random.Random(number).choices(range(CONFIG.vocab_size), k=length)


async def steps(engine: LocalEngine, prompts: list[list[int]], watched: Callable[[], Any]) -> list[Any]:
    """What `watched` finds in every step in which the first four conversations decode, while the others wait."""
    sampling, found = Sampling(max_new_tokens=40), list[Any]()
    original = engine._step

    def step() -> None:
        decoding = all(r.pending == 1 for r in engine._scheduler._running) and engine._scheduler._running
        found.append(watched()) if decoding else original()

    engine._step = step  # type: ignore[method-assign]

    async def ask(number: int, tokens: list[int]) -> None:
        async with engine.conversation(Key(0, "step", f"{number:04}", 0)) as sample:
            await sample(tokens, sampling)

    tasks = [asyncio.create_task(ask(number, tokens)) for number, tokens in enumerate(prompts)]
    await asyncio.wait(tasks[:4])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    engine._step = original  # type: ignore[method-assign]
    return found


def made(model: PreTrainedModel, tokens: int) -> LocalEngine:
    """An engine with room for `tokens` tokens."""
    return LocalEngine(ModelWeights(model), False, KVCache(model, tokens, LONG), LONG + 64)


def kernels(model: PreTrainedModel, length: int) -> Counter[str]:
    """Of a step in which four conversations of `length` tokens each decode; the median step."""
    engine = made(model, 2 * LONG)

    def counted() -> Counter[str]:
        with Kernels() as mode:
            LocalEngine._step(engine)
        return mode.counts

    found = asyncio.run(steps(engine, [prompt(number, length) for number in range(4)], counted))
    return sorted(found, key=lambda counts: counts.total())[len(found) // 2]


def milliseconds(model: PreTrainedModel, waiting: int) -> float:
    """Processor time of a decoding step: the least of all, so that what else runs here counts little."""
    engine = made(model, LONG + 64)  # the four that decode take room that one of the others would need

    def timed() -> float:
        began = time.process_time()
        LocalEngine._step(engine)
        return 1e3 * (time.process_time() - began)

    prompts = [prompt(number, 40) for number in range(4)] + [prompt(number, LONG) for number in range(waiting)]
    return sorted(asyncio.run(steps(engine, prompts, timed)))[10]


def main() -> None:
    """Count, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="25 requests wait, and nothing is written")
    quick = parser.parse_args().quick
    paged_attention.FEW = 10**9
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rank, length in (("all weights", 0, 20), ("adapters", 16, 20), ("a prefix of 40 tokens", 0, 40)):
            counts[name] = dict(kernels(build(folder, rank), length).most_common())
        model = build(folder)
        alone, queued = (min(milliseconds(model, count) for _ in range(3)) for count in (0, 25 if quick else 250))
    ratios: dict[str, float | None] = {
        "decode.kernels_per_layer": round(sum(counts["all weights"].values()) / LAYERS, 1),
        "decode.kernels_per_layer_lora": round(sum(counts["adapters"].values()) / LAYERS, 1),
        "decode.step_ms": round(alone, 2),
        "decode.queue_ms": round(queued - alone, 2),
    }
    record.finish("decode_step", ratios, {"kernels": counts, "waiting": 250}, None if quick else "decode_step.json")


if __name__ == "__main__":
    main()
