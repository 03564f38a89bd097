"""What one GPU does, the first time there is one: at most nine minutes on an H100 or H200.

    python benchmarks/gpu/first.py [--size 1.7b|toy]

Says first what is missing here. Then, with the shapes of Qwen3-1.7B and random weights:

    rollout     128 conversations of recipe gsm8k's size: tokens/s against bandwidth and transformers' generate
    step        one optimiser step on them, layers computed once and twice: MFU on distinct tokens, peak against plan
    head        the second of these with the head's factors in fp32 and in bf16, in place of what model.head=auto means
    rows        the same step on rows, by flash attention where it is installed: time against the ideal by operations;
                and so for prompts of 8k, for agents whose history grows, and for condensed contexts
    compiled    how many graphs torch.compile made in all

Peak bandwidth and peak operations are measured here, by a copy and a matrix product. `--size toy` runs anywhere; of the
other size, without a GPU, every figure is null. Layers that are computed once get half the token budget.
Nothing is downloaded. What fails is null, with the reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forest import Scenario
from record import absent, finish

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.batch.packing import Layout, pack
from mtgrpo.config.compose import preset
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.memory import Phase, estimate
from mtgrpo.model.attention import choose_attention
from mtgrpo.model.checkpointing import checkpoint_layers
from mtgrpo.model.liger import use_liger
from mtgrpo.model.load import AUTOCAST, compute_in, resolved, round_head
from mtgrpo.model.logprobs import head_of
from mtgrpo.model.scorer import Scores, flops_of
from mtgrpo.model.settings import AttentionKind, DType, Head, ModelSettings
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import OptimizerSettings
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.types import Message, Sampling, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights

Found = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A model, and what it samples and trains."""

    config: Qwen3Config
    tasks: int
    siblings: int
    prompt: int
    output: int
    token_budget: int
    shapes: dict[str, Scenario]  # beside what is sampled


SIZES = {
    "1.7b": Size(
        Qwen3Config(
            vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
        ),
        tasks=16, siblings=8, prompt=300, output=256, token_budget=16_384,
        shapes={
            "prompt_8k": Scenario(1, 8, 8192, (256, 256)),
            "agent": Scenario(4, 4, 500, (75, 75), 10, observed=175),
            "condensed": Scenario(1, 8, 500, (75, 75), 10, observed=175, summary=100),
        },
    ),
    "toy": Size(
        Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
        ),
        tasks=2, siblings=3, prompt=20, output=6, token_budget=64, shapes={"agent": Scenario(1, 2, 8, (4, 4), 2, 5)},
    ),
}  # fmt: skip
FIGURES = [
    "gpu.mfu", "gpu.mfu_checkpointed", "gpu.decode_of_bandwidth", "gpu.decode_vs_generate", "gpu.plan_error",
    "gpu.compilations", "gpu.forest_eta", "gpu.forest_eta_prompt_8k", "gpu.forest_eta_agent",
    "gpu.forest_eta_condensed",
]  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def missing() -> list[str]:
    """What the comparison would like to have, and this machine has not."""
    found = [] if DEVICE.type == "cuda" else ["a GPU: everything runs on the CPU, which shows only that it runs"]
    if DEVICE.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        found.append("bfloat16 on this GPU: the model computes in float16")
    if find_spec("flash_attn") is None:
        found.append("the package flash-attn: rows are computed by torch's own attention")
    if find_spec("liger_kernel") is None:
        found.append("the package liger-kernel: norms, rotary positions and SwiGLU are torch's own")
    return found


def seconds(work: Callable[[], Any]) -> float:
    """What `work` takes, once it has run before."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def wait() -> None:
    """Until the GPU is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def peaks() -> Found:
    """Bytes and bfloat16 operations a second, measured."""
    many, wide = (2**28, 8192) if DEVICE.type == "cuda" else (2**20, 256)
    source, target = torch.randn(2, many, device=DEVICE)
    matrix = torch.randn(wide, wide, device=DEVICE, dtype=torch.bfloat16)
    target.copy_(source), matrix @ matrix
    moved = seconds(lambda: [target.copy_(source) for _ in range(10)])
    computed = seconds(lambda: [matrix @ matrix for _ in range(10)])
    return {"bytes_per_s": 10 * 2 * source.nbytes / moved, "flops_per_s": 10 * 2 * wide**3 / computed}


def build(size: Size, layout: Layout = Layout.forest, head: Head = Head.auto) -> PreTrainedModel:
    """Random weights, prepared as a run does; computes in 16 bits on a GPU."""
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(size.config, dtype=torch.float32).eval()
    round_head(head_of(model), ModelSettings(head=head), DEVICE.type)
    compute_in(model, resolved(DType.auto, DEVICE.type))
    flash = DEVICE.type == "cuda" and find_spec("flash_attn") is not None
    rows = AttentionKind.flash_attention_2 if flash else AttentionKind.sdpa
    choose_attention(model, AttentionKind.forest if layout is Layout.forest else rows)
    for line in use_liger(model):
        print(line, flush=True)
    return model


def rollout(size: Size, peak: Found) -> tuple[list[Trajectory], Found]:
    """Conversations of one turn each, sampled by the local engine, and how fast."""
    model = build(size)
    rng, count = random.Random(0), size.tasks * size.siblings
    prompts = [[rng.randrange(size.config.vocab_size) for _ in range(size.prompt)] for _ in range(size.tasks)]
    engine = Local(0.2 if DEVICE.type == "cuda" else 0.001).start(ModelWeights(model), False, size.prompt + size.output)
    sampling = Sampling(max_new_tokens=size.output)

    async def one(number: int, scope: str) -> Trajectory:
        prompt = prompts[number // size.siblings]
        async with engine.conversation(Key(0, scope, str(number // size.siblings), number)) as sample:
            found = await sample(prompt, sampling)
        message = Message("assistant")
        turn = Turn(prompt, found.tokens, found.logprobs, found.versions, found.finish, message)
        return Trajectory(Task(str(number), (Message("user", "?"),)), turns=[turn])

    async def everything(scope: str) -> list[Trajectory]:
        return list(await asyncio.gather(*(one(number, scope) for number in range(count))))

    asyncio.run(everything("warm-up"))
    played: list[Trajectory] = []
    took = seconds(lambda: played.extend(asyncio.run(everything("measured"))))
    step = took / size.output
    layers, key_heads = size.config.num_hidden_layers, size.config.num_key_value_heads
    cached = count * (size.prompt + size.output / 2) * layers * key_heads * size.config.head_dim * 2 * 2
    least = (2 * sum(weight.numel() for weight in model.base_model.parameters()) + cached) / peak["bytes_per_s"]
    asyncio.run(engine.close())
    ids = torch.tensor([prompts[number // size.siblings] for number in range(count)], device=DEVICE)
    return played, {
        "tokens_per_s": count * size.output / took,
        "step_ms": 1e3 * step,
        "of_bandwidth": least / step,
        "generate_tokens_per_s": count * size.output / generate_seconds(size, ids),
    }


def generate_seconds(size: Size, ids: torch.Tensor) -> float:
    """What transformers takes to sample as much after `ids` [conversations, tokens]; in 16 bits on a GPU."""
    with DEVICE:
        dtype = AUTOCAST.get(resolved(DType.auto, DEVICE.type), torch.float32)
        model = AutoModelForCausalLM.from_config(size.config, dtype=dtype).eval()

    def generate(tokens: int) -> None:
        how = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0)
        with torch.inference_mode():
            model.generate(input_ids=ids, generation_config=how)

    generate(2)
    return seconds(lambda: generate(size.output))


def loss(entries: torch.Tensor, scores: Scores) -> PerToken:
    """A descent whose gradient is that of a first GRPO update."""
    return PerToken(-scores.logp, torch.zeros(len(entries), dtype=torch.bool, device=scores.logp.device))


def step(size: Size, batch: Batch, peak: Found, layout: Layout, twice: bool, head: Head = Head.auto) -> Found:
    """The second of two optimiser steps on the batch; memory is the peak of both."""
    model, budget = build(size, layout, head), budget_of(size, twice)
    if twice:
        checkpoint_layers(model)
    policy = Policy(model, Optimizer(model, OptimizerSettings(), 0), budget, 1.0)
    entries = torch.arange(len(batch))
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    at_once(policy.updating(batch, entries, weights, loss))
    took = seconds(lambda: at_once(policy.updating(batch, entries, weights, loss)))
    distinct = pack(batch, entries, 10**9, flops_of(model))[0].micro_batches
    needed = 3 * sum(micro.cost for micro in distinct)
    packed = pack(batch, entries, budget, flops_of(model), layout)[0].micro_batches
    found = {
        "seconds": took,
        "mfu": needed / took / peak["flops_per_s"],
        "operations": 3 * sum(micro.cost for micro in packed),
        "notes": policy.notes,
    }
    if DEVICE.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def budget_of(size: Size, twice: bool) -> int:
    """Tokens of a micro-batch for which 80 GB have room."""
    return size.token_budget if twice else size.token_budget // 2


def planned(size: Size, twice: bool) -> float:
    """The most that training and update hold by the plan, without libraries and engine, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        size.config.save_pretrained(folder)
        words = [f"model.name={folder}", f"batch.token_budget={budget_of(size, twice)}", "sft.steps=0"]
        words += [f"model.checkpointing={str(twice).lower()}", f"environment.max_context_length={size.prompt + 1}"]
        found = estimate(preset("calculator_from_scratch", *words), 80 * 10**9, "cuda")
    most = max(found.needed(Phase.training), found.needed(Phase.update)) - found.rows[0].bytes
    return most / 1e9


def tried(work: Callable[[], Found]) -> Found:
    """What `work` found, or why it did not; what it held is freed."""
    found: Found
    try:
        found = work()
    except Exception as error:  # whatever it is, the other parts are still worth the machine
        found = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    print(found, flush=True)
    return found


def ratio(above: Found, below: Found, name: str) -> float | None:
    """Of two numbers, where both were found."""
    return above[name] / below[name] if name in above and name in below else None


def eta(rows: Found, forest: Found) -> float | None:
    """How much of what the forest saves in operations it saves in time."""
    gained, ideal = ratio(rows, forest, "seconds"), ratio(rows, forest, "operations")
    return gained / ideal if gained and ideal else None


def main() -> None:
    """Everything in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.7b")
    size = SIZES[parser.parse_args().size]
    for what in missing():
        print(f"missing: {what}", flush=True)
    if DEVICE.type == "cpu" and size is SIZES["1.7b"]:
        absent("gpu_first", FIGURES)
        return
    peak = peaks()
    played: list[Trajectory] = []

    def sample() -> Found:
        found, how_fast = rollout(size, peak)
        played.extend(found)
        return how_fast

    detail: Found = {"missing": missing(), "peak": peak, "rollout": tried(sample)}
    played = played or Scenario(size.tasks, size.siblings, size.prompt, (size.output, size.output)).play(
        size.config.vocab_size
    )
    batch = build_batch(played)
    for name, layout, twice in (
        ("once", Layout.forest, False),
        ("twice", Layout.forest, True),
        ("rows", Layout.padded, True),
    ):
        detail[name] = tried(lambda layout=layout, twice=twice: step(size, batch, peak, layout, twice))
        if layout is Layout.forest:
            detail[name] |= tried(lambda twice=twice: {"planned_gb": planned(size, twice)})
    for head in (Head.fp32, Head.bf16):
        name = f"head_{head.value}"
        detail[name] = tried(lambda head=head: step(size, batch, peak, Layout.forest, True, head))
    ratios: dict[str, float | None] = dict.fromkeys(FIGURES)
    for name, shape in size.shapes.items():
        more = build_batch(shape.play(size.config.vocab_size))
        rows, forest = (
            tried(lambda layout=layout, more=more: step(size, more, peak, layout, True))
            for layout in (Layout.padded, Layout.forest)
        )
        detail[name] = {"rows": rows, "forest": forest}
        ratios[f"gpu.forest_eta_{name}"] = eta(rows, forest)
    once, twice_, sampled = (detail[name] for name in ("once", "twice", "rollout"))
    peaks_known = twice_.keys() >= {"planned_gb", "peak_gb"}
    ratios |= {
        "gpu.mfu": once.get("mfu"),
        "gpu.mfu_checkpointed": twice_.get("mfu"),
        "gpu.decode_of_bandwidth": sampled.get("of_bandwidth"),
        "gpu.decode_vs_generate": (
            sampled["tokens_per_s"] / sampled["generate_tokens_per_s"] if "tokens_per_s" in sampled else None
        ),
        "gpu.forest_eta": eta(detail["rows"], twice_),
        "gpu.plan_error": twice_["planned_gb"] / twice_["peak_gb"] - 1 if peaks_known else None,
        "gpu.compilations": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
    }
    finish("gpu_first", ratios, detail, "gpu_first.json" if DEVICE.type == "cuda" else None)


if __name__ == "__main__":
    main()
