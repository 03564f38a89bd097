"""The door between controller and trainer: what passes through it can pass through a pipe, and no digit changes."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from mtgrpo import preset
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.engine import LocalEngine, start_engine
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import ModelSettings
from mtgrpo.policy.step import Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerConfig, TrainerRank
from mtgrpo.record.curve import Curve
from mtgrpo.stages import run
from mtgrpo.stages.trainer import train
from mtgrpo.weights.source import ModelWeights
from test_resume import digits, rows

SMALL = ["log=[jsonl]", "sft.steps=2", "trainer.steps=2", "eval.tasks=2", "rollout.prompts_per_step=2"]
SMALL += ["rollout.group_size=3", "trainer.minibatch_trajectories=3", "kl.coef=0.1", "watchdog_s=0"]
FACTS = ("version", "changes", "model_name", "config", "traits", "cuts_trees", "dtype", "lora", "size")


def serve(connection: Connection, config: TrainerConfig) -> None:
    """The child: one call after the other, each answered by what it gives and what the trainer has to say."""
    rank, snapshot = TrainerRank(config), None
    while True:
        owner, name, arguments = pickle.loads(connection.recv_bytes())
        if name == "close":
            return
        if name == "snapshot":
            snapshot = rank.snapshot()
        if owner == "weights":
            source = rank.weights()
            result = getattr(source, name)
            result = result(*arguments) if callable(result) else result
            result = list(result) if name == "tensors" else result
        elif owner == "snapshot":
            result = getattr(snapshot, name)
            result = result(*arguments) if callable(result) else result
        elif name == "changes":
            result = rank.changes
        else:
            result = getattr(rank, name)(*arguments)
            result = at_once(result) if name in ("updating", "imitating") else result
        notes, rank.notes[:] = list(rank.notes), []
        connection.send_bytes(pickle.dumps((None if name == "snapshot" else result, notes)))


class Called:
    """Whose methods are calls of something in the child."""

    def __init__(self, call: Callable[..., Any], owner: str, facts: Sequence[str]) -> None:
        self._call, self._owner = call, owner
        vars(self).update({name: call(owner, name) for name in facts})

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call(self._owner, name, *arguments)


class Piped:
    """A trainer in a child process."""

    def __init__(self, config: TrainerConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.notes: list[str] = []
        self.train_s = 0.0
        self._turn = threading.Lock()  # a snapshot is written by a thread of its own
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=serve, args=(theirs, config), daemon=True)
        self._child.start()

    def _call(self, owner: str, name: str, *arguments: Any) -> Any:
        with self._turn:
            self._pipe.send_bytes(pickle.dumps((owner, name, arguments)))
            result, notes = pickle.loads(self._pipe.recv_bytes())
        self.notes += notes
        return result

    def connect(self, moved: Callable[[], None], gives_way: bool) -> None:
        assert not gives_way, "no engine here shares the weights"

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call("rank", name, *arguments)

    @property
    def changes(self) -> int:
        return self._call("rank", "changes")

    async def update(self, *arguments: Any) -> Metrics:
        return await asyncio.to_thread(self._call, "rank", "updating", *arguments)

    async def imitate(self, *arguments: Any) -> Metrics:
        return await asyncio.to_thread(self._call, "rank", "imitating", *arguments)

    def weights(self) -> Any:
        return Called(self._call, "weights", FACTS)

    def snapshot(self) -> Any:
        self._call("rank", "snapshot")
        return Called(self._call, "snapshot", ["bytes"])

    def close(self) -> None:
        self._pipe.send_bytes(pickle.dumps(("rank", "close", ())))
        self._child.join(60)
        assert self._child.exitcode == 0


class CopyingEngine(LocalEngine):
    """Samples from a copy of the weights, as a server does."""

    shares_weights = False

    async def load_weights(self, source: Any) -> None:
        own = self._model.state_dict()
        with torch.no_grad():
            for name, weight in source.tensors(torch.float32):
                own[name].copy_(weight)
        await super().load_weights(ModelWeights(self._model, source.version))


@dataclass
class Copying(Local):
    def start(self, source: Any, deterministic: bool, longest_context: int, folder: Path | None = None) -> LocalEngine:
        model = load_model(ModelSettings("tiny"), 7)
        engine = start_engine(Local(memory_fraction=0.1), ModelWeights(model), deterministic, longest_context)
        engine.__class__ = CopyingEngine
        return engine


def learned(folder: Path, engine: Local, *words: str) -> list[dict[str, Any]]:
    experiment = replace(preset("calculator_from_scratch", *SMALL, *words), engine=engine)
    asyncio.run(train(experiment, folder, Curve()))
    return [digits(row) for row in rows(folder)]


@pytest.mark.timeout(600)
def test_a_trainer_in_a_child_process_changes_no_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turns = learned(tmp_path / "in_turns", Local())
    in_a_thread = learned(tmp_path / "thread", Copying())
    monkeypatch.setattr(run, "PolicyTrainer", Piped)
    piped = learned(tmp_path / "piped", Copying())
    assert len(piped) > 4 and in_turns == in_a_thread == piped
    saved = [sorted((tmp_path / name / "checkpoints").glob("*/model.safetensors")) for name in ("thread", "piped")]
    assert saved[0] and [p.read_bytes() for p in saved[0]] == [p.read_bytes() for p in saved[1]]


def test_the_local_engine_refuses_a_model_that_is_elsewhere() -> None:
    class Elsewhere:
        model_name = "LlamaForCausalLM"

    with pytest.raises(ConfigError, match="LlamaForCausalLM, which is in another process: choose engine=server"):
        Local().start(Elsewhere(), True, 64)  # type: ignore[arg-type]


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
