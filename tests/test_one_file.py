"""GRPO in one file is what `algorithm=grpo` is: the same model, loss and gradient, and it learns."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms.correction import Correction, OldPolicy
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL
from mtgrpo.batch.forest import build_batch
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.tiny import WEIGHTS, load_tokenizer
from mtgrpo.policy.step import at_once
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn
from test_policy import Watched, paid

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TASK = Task("test/0", (Message("user", "?"),))


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("grpo_in_one_file")


@pytest.fixture(scope="module")
def played(example: ModuleType) -> list[Any]:
    """Two groups of eight, of which some call the tool; paid at random, so that every one has an advantage."""
    torch.manual_seed(0)
    rng, model = random.Random(0), example.Model()
    problems = [example.make_problem(rng) for _ in range(2)]
    found = example.play(model, load_tokenizer(), [problem for problem in problems for _ in range(8)])
    for conversation in found:
        conversation.reward = rng.random()
        shifted = zip(conversation.logprob, conversation.sampled, strict=True)
        moved = [logprob + rng.gauss(0, 0.2) * sampled for logprob, sampled in shifted]  # off-policy
        conversation.logprob = torch.tensor(moved).tolist()  # what float32 can say
    return found


def trajectory_of(conversation: Any) -> Trajectory:
    """Its turns: each run of sampled tokens with what was new before it."""
    trajectory, at = Trajectory(TASK), 0
    flags = "".join("s" if sampled else "." for sampled in conversation.sampled)
    for number, part in enumerate(re.finditer(r"\.+(s+)", flags)):
        begin, end = part.span(1)
        output = conversation.tokens[begin:end]
        turn = Turn(
            conversation.tokens[at:begin],
            output,
            conversation.logprob[begin:end],
            [0] * len(output),
            Finish.STOP,
            Message("assistant"),
            number - 1,
        )
        trajectory.turns.append(turn)
        at = end
    return trajectory


def test_the_model_is_the_one_that_transformers_loads(example: ModuleType) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    tokens = torch.randint(3, 2000, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = example.Model()(tokens, torch.ones_like(tokens).bool())
        assert (ours - theirs(tokens).logits).abs().max() < 1e-4
        real = torch.ones(2, 40, dtype=torch.bool)
        real[:, :7] = False  # padding on the left changes nothing
        padded = example.Model()(tokens, real)[:, 7:]
        assert (padded - theirs(tokens[:, 7:]).logits).abs().max() < 1e-4


def test_loss_and_gradient_are_those_of_the_trainer(example: ModuleType, played: list[Any]) -> None:
    rewards = torch.tensor([conversation.reward for conversation in played], dtype=torch.float64)
    advantage = example.advantages(rewards.view(2, 8)).flatten()
    own = example.Model().double()
    count = sum(sum(conversation.sampled) for conversation in played)
    loss = example.grpo_loss(own, played, advantage) / count
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in own.named_parameters()}

    policy = Watched(load_model(ModelSettings("tiny-calculator", DType.float64), 0))
    policy._temperature = 1.0  # pyright: ignore[reportPrivateUsage]
    algorithm = GRPO(divide_by_std=False, clip_low=example.CLIP_LOW, clip_high=example.CLIP_HIGH)
    correction = Correction(old_policy=OldPolicy.engine)
    learning = UpdateConfig(algorithm, WholeTrajectory(), KL(), correction=correction, length=7, stale=True)
    trajectories = [trajectory_of(conversation) for conversation in played]
    assert max(len(trajectory.turns) for trajectory in trajectories) > 1, "none called the tool"
    batch = build_batch(trajectories)
    paid_for = paid(trajectories, rewards, batch)
    paid_for.group[8:] = 1
    metrics = at_once(PolicyUpdater(policy, learning).training(batch, paid_for, version=0, seed=0))

    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert metrics["clip_fraction"] > 0.1
    [theirs] = policy.descent.gradients
    assert len(theirs) == len(gradient)
    for name, expected in theirs.items():
        found = gradient[re.sub(r"^model\.|self_attn\.|mlp\.", "", name)]
        assert (found - expected).abs().max() < 1e-12, name


def test_nothing_but_what_the_policy_wrote_is_trained(example: ModuleType, played: list[Any]) -> None:
    tokenizer = load_tokenizer()
    for conversation in played:
        text = tokenizer.decode(
            [t for t, sampled in zip(conversation.tokens, conversation.sampled, strict=True) if sampled]
        )
        assert "<tool_response>" not in text and text.count("<|im_end|>") <= text.count("<tool_call>") + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(seed=5)
    before, after = (
        [float(number) for number in re.findall(r"0?\.\d+|1\.00", line)]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("before", "after"))
    )
    assert max(before) <= 0.4 and min(after) >= 0.75
