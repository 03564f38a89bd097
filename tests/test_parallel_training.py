"""Ranks that share the model make the updates of one process; real processes over gloo, in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo import preset
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.sharding import is_sharded
from mtgrpo.policy import step as step_of_policy
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.layouts.ddp import DataParallel
from mtgrpo.policy.layouts.fsdp2 import FullySharded
from mtgrpo.policy.layouts.zero3 import DeepSpeedSharded
from mtgrpo.policy.step import Metrics, at_once
from mtgrpo.policy.trainer import Stage, TrainerRank
from mtgrpo.policy.witness import evidence_of
from mtgrpo.stages.policy_trainer import trainer_config
from mtgrpo.types import Finish, Group, Message, Task, Trajectory, Turn
from ranks import furthest_of_runs, on_ranks, train_by_command
from test_resume import rows

WORDS = ["model.name=tiny", "model.dtype=float64", "optimizer.lr=1e-3", "optimizer.max_grad_norm=0.5"]
UPDATES = 5


@dataclass(frozen=True)
class Case:
    """What is trained, and laid out how."""

    words: tuple[str, ...] = ()
    budget: int = 400
    trunk: int = 0  # tokens that all prompts begin with
    tasks: int = 3
    turns: int = 3


CASES = {
    "grpo": Case(),
    "common_prompt": Case(trunk=150),
    "walks": Case(budget=60),
    "walks_of_one_task": Case(budget=60, tasks=1, turns=6),
    "empty_rank": Case(tasks=1, turns=1, budget=4000),
    "lora": Case(("model.name=tiny-calculator", "model.lora.rank=4")),
    "kl": Case(("kl.coef=0.1", "reference.update_every=2")),
    "kl_apart": Case(("kl.coef=0.1", "reference.update_every=2", "devices.reference.num=1")),
    "kl_in_reward": Case(("kl.coef=0.1", "kl.place=reward", "kl.estimator=k1", "reference.ema=0.5"), budget=100),
    "ppo": Case(("algorithm=ppo", "advantage=gae", "model.value_head=true")),
    "ppo_walks": Case(("algorithm=ppo", "advantage=gae", "model.value_head=true"), budget=60),
    "gspo": Case(("algorithm=gspo", "trainer.updates_per_batch=2")),
    "minibatches": Case(("trainer.minibatch_trajectories=4", "trainer.updates_per_batch=2", "correction.weight=token")),
    "entropy": Case(("algorithm.top_entropy=0.5",)),
    "muon": Case(("optimizer.kind=muon",)),
    "checkpointing": Case(("model.checkpointing=true",), budget=60),
}
LAYOUTS: dict[str, Callable[[int, int], ParallelLayout]] = {
    "parallel_none": ParallelLayout,
    "parallel_ddp": DataParallel,
    "parallel_fsdp2_whole": lambda rank, ranks: FullySharded(rank, ranks, reshard=False),
    "parallel_fsdp2_resharded": lambda rank, ranks: FullySharded(rank, ranks, reshard=True),
    "parallel_zero3": lambda rank, ranks: DeepSpeedSharded(rank, ranks, {}),  # in fp32: see test_zero3.py
}
OF_THREE = ("grpo", "walks", "walks_of_one_task", "empty_rank", "minibatches", "ppo_walks")
SHARED = [name for name in LAYOUTS if name not in ("parallel_none", "parallel_zero3")]


def play(seed: int, case: Case) -> list[Group]:
    """Groups of four random conversations."""
    numbers = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(20, 1900) for _ in range(count)]

    system, groups = tokens(case.trunk), list[Group]()
    for task in range(case.tasks):
        prompt, trajectories = system + tokens(40 + 7 * task), list[Trajectory]()
        for sibling in range(4):
            turns: list[Turn] = []
            for number in range(numbers.randint(1, case.turns)):
                output, context = tokens(numbers.randint(3, 25)), tokens(numbers.randint(4, 12)) if number else prompt
                logprobs = [-8 * numbers.random() for _ in output]
                turns.append(
                    Turn(context, output, logprobs, [0] * len(output), Finish.STOP, Message("assistant"), number - 1)
                )
            reward = numbers.random()
            trajectories.append(
                Trajectory(
                    Task(f"t/{task}", (Message("user", "?"),)), sibling, turns=turns, reward=reward,
                    turn_rewards=[0.0] * len(turns),
                )
            )  # fmt: skip
        groups.append(Group(trajectories[0].task, trajectories))
    return groups


def train(
    rank: int, ranks: int, layout: str, case: Case, folder: Path, steps: Sequence[int] = range(UPDATES)
) -> tuple[list[Metrics], dict[str, Tensor], list[str]]:
    """Some updates; their metrics, the weights after them, and the notes."""
    experiment = preset("calculator_from_scratch", *WORDS, f"batch.token_budget={case.budget}", *case.words)
    config = trainer_config(experiment, [1], None, folder)
    config = replace(config, learning=replace(config.learning, exact=False))
    trainer = TrainerRank(config, LAYOUTS[layout](rank, ranks))
    trainer.begin(Stage.reinforcement)
    reference = TrainerRank(config) if config.learning.apart else None  # a model of its own
    if reference is not None:
        reference.begin(Stage.reinforcement)
    rows: list[Metrics] = []
    for step in steps:
        groups = play(10 + step, case)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch = build_batch(trajectories)
        rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
        evidence = evidence_of(groups, config.learning)
        ref_logp = at_once(reference.referring(batch, rewards)) if reference else None
        rows.append(at_once(trainer.updating(batch, rewards, step, step, evidence, ref_logp)))
        if reference and (share := config.learning.reference.share(step + 1)):
            for name, weight in trainer.weights().tensors(None):
                reference.move(name, weight, share)
    weights = {name: weight.clone() for name, weight in trainer.weights().tensors(torch.float64)}
    return rows, weights, trainer.notes


def furthest(one: Any, other: Any) -> tuple[float, str]:
    """How far the metrics, relative, and the weights are apart, and where."""
    distances: list[tuple[float, str]] = []
    for step, (row, row_of_other) in enumerate(zip(one[0], other[0], strict=True)):
        assert row.keys() == row_of_other.keys(), row.keys() ^ row_of_other.keys()
        for name, value in row.items():
            if not name.endswith("_tokens"):  # ranks compute some several times
                distances.append((abs(row_of_other[name] - value) / max(1.0, abs(value)), f"{name} of update {step}"))
    assert one[1].keys() == other[1].keys()
    distances += [((one[1][name] - other[1][name]).abs().max().item(), name) for name in one[1]]
    return max(distances)


def train_all(rank: int, ranks: int, layouts: Sequence[str], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """What `train` gives, or the error, of every layout and case."""
    given: dict[str, Any] = {}
    for layout in layouts:
        for name in names:
            given[f"{layout} {name}"] = train(rank, ranks, layout, CASES[name], folder)
    return given


def drop_gathered(rank: int, ranks: int, layout: str, folder: Path) -> Any:
    """As `train` of walks, but on the last rank what is computed below a chain gives no gradient to the chain."""

    def backward(_: ParallelLayout, prefix: Prefix) -> None:
        prefix._leaves.clear()  # pyright: ignore[reportPrivateUsage]
        prefix.backward()

    if rank == ranks - 1:
        ParallelLayout.backward = backward
    return train(rank, ranks, layout, CASES["walks_of_one_task"], folder)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process comes to, by case; trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("one")

    class Trained(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            self[name] = train(0, 1, "parallel_none", CASES[name], folder)
            return self[name]

    return Trained()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of some ranks comes to, by layout and case."""
    folder = tmp_path_factory.mktemp("ranks")
    names = list(CASES) if request.param == 2 else [name for name in CASES if name in OF_THREE]
    return on_ranks(request.param, train_all, folder, SHARED, names, folder)


@pytest.mark.real
@pytest.mark.timeout(1500)
def test_ranks_make_the_updates_of_one_process(ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    for key, first in ranks[0].items():
        layout, name = key.split()
        apart, where = furthest(one_process[name], first)
        # torch turns the momentum of Muon in bfloat16, and sums of parts are rounded in another order.
        assert apart < (1e-2 if name == "muon" and "fsdp2" in layout else 1e-12), (key, where)
        assert all(furthest(first, other[key])[0] == 0 for other in ranks[1:]), key


def test_a_reference_apart_says_what_one_of_the_policys_own_does(one_process: dict[str, Any]) -> None:
    apart, where = furthest(one_process["kl"], one_process["kl_apart"])
    assert apart < 1e-12, where


@pytest.mark.real
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layout", SHARED)
def test_a_gradient_that_is_lost_on_one_rank_is_seen(layout: str, one_process: dict[str, Any], tmp_path: Path) -> None:
    first, *_ = on_ranks(2, drop_gathered, tmp_path, layout, tmp_path)
    assert furthest(one_process["walks_of_one_task"], first)[0] > 1e-6


def fault_on_one(rank: int, ranks: int, folder: Path) -> Any:
    """As `train`, but on the last rank alone the gradient of a walk seems wrong."""
    if rank == ranks - 1:
        step_of_policy.check_walk = lambda *_: "a fault"
    return train(rank, ranks, "parallel_ddp", CASES["grpo"], folder)


@pytest.mark.real
@pytest.mark.timeout(1500)
def test_what_one_rank_finds_wrong_all_leave(one_process: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_ranks(2, fault_on_one, tmp_path, tmp_path)
    assert furthest(first, second)[0] == 0 and furthest(one_process["grpo"], first)[0] < 1e-12
    for notes in (first[2], second[2]):
        assert "a fault: training on padded rows" in notes


def what_stays_gathered(rank: int, ranks: int, folder: Path) -> dict[str, list[str]]:
    """The weights that are whole on a rank, after what is done in a step."""
    experiment = preset("calculator_from_scratch", *WORDS, "batch.token_budget=400")
    config = trainer_config(experiment, [1], None, folder)
    config = replace(config, learning=replace(config.learning, exact=False))
    trainer, batches = (
        TrainerRank(config, FullySharded(rank, ranks, reshard=True)),
        [play(seed, Case()) for seed in (1, 2)],
    )
    trainer.begin(Stage.reinforcement)
    found: dict[str, list[str]] = {}

    def note(after: str) -> None:
        found[after] = [name for name, weight in trainer.model.named_parameters() if not is_sharded(weight)]

    for version, groups in enumerate(batches):
        batch = build_batch([trajectory for group in groups for trajectory in group.trajectories])
        rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
        at_once(trainer.updating(batch, rewards, version, version, None))
        note(f"update {version}")
        trainer.weights().logprobs(list(range(20, 40)))
        note(f"the proof of a push {version}")
        assert trainer.policy is not None
        trainer.policy.judge(1e-4, "what is judged differs")
        note(f"judge {version}")
    trainer.scorer.reference(list(range(20, 40)))
    note("a pass alone")
    return found


@pytest.mark.real
@pytest.mark.timeout(1500)
def test_nothing_stays_gathered_over_a_step(tmp_path: Path) -> None:
    for found in on_ranks(2, what_stays_gathered, tmp_path, tmp_path):
        alone = found.pop("a pass alone")
        assert alone and not any(".layers." in name for name in alone), "what is outside the layers stays after a pass"
        assert len(found) == 6 and not any(found.values()), found


RUN = ["recipe=calculator_from_scratch", "log=[jsonl]", "model.name=tiny", "model.dtype=float64", "sft.steps=3"]
RUN += ["sft.optimizer.kind=adamw", "optimizer.kind=adamw", "kl.coef=0.05", "reference.update_every=2"]
RUN += [f"reward={Path(__file__).parent / 'newcomer/rewards.py'}:Tidy", "algorithm.truncated=keep"]  # rewards differ
RUN += ["eval.tasks=4", "eval.samples=2", "rollout.prompts_per_step=3", "rollout.group_size=4"]
WAYS = {
    "parallel_ddp": ["parallel=ddp", "devices.train.num=2"],
    "parallel_fsdp2_whole": ["parallel=fsdp2", "devices.train.num=3"],
    "parallel_fsdp2_resharded": ["parallel=fsdp2", "parallel.reshard=true", "devices.train.num=2"],
    "parallel_none_reference_apart": ["devices.reference.num=1"],
    "parallel_fsdp2_reference_apart": ["parallel=fsdp2", "devices.train.num=2", "devices.reference.num=2"],
}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps in one process."""
    run = train_by_command(tmp_path_factory.mktemp("whole") / "run", *RUN, "trainer.steps=5")
    assert sum(row.get("policy/grad_norm", 0.0) > 1e-3 for row in rows(run)) >= 3  # else rounding alone is learned
    return run


@pytest.mark.real
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("way", WAYS)
def test_a_whole_run_is_that_of_one_process(way: str, whole_run: Path, tmp_path: Path) -> None:
    other = train_by_command(tmp_path / "run", *RUN, *WAYS[way], "trainer.steps=5")
    apart, where = furthest_of_runs(whole_run, other)
    assert apart < 1e-12, where


@pytest.mark.real
@pytest.mark.timeout(1500)
def test_a_run_goes_on_with_other_ranks(whole_run: Path, tmp_path: Path) -> None:
    """Two ranks with FSDP2, then three, the reference apart, copies on two ranks, one process."""
    ways = ("parallel_fsdp2_resharded", "parallel_fsdp2_whole", "parallel_none_reference_apart", "parallel_ddp")
    for steps, words in enumerate([*map(WAYS.__getitem__, ways), []], start=1):
        train_by_command(tmp_path / "run", *RUN, *words, f"trainer.steps={steps}", "resume=true")
    apart, where = furthest_of_runs(whole_run, tmp_path / "run", of="policy/loss")  # it evaluates at each end
    assert apart < 1e-12, where
