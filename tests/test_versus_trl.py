"""The rival of benchmarks/versus_trl.py does the same work as we do: one loss, the same tasks, steps in turns."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mtgrpo.algorithms import Tokens
from mtgrpo.batch.forest import build_batch
from mtgrpo.config.compose import compose, parse
from mtgrpo.model import tiny
from mtgrpo.model.load import load_model
from mtgrpo.model.smollm2 import fetch
from mtgrpo.parts.extension import load_file
from mtgrpo.policy.optimizer import Optimizer
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.stages.checks import open_tasks
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

pytestmark = pytest.mark.real

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TASK = Task("t", (Message("user", "?"),), "1")


@pytest.fixture
def trl_side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load_file(BENCHMARKS / "trl_side.py")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """An untrained model with its tokenizer."""
    folder = tmp_path / "weights"
    tiny.build_model(tiny.SHAPES["tiny"], 0).save_pretrained(folder)
    tiny.load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def smollm2() -> str:
    """A real model."""
    return str(fetch())


def conversation(prompt: list[int], turns: int, rng: random.Random) -> Trajectory:
    trajectory = Trajectory(TASK)
    for turn in range(turns):
        context = [rng.randrange(100, 2000) for _ in range(rng.randint(3, 9))] if turn else prompt
        output = [rng.randrange(100, 2000) for _ in range(rng.randint(2, 12))]
        said = Message("assistant", "")
        trajectory.turns.append(
            Turn(context, output, [0.0] * len(output), [0] * len(output), Finish.STOP, said, turn - 1)
        )
    return trajectory


def sample_as_an_older_policy(trajectories: list[Trajectory], policy: Policy, rng: random.Random) -> None:
    """Log-probabilities near the policy's own: ratios around 1."""
    batch = build_batch(trajectories)
    own = iter(at_once(policy.scoring(batch, torch.arange(len(batch)))).logp.tolist())
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        turn.logprobs = [next(own) + rng.uniform(-0.6, 0.6) for _ in turn.output]


def as_trl_sees_it(trajectories: list[Trajectory], advantage: torch.Tensor, pad: int) -> dict[str, Any]:
    """The batch as rows: prompts padded on the left, the rest of each conversation on the right."""
    prompts = [t.turns[0].new_context for t in trajectories]
    completions, masks, old = [], [], []
    for trajectory in trajectories:
        ids, mask, logps = list[int](), list[int](), list[float]()
        for number, turn in enumerate(trajectory.turns):
            reply = turn.new_context if number else []
            ids += reply + turn.output
            mask += [0] * len(reply) + [1] * len(turn.output)
            logps += [0.0] * len(reply) + turn.logprobs
        completions.append(ids)
        masks.append(mask)
        old.append(logps)

    def padded(rows: list[Any], value: float, left: bool = False) -> torch.Tensor:
        width = max(map(len, rows))
        return torch.tensor([[value] * (width - len(r)) + r if left else r + [value] * (width - len(r)) for r in rows])

    return {
        "prompt_ids": padded(prompts, pad, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], 0, left=True),
        "completion_ids": padded(completions, pad),
        "completion_mask": padded([[1] * len(c) for c in completions], 0),
        "tool_mask": padded(masks, 0),
        "old_per_token_logps": padded(old, 0.0),
        "advantages": advantage,
        "num_items_in_batch": torch.tensor(sum(map(sum, masks))),
    }


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("model_name", "environment", "rank"),
    [("weights", "tool_use", 0), ("weights", "tool_use", 4), ("smollm2", "single_turn", 0)],
)
def test_one_batch_has_one_loss(
    model_name: str, environment: str, rank: int, request: pytest.FixtureRequest, trl_side: ModuleType, tmp_path: Path
) -> None:
    words = ["recipe=calculator_from_scratch", f"model.name={request.getfixturevalue(model_name)}"]
    words += ["rollout.prompts_per_step=2", "rollout.group_size=4"]
    words += ["sft.steps=0", "trainer.steps=2", "optimizer.warmup_steps=0", f"environment={environment}"]
    words += [f"model.lora.rank={rank}"]
    experiment = compose(parse(words)).experiment
    settings = trl_side.Settings(words, 128, checkpointing=False)
    trainer = trl_side.build(experiment, settings, str(tmp_path / "trl"), trl_side.Gate())
    rng = random.Random(0)
    trajectories: list[Trajectory] = []
    for _ in range(2):
        prompt = [rng.randrange(100, 2000) for _ in range(rng.randint(20, 30))]
        trajectories += [conversation(prompt, rng.randint(1, 3), rng) for _ in range(4)]
    advantage = torch.tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    own_model = load_model(experiment.model, 0)
    policy = Policy(own_model, Optimizer(own_model, experiment.optimizer, 2), 2048, 1.0)
    sample_as_an_older_policy(trajectories, policy, rng)

    model = trainer.model
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer.compute_loss(model, as_trl_sees_it(trajectories, advantage, 0))
    theirs.backward()
    their_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()

    batch = build_batch(trajectories)
    share = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)
    found = at_once(
        policy.updating(
            batch,
            torch.arange(len(batch)),
            share,
            lambda entries, scores: experiment.algorithm.loss(
                Tokens(scores.logp, batch.behaviour_logp[entries].float(), advantage[batch.trajectory[entries]])
            ),
        )
    )
    assert 0.2 < found["clip_fraction"] < 0.8
    assert found["loss"] == pytest.approx(theirs.item(), abs=1e-5)
    assert found["grad_norm"] == pytest.approx(their_norm.item(), rel=1e-4)


def test_the_tasks_come_in_the_same_order(trl_side: ModuleType) -> None:
    experiment = compose(parse(["trainer.steps=2", "rollout.prompts_per_step=3", "seed=5"])).experiment
    rows = trl_side.prompts(experiment)
    tasks, _ = open_tasks(experiment)
    assert rows["answer"] == [next(tasks).answer for _ in range(6)]


def test_both_trainers_take_steps_in_turns(trl_side: ModuleType, weights: Path, tmp_path: Path) -> None:
    versus = load_file(BENCHMARKS / "versus_trl.py")
    words = ["recipe=calculator_from_scratch", f"model.name={weights}", "sft.steps=0"]
    words += ["rollout.prompts_per_step=1", "rollout.group_size=4"]
    words += ["trainer.steps=2", "sampling.max_new_tokens=8"]
    sides = {"ours": versus.ours(words, tmp_path, 1), "trl": versus.trl(words, tmp_path, 1, completion=8)}
    for _ in range(2):
        for side in sides.values():
            step = side.step()
            assert step["seconds"] >= step["time/rollout_s"] + step["time/train_s"] > 0
            assert 4 <= versus.sampled_tokens(step) <= 32
            assert step["peak_bytes"] >= side.loaded["resident_bytes"]
    for side in sides.values():
        side.close()
