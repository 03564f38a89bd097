"""What only a GPU can show, beside tests marked `gpu` elsewhere. Training and sampling in 16 bits run on a CPU too."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.compose import preset
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.memory import Phase, estimate
from mtgrpo.model.load import device_of_process, load_model
from mtgrpo.model.settings import DType, LoRA, ModelSettings, Quantization
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.settings import Kind, OptimizerSettings
from mtgrpo.policy.step import Metrics, Policy, at_once
from mtgrpo.types import Finish, Message, Sampling, Task, Trajectory, Turn
from mtgrpo.weights.source import ModelWeights
from test_policy import PLAYED

pytestmark = pytest.mark.gpu


def descend(entries: Tensor, scores: object) -> PerToken:
    logp: Tensor = scores.logp  # type: ignore[attr-defined]
    return PerToken(-logp, torch.zeros(len(entries), dtype=torch.bool, device=logp.device))


def updated(settings: ModelSettings, chosen: OptimizerSettings, steps: int = 2) -> tuple[Policy, list[Metrics]]:
    """A policy after some steps on one batch, all of which must have an effect."""
    model = load_model(settings, 0)
    policy = Policy(model, Optimizer(model, chosen, 0), 200, 1.0)
    batch = build_batch(PLAYED)
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    return policy, [at_once(policy.updating(batch, torch.arange(len(batch)), weights, descend)) for _ in range(steps)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16])
def test_training_in_16_bits(dtype: DType, offload: bool) -> None:
    _, exact = updated(ModelSettings("tiny", DType.float32), OptimizerSettings(lr=1e-3))
    policy, found = updated(ModelSettings("tiny", dtype), OptimizerSettings(lr=1e-3, offload=offload))
    for one, other in zip(found, exact, strict=True):
        assert one["skipped"] == 0
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-2)
    assert found[1]["loss"] < found[0]["loss"]
    assert (policy.optimizer.scale > 1) == (dtype is DType.float16)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.float16])
def test_the_engine_samples_what_the_model_says(dtype: DType) -> None:
    """Also after it slept, and with top-p; its start compares the whole pass with the model's own."""
    model = load_model(ModelSettings("tiny", dtype), 0)
    engine = Local(0.001).start(ModelWeights(model), False, 256)
    prompt = list(range(100, 170))

    async def ask(number: int, top_p: float) -> list[float]:
        async with engine.conversation(Key(0, "gpu", "task", number)) as sample:
            found = await sample(prompt, Sampling(max_new_tokens=20, top_p=top_p))
        ids = torch.tensor([[*prompt, *found.tokens]], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        if top_p < 1:
            return []
        own = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        return (own.cpu() - torch.tensor(found.logprobs)).abs().tolist()

    async def play() -> list[float]:
        first = await asyncio.gather(*(ask(number, 1.0) for number in range(4)), ask(4, 0.9))
        await engine.sleep()
        await engine.wake()
        second = await ask(5, 1.0)
        await engine.close()
        return [apart for found in (*first, second) for apart in found]

    apart = asyncio.run(play())
    assert len(apart) == 100 and max(apart) < (1e-4 if dtype is DType.float32 else 0.05)


def test_four_bit_weights_and_eight_bit_moments(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    load_model(ModelSettings("tiny-2m"), 0).cpu().save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path), lora=LoRA(8), quantization=Quantization.nf4)
    policy, found = updated(settings, OptimizerSettings(kind=Kind.adamw_8bit, lr=1e-3), steps=5)
    assert found[-1]["loss"] < found[0]["loss"]
    half = load_model(ModelSettings(str(tmp_path), lora=LoRA(8)), 0)
    sizes = [sum(weight.nbytes for weight in model.base_model.layers.parameters()) for model in (policy.model, half)]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("twice", [False, True])
def test_the_plan_is_what_training_takes(twice: bool) -> None:
    words = ("model.name=tiny-30m", "sft.steps=0", "batch.token_budget=8192", "environment.max_context_length=512")
    run = preset("calculator_from_scratch", *words, f"model.checkpointing={str(twice).lower()}")
    found = estimate(run, torch.cuda.get_device_properties(device_of_process()).total_memory, "cuda")
    planned = max(found.needed(Phase.training), found.needed(Phase.update)) - found.rows[0].bytes
    model = load_model(run.model, 0)
    policy = Policy(model, Optimizer(model, run.optimizer, 2), run.batch.tokens, 1.0)
    rng = random.Random(0)
    played = [made([rng.randrange(2048) for _ in range(512)]) for _ in range(32)]
    batch = build_batch(played)
    weights = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        at_once(policy.updating(batch, torch.arange(len(batch)), weights, descend))
    assert torch.cuda.max_memory_allocated() == pytest.approx(planned, rel=0.15)


def made(tokens: list[int]) -> Trajectory:
    """One turn of these, after the first of them."""
    count = len(tokens) - 1
    turn = Turn(tokens[:1], tokens[1:], [-1.0] * count, [0] * count, Finish.STOP, Message("assistant"))
    return Trajectory(Task("one", (Message("user", "?"),)), turns=[turn])
