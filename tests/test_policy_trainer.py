"""The door between controller and trainer, where the engine has a copy of the weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from busy_threads import busy_threads
from mtgrpo import preset
from mtgrpo.engines.local import Local
from mtgrpo.errors import EngineError
from mtgrpo.model.load import load_model
from mtgrpo.model.rounding import plain_logprobs
from mtgrpo.model.settings import LoRA, ModelSettings
from mtgrpo.policy.trainer import Stage, TrainerConfig, TrainerRank
from mtgrpo.record.curve import Curve
from mtgrpo.stages import run
from mtgrpo.stages.policy_trainer import PolicyTrainer, trainer_config
from mtgrpo.stages.trainer import train
from mtgrpo.weights.source import ModelWeights
from test_resume import digits, rows

SMALL = ["log=[jsonl]", "sft.steps=2", "trainer.steps=2", "eval.tasks=2", "rollout.prompts_per_step=2"]
SMALL += ["rollout.group_size=3", "trainer.minibatch_trajectories=3", "kl.coef=0.1", "watchdog_s=0"]


class Elsewhere(ModelWeights):
    """Weights that an engine must copy."""

    settings = ModelSettings("tiny")

    def here(self) -> ModelWeights:
        return ModelWeights(load_model(self.settings, seed=99))


class Apart(PolicyTrainer):
    """A trainer whose model is not the engine's."""

    def __init__(self, config: TrainerConfig, *others: Any) -> None:
        super().__init__(config, *others)
        self.weights = lambda: Elsewhere(self.rank.model, self.rank.weights().version)


def learned(folder: Path) -> list[dict[str, Any]]:
    asyncio.run(train(preset("calculator_from_scratch", *SMALL), folder, Curve()))
    return [digits(row) for row in rows(folder)]


@pytest.mark.timeout(600)
def test_a_copy_that_is_sampled_from_changes_no_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turns = learned(tmp_path / "in_turns")
    monkeypatch.setattr(run, "PolicyTrainer", Apart)

    async def beside_others() -> None:
        async with busy_threads(timeout_s=120):
            await train(preset("calculator_from_scratch", *SMALL), tmp_path / "thread", Curve())

    asyncio.run(beside_others())
    in_a_thread = [digits(row) for row in rows(tmp_path / "thread")]
    assert len(in_turns) > 4 and in_turns == in_a_thread


def test_the_thread_computes_on_the_device_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one begins with the first GPU, where kernels would be launched that are told no device."""
    chosen: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: chosen.update({threading.get_ident(): number}))
    monkeypatch.setattr("mtgrpo.stages.policy_trainer.device_of_process", lambda: torch.device("cuda", 3))
    trainer = PolicyTrainer(trainer_config(preset("calculator_from_scratch"), [1], None, tmp_path))
    assert chosen.get(asyncio.run(trainer.in_thread(threading.get_ident))) == 3
    trainer.close()


def test_a_copy_that_differs_is_not_sampled_from() -> None:
    class Altered(Elsewhere):
        def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in super().tensors(dtype):
                yield name, weight * 1.01

    source = Altered(load_model(ModelSettings("tiny"), seed=1), version=3)
    engine = Local(memory_fraction=0.1).start(source, True, 64)
    assert not engine.shares_weights
    with pytest.raises(EngineError, match="of the copied weights differ from the model's own forward pass"):
        asyncio.run(engine.load_weights(source))


def test_of_a_model_with_adapters_they_alone_are_copied(tmp_path: Path) -> None:
    load_model(ModelSettings("tiny"), seed=1).save_pretrained(tmp_path)

    class Adapted(Elsewhere):
        settings = ModelSettings(str(tmp_path), lora=LoRA(rank=2), value_head=True)

        def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in super().tensors(dtype):
                assert "lora" in name or "value_head" in name
                yield name, weight

    source = Adapted(load_model(Adapted.settings, seed=5), version=3)
    for weight in filter(lambda weight: weight.requires_grad, source.model.parameters()):
        torch.nn.init.constant_(weight, 0.02)
    engine = Local(memory_fraction=0.1).start(source, True, 64)
    asyncio.run(engine.load_weights(source))
    context = torch.arange(9)
    copied = plain_logprobs(engine._model, context)  # pyright: ignore[reportPrivateUsage]
    assert engine.version == 3 and torch.equal(copied, plain_logprobs(source.model, context))


def test_changes_are_counted_over_all_stages(tmp_path: Path) -> None:
    experiment = preset("calculator_from_scratch", *SMALL)
    rank = TrainerRank(run.trainer_config(experiment, [1], None, tmp_path))
    source, changes = rank.weights(), list[int]()

    for stage in Stage:
        before = rank.changes
        rank.begin(stage)
        assert rank.changes > before and rank.policy is not None
        for weight in rank.model.parameters():
            weight.grad = torch.ones_like(weight)
        rank.policy.optimizer.step()
        changes.append(source.changes)
    assert changes == [1, 2]
