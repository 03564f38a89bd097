"""What training needs: planned for one GPU of 80 GB by fake tensors, and the plan against what small models take.

    1.7b_full           Qwen3-1.7B, all weights, batch.token_budget=16384, contexts of up to 32,768 tokens
    8b_lora_32k         Qwen3-8B, adapters of rank 16, contexts and batch.token_budget of 32,768
    8b_nf4              the same with a base of 4 bits a weight on a GPU of 40 GB, a budget of 16,384
    8b_full_offload     Qwen3-8B, all weights, the optimiser on the host, contexts of 32,768, a budget of 16,384
    plan_error          of five small models on this CPU: the largest |planned / measured - 1|

The KV cache takes what is left while sampling, so training is the number to look at. Nothing is downloaded: the shapes
stand here. The measured side is a process of its own for each model: two micro-batches and one step of the optimiser,
resident bytes at their most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.compose import preset
from mtgrpo.config.experiment import Experiment
from mtgrpo.memory import Phase, Plan, estimate, plan
from mtgrpo.model.load import load_model
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights

CPU_BYTES = 80 * 10**9
QWEN3 = {
    "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
    "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
QWEN3_1_7B = Qwen3Config(
    **QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    **QWEN3, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    tie_word_embeddings=False,
)  # fmt: skip
CONTEXTS = "environment.max_context_length=32768"  # tokens
USUAL = "batch.token_budget=16384"
LARGE: dict[str, tuple[PreTrainedConfig, float, tuple[str, ...]]] = {  # model, GB, settings
    "memory.1.7b_full_gb": (QWEN3_1_7B, 80, (USUAL, CONTEXTS)),
    "memory.8b_lora_32k_gb": (QWEN3_8B, 80, ("batch.token_budget=32768", CONTEXTS, "model.lora.rank=16")),
    "memory.8b_nf4_gb": (QWEN3_8B, 40, (USUAL, CONTEXTS, "model.lora.rank=16", "model.quantization=nf4")),
    "memory.8b_full_offload_gb": (QWEN3_8B, 80, (USUAL, CONTEXTS, "optimizer.offload=true")),
}
SMALL = {"vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}


@dataclass(frozen=True)
class Small:
    """A model that this machine trains, and how."""

    model: str | PreTrainedConfig
    words: tuple[str, ...] = ()


SMALL_MODELS = {
    "tiny-2m": Small("tiny-2m", ("batch.token_budget=16384",)),
    "tiny-30m, checkpointed": Small("tiny-30m", ("batch.token_budget=8192", "model.checkpointing=true")),
    "llama 20M": Small(
        LlamaConfig(
            **SMALL, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, architectures=["LlamaForCausalLM"]
        ),
        ("batch.token_budget=4096",),
    ),
    "qwen2 18M, bfloat16": Small(
        Qwen2Config(
            **SMALL, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, architectures=["Qwen2ForCausalLM"]
        ),
        ("batch.token_budget=4096", "model.dtype=bfloat16"),
    ),
    "qwen3 30M, LoRA": Small(
        Qwen3Config(
            **SMALL, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, head_dim=64,
            architectures=["Qwen3ForCausalLM"],
        ),
        ("batch.token_budget=4096", "model.lora.rank=8"),
    ),
}  # fmt: skip


def experiment(model: str | PreTrainedConfig, folder: str, *words: str, weights: bool = False) -> Experiment:
    """A run without warm start that trains `model`, which is put into `folder`; with random weights, or with none."""
    name = model
    if isinstance(model, PreTrainedConfig):
        torch.manual_seed(0)
        (AutoModelForCausalLM.from_config(model) if weights else model).save_pretrained(folder)
        name = folder
    return preset("calculator_from_scratch", f"model.name={name}", "sft.steps=0", "batch.token_budget=null", *words)


def planned() -> dict[str, Plan]:
    """The plans for the GPU; raises ConfigError where a model does not fit."""
    found: dict[str, Plan] = {}
    for name, (config, size, words) in LARGE.items():
        with tempfile.TemporaryDirectory() as folder:
            run = experiment(config, folder, *words, "model.checkpointing=true")
            found[name] = plan(run, int(size * 10**9), "cuda")
        print(f"{name}\n{found[name].describe()}\n", file=sys.stderr, flush=True)
    return found


def trajectories(vocabulary: int, tokens: int) -> list[Trajectory]:
    """Conversations of one turn each that fill two micro-batches of `tokens`; nearly all is sampled."""
    rng = random.Random(0)
    task = Task("benchmark", (Message("user", "?"),))
    found: list[Trajectory] = []
    for _ in range(2 * (tokens // 512)):
        output = [rng.randrange(vocabulary) for _ in range(511)]
        prompt = [rng.randrange(vocabulary)]
        turn = Turn(prompt, output, [-1.0] * 511, [0] * 511, Finish.STOP, Message("assistant"))
        found.append(Trajectory(task, turns=[turn]))
    return found


def train(name: str) -> None:
    """The measured side, in this process: prints the bytes it held at its most, beyond what libraries hold."""
    small = SMALL_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        # Loads whatever libraries load when they compute.
        update_twice(preset("calculator_from_scratch", "batch.token_budget=512"))
        run = experiment(small.model, folder, *small.words, weights=True)
        before = record.resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        update_twice(run)
    print(json.dumps({"bytes": record.resident("VmHWM") - before}))


def update_twice(run: Experiment) -> None:
    """Two steps of the optimiser, of two micro-batches each, while an engine sleeps; the second has all in place."""
    model = load_model(run.model, 0)
    engine = run.engine.start(ModelWeights(model), True, 512)
    asyncio.run(engine.sleep())
    policy = Policy(model, Optimizer(model, run.optimizer, 2), run.batch.tokens, 1.0)
    batch = build_batch(trajectories(int(model.config.vocab_size), run.batch.tokens))
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    nothing_clipped = torch.zeros(len(batch), dtype=torch.bool)

    def loss(entries: torch.Tensor, scores: Scores) -> PerToken:
        return PerToken(-scores.logp, nothing_clipped[entries])

    for _ in range(2):
        at_once(policy.updating(batch, torch.arange(len(batch)), weights, loss))
    del engine


def compared(name: str) -> dict[str, float]:
    """Planned and measured bytes of a small model, and how far the plan is off."""
    small = SMALL_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        short = "environment.max_context_length=512"
        found = estimate(experiment(small.model, folder, *small.words, short), CPU_BYTES, "cpu")
    most = max(found.needed(Phase.training), found.needed(Phase.update)) - found.rows[0].bytes  # which are libraries
    # What is freed goes back to the system at once, so that what is resident is what is held.
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--train", name]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **given_back}
    ).stdout
    measured = json.loads(output.splitlines()[-1])["bytes"]
    row = {"planned": most, "measured": measured, "error": most / measured - 1}
    print(f"{name:24}{most / 1e6:10.0f}{measured / 1e6:10.0f} MB{row['error']:+8.1%}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Plan, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", choices=SMALL_MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", choices=SMALL_MODELS, default=list(SMALL_MODELS))
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    plans = planned()
    small = {name: compared(name) for name in arguments.models}
    ratios: dict[str, float | None] = {name: round(found.peak / 1e9, 2) for name, found in plans.items()}
    ratios["memory.plan_error"] = round(max((abs(row["error"]) for row in small.values()), default=0.0), 4)
    detail: dict[str, Any] = {
        "plans": {name: describe(found) for name, found in plans.items()},
        "small": small,
    }
    record.finish("memory", ratios, detail, "memory.json" if len(small) == len(SMALL_MODELS) else None)


def describe(found: Plan) -> dict[str, Any]:
    """A plan as data."""
    rows = {
        row.name: {"gb": round(row.bytes / 1e9, 3), "in": [phase.value for phase in row.phases]} for row in found.rows
    }
    peak = {phase.value: round(found.needed(phase) / 1e9, 2) for phase in Phase}
    settled = found.experiment
    chosen = {"token_budget": settled.batch.tokens, "checkpointing": settled.model.checkpointing}
    return {"rows": rows, "peak_gb": peak, "device_gb": found.device_bytes / 1e9, **chosen}


if __name__ == "__main__":
    main()
