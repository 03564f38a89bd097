"""The command line: what it accepts, what it refuses and how, and what it starts."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import errno
import json
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import AsyncGenerator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hydra.types import RunMode

import mtgrpo
from conftest import Run
from mtgrpo import cli
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.config import options
from mtgrpo.config.compose import Configured, ExperimentLoader, compose, parse
from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.helptext import comments
from mtgrpo.config.recipe import recipes
from mtgrpo.config.run_record import claimed, read_run
from mtgrpo.environments import Opening
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError, program
from mtgrpo.parts import RunContext, extension
from mtgrpo.policy.settings import Kind
from mtgrpo.tasks.calculator import Calculator
from mtgrpo.tasks.gsm8k import Gsm8k
from mtgrpo.types import Message, Task

pytestmark = pytest.mark.usefixtures("place")

OWN_FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from mtgrpo.algorithms import Algorithm, Baseline, PerToken
from mtgrpo.rewards import Reward
from mtgrpo.tasks import IndexedStream, TaskSource
from mtgrpo.types import Message, Task, ToolCall

seen = []

@dataclass
class Half(Reward):
    """Half a point."""
    target: float = 0.5  # what everything is worth

    def reward(self, trajectory):
        return self.target

@dataclass
class Fails(Reward):
    """Breaks, once it is open."""
    cpu_heavy = True

    def reward(self, trajectory):
        raise OSError("the grader is away")

@dataclass(kw_only=True)
class Needy(Reward):
    target: str

    def reward(self, trajectory):
        return 1.0

@dataclass
class Sums(TaskSource):
    """Sums of small numbers."""
    largest: int = 9

    def stream(self, split, seed, repeat=True):
        def task(index):
            return Task(f"{split.value}/{index}", (Message("user", f"What is {index % self.largest} + 1?"),), "2")
        return IndexedStream(None if repeat else 3, task, seed, repeat)

    def demonstration(self, task, seed):
        call = Message("assistant", tool_calls=(ToolCall("increment", {"number": 1}),))
        return (call, Message("tool", "2", name="increment"), Message("assistant", "#### 2"))

@dataclass
class Reinforce(Algorithm):
    """REINFORCE."""
    centre: float = 0.25  # taken from every reward

    def check(self, experiment):
        pass

    def baseline(self, returns, group):
        seen.append(returns.tolist())
        return Baseline(returns * 0 + self.centre, returns * 0 + 1)

    def loss(self, tokens):
        return PerToken(-tokens.logp * tokens.advantage, tokens.advantage != tokens.advantage)

def increment(number: int) -> str:
    """Add one.

    Args:
        number: what to add to
    """
    return str(number + 1)

class Bare(Reward):
    level: int = 3

    def reward(self, trajectory):
        return 0.0

@dataclass
class Odd(Reward):
    level: int | list[int] = 3

    def reward(self, trajectory):
        return 0.0

class Unfinished(Reward):
    """Has no method."""
'''
SMALL = [
    *("trainer.steps=1", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=4", "eval.tasks=2", "eval.samples=2"),
]


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A file of the user's own, outside the folder of the test."""
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    return str(path)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is a failure."""

    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("mtgrpo.policy.trainer.load_model", load)


def composed(*words: str) -> Configured:
    return compose(parse(words))


def experiment(*words: str) -> Experiment:
    return composed(*words).experiment


# --- what a configuration becomes


def test_without_a_word_it_is_the_recipe_calculator() -> None:
    result = composed()
    assert result.choices == {
        "task": "calculator",
        "environment": "tool_use",
        "condenser": "none",
        "reward": "numeric",
        "algorithm": "grpo",
        "advantage": "trajectory",
        "engine": "local",
        "agent": "none",
        "parallel": "auto",
        "cluster": "local",
        "recipe": "calculator",
    }
    made = result.experiment
    assert isinstance(made.task, Calculator) and isinstance(made.environment, ToolUse)
    assert made.environment.tools == ["calculator"]
    assert (made.algorithm, made.sft.optimizer.kind) == (GRPO(divide_by_std=False, clip_high=0.28), Kind.muon)
    assert (made.model.name, made.sft.steps) == ("tiny-calculator", 0)


@pytest.mark.parametrize(
    ("words", "recipe", "lr", "imitates"),
    [
        ("model.name=tiny-calculator", "calculator", 2e-3, 0),
        ("model.name=tiny-2m", "calculator_from_scratch", 2e-3, 1600),
        ("task=word_problems", "calculator_from_scratch", 2e-3, 1600),
        ("sft.steps=20", "calculator_from_scratch", 2e-3, 20),
        ("sft.steps=0", "calculator", 2e-3, 0),
        ("model.name=Some/Model", "pretrained", 1e-6, 0),
        ("model.name=./folder task=gsm8k environment=single_turn", "pretrained", 1e-6, 0),
        ("model.name=Some/Model model.lora.rank=8", "pretrained_lora", 1e-5, 0),
        ("model.name=Some/Model model.lora.rank=0", "pretrained", 1e-6, 0),
        ("model.name=Some/Model model.lora.rank=8 optimizer.lr=3e-6", "pretrained_lora", 3e-6, 0),
        ("model.name=Some/Model +recipe=lora", ["pretrained", "lora"], 1e-5, 0),
        ("model.name=Some/Model recipe=calculator_from_scratch", "calculator_from_scratch", 2e-3, 1600),
        ("model.name=Some/Model recipe=gsm8k", "gsm8k", 1e-6, 0),
    ],
)
def test_a_pretrained_model_is_not_trained_as_one_from_scratch(
    words: str, recipe: Any, lr: float, imitates: int
) -> None:
    result = composed(*words.split())
    made = result.experiment
    assert (result.choices["recipe"], made.optimizer.lr, made.sft.steps) == (recipe, lr, imitates)
    if "pretrained" in str(recipe):
        assert made.optimizer.kind is made.sft.optimizer.kind is Kind.adamw
        assert made.model.lora.alpha == (64 if isinstance(recipe, list) else 32)


def test_a_configuration_that_names_a_pretrained_model_is_for_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nmodel: {name: Some/Model, lora: {rank: 8}}\n")
    (tmp_path / "small.yaml").write_text("defaults: [base, _self_]\nmodel: {name: tiny-2m}\n")
    chosen = [
        ExperimentLoader([tmp_path], name).load_configuration("base", [], RunMode.RUN) for name in ("mine", "small")
    ]
    assert [(one.hydra.runtime.choices.recipe, one.optimizer.lr) for one in chosen] == [
        ("pretrained_lora", 1e-5),
        ("calculator_from_scratch", 2e-3),
    ]


def test_the_recipe_that_a_model_brings_is_said(run: Run) -> None:
    code, out, err = run("train", "model.name=Some/Model", "--dry-run")
    assert code == 0 and "recipe=pretrained" in out and "1,300" not in out
    assert "recipe=pretrained is taken for model.name=Some/Model: no recipe= is given" in err
    for words in (["model.name=tiny"], ["recipe=pretrained", "model.name=Some/Model"], []):
        assert "is taken for" not in run("train", *words, "--dry-run")[2]


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_is_an_experiment_and_short(name: str) -> None:
    made = experiment("recipe=[gsm8k,lora]" if name == "lora" else f"recipe={name}")
    assert type(made) is Experiment
    assert made.environment.max_turns >= 1
    settings = [line for line in recipes()[name].read_text().splitlines() if "- {role: " not in line]
    assert len(settings) <= 25


def test_the_chosen_option_is_an_object_of_its_own_class() -> None:
    made = experiment("environment=single_turn", "task=gsm8k")
    assert type(made.environment) is SingleTurn
    assert type(made.task) is Gsm8k


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_code() -> None:
    assert GRPO().clip_high == 0.2
    assert experiment("recipe=gsm8k").algorithm == GRPO(divide_by_std=False, clip_high=0.28)
    made = experiment("algorithm.clip_high=0.3", "recipe=gsm8k", "algorithm=grpo")
    assert made.algorithm == GRPO(divide_by_std=False, clip_high=0.3)


def test_values_have_the_types_of_the_dataclasses() -> None:
    made = experiment(
        "optimizer.betas=[0.5,0.75]", "optimizer.lr=1", "algorithm.average=trajectory_mean", "model.name=tiny", "seed=7"
    )
    assert made.optimizer.betas == [0.5, 0.75]
    assert type(made.optimizer.betas) is list
    assert type(made.optimizer.lr) is float
    assert made.algorithm.average is Average.trajectory_mean
    assert type(made.log) is list


@pytest.mark.parametrize("given", ["{calculator: {max_digits: 3}}", "[calculator]", "[]"])
def test_a_list_or_mapping_of_tools_replaces_that_of_the_recipe(given: str) -> None:
    made = experiment(f"environment.tools={given}")
    assert isinstance(made.environment, ToolUse)
    assert made.environment.tools == yaml.safe_load(given)


def test_a_recipe_s_settings_of_a_group_go_with_the_option_it_chose(own: str) -> None:
    words = ("recipe=gsm8k", "task=calculator", f"algorithm={own}:Reinforce", "environment=single_turn")
    made = experiment(*words)
    assert made.task.system_prompt == ""
    assert made.environment == SingleTurn()
    assert made.optimizer.lr == 1e-6


def test_a_recipe_of_ones_own_is_a_file(place: Path, own: str) -> None:
    place.joinpath("mine.yaml").write_text(
        f"defaults: [override /reward: '{own}:Half', override /task: gsm8k]\n"
        "reward: {target: 0.75}\nseed: 5\nenvironment: {tools: {calculator: {max_digits: 3}}}\n"
    )
    result = composed("recipe=mine.yaml", "kl.coef=0.5")
    made = result.experiment
    assert (made.seed, made.kl.coef, vars(made.reward)["target"]) == (5, 0.5, 0.75)
    assert isinstance(made.environment, ToolUse) and made.environment.tools == {"calculator": {"max_digits": 3}}
    assert result.choices["recipe"] == str(place / "mine.yaml")


def test_files_of_a_folder_without_a_class_are_no_options() -> None:
    assert set(options.options("algorithm")).isdisjoint({"kl", "average", "credit"})
    assert set(options.options("engine")).isdisjoint({"cache", "sampling"})
    assert {"grpo"} <= set(options.options("algorithm"))
    assert groups()["algorithm"] is Algorithm


def test_a_file_dropped_into_a_folder_is_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mtgrpo.algorithms  # noqa: PLC0415

    tmp_path.joinpath("plain.py").write_text(
        "from dataclasses import dataclass\nfrom mtgrpo.algorithms import *\n"
        "@dataclass\nclass Plain(Algorithm):\n"
        "    level: float = 2.0\n"
        "    def baseline(self, returns, group): return Baseline(returns, returns)\n"
        "    def loss(self, tokens): return PerToken(-tokens.logp, tokens.logp > 0)\n"
    )
    monkeypatch.setattr(mtgrpo.algorithms, "__path__", [*mtgrpo.algorithms.__path__, str(tmp_path)])
    options.options.cache_clear()
    made = experiment("algorithm=plain", "algorithm.level=3")
    options.options.cache_clear()
    assert vars(made.algorithm)["level"] == 3.0


# --- what is refused


@pytest.mark.parametrize("group", groups())
def test_a_class_of_every_kind_has_bounds(group: str) -> None:
    fields: dict[str, Any] = {"mine": 1, "__annotations__": {"mine": int}}
    made = types.new_class("Own", (groups()[group],), {"mine": "> 0"}, lambda body: body.update(fields))
    own: Any = dataclasses.dataclass(made)
    own.__abstractmethods__ = frozenset[str]()
    assert own().mine == 1
    with pytest.raises(ConfigError, match="`mine` must be > 0, got 0"):
        own(mine=0)


@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_warm_start_without_demonstrations_is_refused(command: str, run: Run, place: Path, no_model: None) -> None:
    for number, name in enumerate(("own", "held_out")):
        place.joinpath(f"{name}.jsonl").write_text(json.dumps({"prompt": f"1 + {number}?", "answer": 1 + number}))
    words = ["recipe=jsonl", "model.name=tiny", "task.path=own.jsonl", "task.val_files=[held_out.jsonl]", "--dry-run"]
    code, _, error = run(command, *words, "sft.steps=3")
    assert code == 2
    assert error.startswith("mtgrpo: sft.steps=3: task Jsonl has no demonstrations to learn from; set sft.steps=0")
    assert run("train", *words)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rollout.grup_size=2", ["unknown option rollout.grup_size", "did you mean rollout.group_size?"]),
        ("lr=2", ["unknown option lr; here it is optimizer.lr"]),
        ("rolout.seeed=2", ["unknown option rolout.seeed"]),
        ("task.path=x", ["unknown option task.path", "or gsm8k or"]),
        ("sampling={tempratur:1}", ["unknown option sampling.tempratur; did you mean sampling.temperature?"]),
        ("sampling.zzz=1", ["unknown option sampling.zzz; there are sampling.temperature, "]),
        ("zzz=1", ["unknown option zzz", "--help"]),
        ("checkpoint=x", ["checkpoint=x", "checkpoint.every_steps", "to go on from one give resume=PATH"]),
        ("rollout.group_size=abc", ["rollout.group_size=abc: expected an integer"]),
        ("rollout.group_size=2.5", ["rollout.group_size=2.5: expected an integer"]),
        ("trainer.deterministic=maybe", ["trainer.deterministic=maybe: expected true or false"]),
        ("model.name=null", ["model.name=null: expected a text"]),
        ("optimizer.betas=0.9", ["optimizer.betas=0.9: expected a list such as [0.1,0.2]"]),
        ("optimizer.betas=[0.9,x]", ["optimizer.betas=[0.9,x]: expected a list such as [0.1,0.2]"]),
        ("'sampling={top_p: x}'", ["sampling={top_p: x}: sampling.top_p: expected a number"]),
        ("kl.estimator=k9", ["kl.estimator=k9: expected one of k1, k2, k3"]),
        ("task=gsm8", ["there is no task named 'gsm8'; did you mean gsm8k?", "word_problems", "path/to/file.py:Name"]),
        (
            "algorithm=kl",
            ["there is no algorithm named 'kl'; known: cispo, dapo, dppo, dr_grpo, gmpo, grpo, gspo, ppo,"],
        ),
        ("'reward={target: 1}'", ["reward={target: 1}", "choose a reward by its name"]),
        ("recipe=gsm9k", ["there is no recipe=gsm9k; did you mean gsm8k?"]),
        ("recipe=xyzzy", ["there is no recipe=xyzzy; known: async, calculator, "]),
        ("recipe=away.yaml", ["there is no file", "away.yaml"]),
        ("seed=1,2", ["seed=1,2 gives several values", "--multirun", "[1,2]"]),
        ("seed=${nowhere}", ["seed", "nowhere"]),
        ("gsm8k", ["cannot read 'gsm8k'", "key=value"]),
        ("+sede=1", ["unknown option sede; did you mean seed?"]),
        ("checkpoints=latest", ["unknown option checkpoints; did you mean checkpoint?"]),
        ("~seed", ["~seed: no recipe sets seed"]),
        ("sft.demonstrations=away.jsonl", ["sft.demonstrations=away.jsonl: no such file or folder"]),
        ("~reward", ["~reward: choose a reward by its name"]),
        ("seed@x=1", ["'seed@x=1'", "leave @ out"]),
        ("condenser=[none,keep_last]", ["condenser=[none,keep_last]: choose one condenser, it takes no list"]),
        ("hydra.rum.dir=x", ["hydra.rum"]),
        ("hydra.sweep.dir=x", ["hydra.sweep.dir", "--multirun"]),
        ("--cfg", ["--cfg", "expected one argument"]),
        ("--cfg nothing", ["--cfg", "'nothing'", "'job'"]),
        ("--config-dir away", ["--config-dir away: there is no such folder"]),
        ("--config-name mine", ["--config-name mine: there is no mine.yaml; give --config-dir FOLDER"]),
        ("--rollout.group_size 4", ["there is no --rollout.group_size; options are key=value, without --: "]),
        ("--experimental-rerun x.pickle", ["there is no --experimental-rerun"]),
        ("--model Qwen/Qwen3-0.6B", ["there is no --model; here it is model.name; options are key=value, without --"]),
        ("--multirn", ["there is no --multirn", "--multirun"]),
        ("--multirun hydra.run.dir=x", ["hydra.run.dir", "hydra.sweep.dir=PATH"]),
        ("--multirun hydra.job.name=a,b", ["hydra.job.name=a,b gives several values: what belongs to Hydra takes one"]),
        ("--multirun rollout.group_size=4,1", ["rollout.group_size must be >= 2, got 1"]),
        ("--multirun sampling.temperature=interval(0,1)", ["is for hydra/sweeper=optuna"]),
        ("environment.max_turns=0", ["environment.max_turns", "got 0"]),
        ("environment.tools=[abacus]", ["'abacus'", "known: calculator"]),
        ("sampling.temperature=-1", ["sampling.temperature must be >= 0", "got -1.0"]),
        ("rollout.group_size=1", ["rollout.group_size must be >= 2, got 1"]),
        ("task=jsonl", ["no file of tasks is named: give task.path=FILE"]),
        ("algorithm=ppo", ["algorithm PPO has a critic", "set advantage=gae"]),
        ("algorithm=ppo advantage=gae", ["set model.value_head=true"]),
        (
            "model.value_head=true",
            ["model.value_head=true", "algorithm GRPO has no critic", "algorithm=ppo advantage=gae"],
        ),
        ("algorithm=gmpo advantage=turn", ["algorithm GMPO", "set advantage=trajectory"]),
        ("algorithm=reinforce_pp advantage=gigpo", ["GiGPO compares the turns of siblings"]),
        ("kl.coef=0.1 kl.estimator=k1", ["kl.estimator=k1 in the loss", "kl.place=reward"]),
        ("kl.target=0.1", ["kl.target=0.1", "set kl.coef"]),
        ("reference.ema=0.1", ["set kl.coef"]),
        ("algorithm=dppo correction.weight=token", ["algorithm DPPO", "leave correction.old_policy"]),
        ("correction.old_policy=interpolated rollout.max_staleness=1", ["set rollout.max_staleness to 2"]),
        ("advantage=turn", ["advantage=turn compares the rewards of turns", "reward=calculation"]),
        ("advantage.outcome_weight=0", ["nothing is rewarded"]),
        ("algorithm=reinforce_pp filter.zero_variance=true", ["groups of equal rewards have a gradient too"]),
        (
            "algorithm.divide_by_std=true kl.coef=0.1 kl.place=reward kl.estimator=k1",
            ["set algorithm.divide_by_std=false"],
        ),
        ("algorithm=dapo algorithm.overlong_tokens=99999", ["rollout.max_trajectory_tokens=4096"]),
        ("kl.coef=0.1 reference.update_every=1", ["always be the policy itself"]),
        ("correction.old_policy=engine correction.weight=token", ["set correction.old_policy=trainer"]),
        ("filter.refill=true", ["set filter.zero_variance=true"]),
        ("sft.optimizer.lr=-1", ["sft.optimizer.lr must be > 0 and <= 1, got -1.0"]),
        ("optimizer.lr=-1", ["mtgrpo: optimizer.lr must be > 0 and <= 1"]),
        ("model.name=tiny model.lora.rank=4", ["model.lora.rank=4: model.name=tiny", "then give model.name=FOLDER"]),
        ("algorithm.clip_low=2", ["algorithm.clip_low must be > 0 and <= 1, got 2.0"]),
        ("profile.reward=false", ["profile.reward=false has no effect: set profile.enabled=true, or leave it out"]),
        ("correction.cap=3", ["correction.cap=3.0 has no effect: set correction.weight=token"]),
        ("correction.high=3", ["correction.high=3.0 has no effect: set correction.reject=token"]),
        ("kl.coef=0.1 kl.adaptation=0.1", ["kl.adaptation=0.1 has no effect: set kl.target"]),
        ("optimizer.muon_lr=0.1", ["optimizer.muon_lr=0.1 has no effect: set optimizer.kind=muon"]),
        ("num_generations=4", ["unknown option num_generations; here it is rollout.group_size"]),
        ("task=jsonl task.path=away.jsonl", ["task.path=away.jsonl", "no such file"]),
        (
            "model.name=./nowhere",
            ["model.name=./nowhere cannot be loaded: there is no such folder; give a folder, smollm2"],
        ),
        ("reward=away.py:Reward", ["there is no file", "away.py"]),
        ("reward=away.py", ["away.py names a file; name the class in it too, as "]),
        ("optimizer.lr=nan", ["optimizer.lr=nan is no usable number; give a finite one"]),
        ("optimizer.lr=5", ["optimizer.lr must be > 0 and <= 1, got 5.0"]),
        ("optimizer.betas=[0.9,inf]", ["optimizer.betas.1=inf is no usable number"]),
        ("rollout.group_size=1000000000000000000", ["rollout.group_size=1000000000000000000 is no usable number"]),
        ("reward.success_at=-inf", ["reward.success_at=-inf is no usable number"]),
        ("environment.tools.calculator.max_digits=nan", ["tools.calculator.max_digits=nan is no usable number"]),
        ("environment.tools.calculator.max_digits=-3", ["max_digits must be >= 1 and <= 1000, got -3"]),
        ("environment.tools=[calculater]", ["there is no tool named 'calculater'; did you mean calculator?"]),
        (
            "environment.tools=calculator",
            ["environment.tools must be a list of names: 'environment.tools=[calculator]'"],
        ),
        (
            "environment.tools={w.py:weigh:{unit:g}}",
            [r"takes a backslash: 'environment.tools={w.py\:weigh:{unit:g}}'"],
        ),
        ("environment.tools=[calculator,calculator]", ["two are named 'calculator'; rename one"]),
        ("recipe=calcualtor", ["there is no recipe=calcualtor; did you mean calculator"]),
        ("recipe=[calculator,gsm9k]", ["there is no recipe=gsm9k; did you mean gsm8k"]),
        ("algorithm=gpro", ["there is no algorithm named 'gpro'; did you mean gspo or grpo?"]),
        ("engine=other", ["there is no engine named 'other'; known: auto, local, server"]),
        ("log=[consol]", ["there is no log named 'consol'; did you mean console?"]),
        ("chat.template=chatlm", ["chat.template='chatlm' is neither auto nor chatml nor an existing .jinja file"]),
        ("agent=python", ["give agent.function=path/to/file.py:name"]),
        ("agent=command", ["give the command and its arguments, such as 'agent.argv=["]),
        ("sft.demonstrations=away.jsonl", ["no such file or folder of .jsonl files: 'away.jsonl'"]),
        ("task=parquet", ["no file of tasks is named", "task.path=FILE"]),
        ("task=mixed", ["task.of is empty: name the sources"]),
        ("task=mixed sft.steps=0 task.of=[{task:jsonl,path:away.jsonl}]", ["no such file or folder", "away.jsonl"]),
        ("environment=gymnasium", ["task calculator/0/0/eval/0 has no seed for a game", "use task=game"]),
        ("environment=guess_number", ["has no number to guess; environment=guess_number is for the task of it"]),
        ("environment=function_calls", ["environment=function_calls needs `tools` in its metadata"]),
        ("task=game sft.steps=0", ["task game/0/0/eval/0: the answer '' is not a number"]),
        ("reward=unit_tests", ["task calculator/0/0/eval/0 has no `tests` in its metadata", "task=mbpp"]),
        ("reward=[numeric,ifeval]", ["has no `instruction_id_list`", "reward=ifeval is for task=ifeval"]),
        (
            "task=parquet task.path=away.parquet",
            ["no such file or folder of .parquet files: 'away.parquet'"],
        ),
        ("resume=true", ["add hydra.run.dir=FOLDER"]),
        ("resume=away", ["away is not a checkpoint: there is no such folder"]),
        ("trainer.steps=0", ["set trainer.steps, trainer.epochs, trainer.total_turns or trainer.wall_time_s above 0"]),
        ("=1", ["nothing stands before the =; options are key=value"]),
        ("seed=", ["seed=: expected an integer"]),
        ("model.name=Some/Model", ["model.name=Some/Model is not on this machine", "give a folder, smollm2"]),
        ("--online", ["--online is for --dry-run"]),
        ("--fail-under 0.5", ["--fail-under 0.5 is for eval"]),
    ],
)
def test_bad_input_is_told_in_a_line_or_two_and_leaves_nothing(
    words: str, said: list[str], run: Run, place: Path, no_model: None
) -> None:
    arguments = shlex.split(words)
    code, out, err = run("train", *arguments)
    assert code == 2
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 2
    assert err.startswith("mtgrpo: ")
    assert [part for part in said if part not in err] == []
    assert list(place.iterdir()) == []


def test_a_task_is_tried_in_an_open_environment_before_there_is_a_model(
    run: Run, place: Path, no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: ToolUse, task: Task) -> Opening:
        assert running == [True]
        raise ConfigError(f"no tool is for {task.id}")

    @asynccontextmanager
    async def open_with_tools(self: ToolUse, context: RunContext) -> AsyncGenerator[ToolUse]:
        running.append(True)
        yield self

    running: list[bool] = []
    monkeypatch.setattr(ToolUse, "start", start)
    monkeypatch.setattr(ToolUse, "open", open_with_tools)
    assert run("train", "--dry-run")[0] == 0
    code, _, err = run("train", "log=[jsonl]")
    assert (code, err) == (2, "mtgrpo: no tool is for calculator/0/0/eval/0\n")


def test_folders_and_recipes_that_are_something_else_are_named(run: Run, place: Path) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    code, _, err = run("train", "resume=true", "hydra.run.dir=model", *SMALL)
    assert (code, "holds other things and no run" in err, [*Path("model").iterdir()]) == (
        2,
        True,
        [Path("model/config.json")],
    )
    Path("run/checkpoints/step_000003").mkdir(parents=True)
    Path("run/checkpoints/step_000003.replaced").mkdir()  # as a crash leaves it
    code, _, err = run("eval", "checkpoint=run")
    assert code == 2 and "checkpoint=run: " in err and "run holds no .hydra/config.yaml" in err
    Path("rows.jsonl").write_text('{"question": "1 + 1?", "solution": "2"}\n')
    assert "--prompt question (a string) or --messages NAME" in run("data", "check", "rows.jsonl")[1]


def test_python_takes_what_the_command_takes() -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*options are key=value"):
        mtgrpo.preset("calculator", {"sft.steps": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reward must be an object of a class derived from Reward, got <function"):
        dataclasses.replace(experiment(), reward=lambda trajectory: 1.0)
    with pytest.raises(ConfigError, match=r"train takes an experiment, such as mtgrpo.preset\('calculator'\), got"):
        asyncio.run(mtgrpo.train("calculator", "nowhere"))  # type: ignore[arg-type]


OWN_REWARD = """
from dataclasses import dataclass
from mtgrpo.errors import PolicyError
from mtgrpo.rewards import Reward

@dataclass
class Paid(Reward):
    def reward(self, trajectory):
        return GRADE
"""
GRADES = {  # of a reward of one's own, and what a dry run says of it
    "float(trajectory.final.startswith(trajectory.task.anwser))": "has no attribute 'anwser'",
    "trajectory.final": "give a finite number",
    "float(len(trajectory.turns) > 0)": "",
}
ROWS = ["recipe=jsonl", "task.path=rows.jsonl", "task.val_files=[held_out.jsonl]", "model.name=tiny"]


def write_rows() -> None:
    """What `ROWS` name."""
    for name, file in (("one", "held_out.jsonl"), ("two", "rows.jsonl")):
        Path(file).write_text(json.dumps({"id": name, "prompt": "1 + 1?", "answer": "2"}) + "\n")


TRIED = {"the demonstration of task calculator/": [], "the bare answer '2' of task one": ROWS}


def test_a_class_that_is_named_as_python_does_is_told_its_file(run: Run, place: Path) -> None:
    Path("graders").mkdir()
    Path("graders/own.py").write_text(OWN_REWARD)
    said = "there is no reward named 'graders.own:Paid'; did you mean graders/own.py:Paid? known: "
    assert said in run("train", "reward=graders.own:Paid", "--dry-run")[2]


@pytest.mark.parametrize(("what", "words"), TRIED.items())
@pytest.mark.parametrize(("grade", "said"), GRADES.items())
def test_somebodys_own_reward_is_tried(
    grade: str, said: str, what: str, words: list[str], run: Run, place: Path, no_model: None
) -> None:
    Path("own.py").write_text(OWN_REWARD.replace("GRADE", grade))
    write_rows()
    code, out, err = run("train", *words, "reward=[numeric,own.py:Paid]", "--dry-run")
    if not said:
        assert code == 0 and "nothing was run; a run" in out
        return
    assert code == 2 and f"fails for {what}" in err and said in err
    assert f"{Path.cwd()}/own.py, line " in err and "raise PolicyError where a text cannot be graded" in err


def test_what_a_reward_of_ones_own_cannot_grade_is_no_mistake_of_it(run: Run, place: Path, no_model: None) -> None:
    raised = "    if '####' not in trajectory.final: raise PolicyError('no number')\n        return 1.0"
    Path("own.py").write_text(OWN_REWARD.replace("return GRADE", raised.strip()))
    write_rows()
    assert run("train", *ROWS, "reward=own.py:Paid", "--dry-run")[0] == 0


def test_a_dry_run_says_what_differs_from_what_was_meant(run: Run, place: Path, no_model: None) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "tool", "arguments": {"number": 1}}]}
    said = [{"role": "user", "content": "1?"}, call, {"role": "tool", "content": "one"}]
    row = {"messages": [*said, {"role": "assistant", "content": "1"}]}
    Path("shown.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    tool = "def tool(number: int) -> str:\n    'Says it.'\n    return str(number)\n\n\n"
    Path("own.py").write_text(tool + OWN_REWARD.replace("GRADE", "1.0") + "\n    success_at: float = 0.5\n")
    words = ["sft.demonstrations=shown.jsonl", "environment.tools=[own.py:tool]", "reward=[numeric,own.py:Paid]"]
    code, _, err = run("train", "recipe=calculator_from_scratch", "sft.steps=1", *words, "--dry-run")
    assert code == 0, err
    assert "has 'one' where the tool tool answers '1'" in err
    assert "success_at=0.5 of Paid has no effect beside other rewards" in err and "Numeric" not in err


def test_what_only_a_run_can_try_is_said_to_be_untried(run: Run, place: Path, own: str, no_model: None) -> None:
    Path("kept.py").write_text("from mtgrpo.log.jsonl import Jsonl\n\n\nclass Kept(Jsonl):\n    pass\n")
    tool = [f"environment.tools=[{own}:increment]", "sft.steps=0"]
    for words, untried in (([], ""), (tool, "tools"), (["log=[kept.py:Kept]"], "sinks")):
        code, out, _ = run("train", *words, "--dry-run")
        assert code == 0 and f"nothing was run{untried and f', nor your own {untried} tried'}; a run" in out


def test_a_reward_of_ones_own_is_said_to_be_untried_where_only_a_run_can_try_it(
    run: Run, place: Path, no_model: None
) -> None:
    away = OWN_REWARD.replace("GRADE", "1 / 0").replace(
        "class Paid(Reward):", "class Paid(Reward):\n    cpu_heavy = True"
    )
    Path("own.py").write_text(away)
    code, out, _ = run("train", "reward=own.py:Paid", "--dry-run")
    assert code == 0 and "nothing was run, nor your own reward tried; a run" in out
    words = ("model.name=tiny-calculator", "model.lora.rank=4", "model.lora.targets=[qproj]", "--dry-run")
    assert "nothing was run, nor model.lora.targets compared with the model's layers; a run" in run("train", *words)[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "has no 'Nothing'; it defines Half, "),
        (
            "increment",
            "must be a class derived from mtgrpo.rewards.Reward, it is a function; make it the method reward",
        ),
        ("Sums", "must be a class derived from mtgrpo.rewards.Reward"),
        ("Bare", "@dataclass"),
        ("Odd", "level"),
        ("Unfinished", "does not define reward"),
        ("Needy", "reward.target is not set and has no default; give reward.target=VALUE"),
    ],
)
def test_an_unfit_class_of_ones_own_is_refused(name: str, said: str, own: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(f"reward={own}:{name}")
    assert said in str(refused.value)


def doubled_target(reward: Any) -> float:
    """What a process works out of a reward that was sent to it."""
    return float(2 * reward.target)


def test_an_object_of_ones_own_file_goes_to_another_process(own: str) -> None:
    made = experiment(f"reward={own}:Half", "reward.target=0.75")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        assert processes.submit(doubled_target, made.reward).result() == 1.5
    again = pickle.loads(pickle.dumps(made.reward))
    assert type(again) is type(made.reward) is extension.load_file(Path(own)).Half


def test_a_file_of_ones_own_imports_what_lies_beside_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    place.joinpath("beside_it_alone.py").write_text("NUMBER = 7\n")
    place.joinpath("uses_it.py").write_text("from beside_it_alone import NUMBER\n")
    assert extension.load_file(place / "uses_it.py").NUMBER == 7


def test_what_a_file_sets_of_a_part_that_is_then_replaced_is_told(run: Run, place: Path) -> None:
    for name in ("rows", "held_out"):
        (place / f"{name}.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    words = ["task.path=rows.jsonl", "task.val_files=[held_out.jsonl]", "model.name=tiny", "sft.steps=0", "--dry-run"]
    told = "mine.yaml: task (system_prompt) has no effect, for task: jsonl is chosen after it"
    for choice, left_out in (("", True), ("defaults: [override /task: jsonl]\n", False)):
        (place / "mine.yaml").write_text(f"{choice}task: {{system_prompt: Hello.}}\n")
        code, out, err = run("train", "recipe=mine.yaml", "task=jsonl", *words)
        assert code == 0 and (told in err, "Hello." in out) == (left_out, not left_out), (out, err)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere_at_all\n", "broken.py, line 1)"),
        ("x = (\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero ("),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 ("),
    ],
)
def test_a_broken_file_of_ones_own_is_named(source: str, said: str, place: Path) -> None:
    place.joinpath("broken.py").write_text(source)
    for _ in range(2):  # the second attempt must not find half a module
        with pytest.raises(ConfigError, match=r"broken\.py cannot be imported") as refused:
            composed("reward=broken.py:Mine")
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seeed: 1\n", "unknown option seeed; did you mean seed?"),
        ("rollout: {group_size: many}\n", "rollout.group_size: expected an integer"),
        ("defaults: [override /rewrd: numeric]\n", "chooses 'rewrd'"),
        ("a: [\n", "cannot be read"),
        ("- 1\n", "must hold a mapping"),
        ("optimizer: {lr: -1}\n", "mine.yaml: optimizer.lr must be > 0"),
    ],
)
def test_a_recipe_of_ones_own_is_checked(content: str, said: str, place: Path) -> None:
    place.joinpath("mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"mine\.yaml") as refused:
        composed("recipe=mine.yaml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean train?"),
        (["seed=1"], "the commands are train, sft, eval"),
        (["eval"], "eval needs checkpoint="),
        (["eval", "model.name=tiny-2m"], "eval needs checkpoint="),
        (["collect"], "collect needs checkpoint="),
        (["show"], "has written metrics.jsonl or summary.json: name the folder of one"),
        (["export"], "the following arguments are required: CHECKPOINT, --out; mtgrpo export --help lists"),
        (["show", "away"], "away holds no run"),
        (["launch", "vllm"], "the following arguments are required: --model"),
        (["launch", "local", "--model", "m"], "--max-length is missing"),
        (["data", "smollm3"], "'word_problems', 'svamp'); did you mean smollm2?"),
        (["help", "viw"], "there is no command 'viw'; did you mean view?"),
        (["help", "frobnicate"], "no option speaks of 'frobnicate'"),
        (["doctor", "--json", "--x"], "unrecognized arguments: --x"),
        (["train", "--help", "frobnicate"], "no option speaks of 'frobnicate'"),
        (["eval", "."], "options are key=value, such as checkpoint=."),
        (["eval", "checkpoint=away"], "there is no folder"),
        (["eval", "checkpoint=."], ".hydra/config.yaml"),
        (["sft", "sft.steps=0"], "sft.steps"),
        (["train", "task=jsonl", "task.path=."], "no such file or folder of .jsonl files"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], said: str, run: Run, place: Path) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({"a": ""}, "task.path=a", "a holds no rows; fill it, or name another file"),
        ({"a": '{"prompt": "1", "answer": "1"}\n'}, "task.path=a", "all 1 rows fall to the other split"),
        ({"a": '{"prompt": "1", "id": "x"}\n' * 30}, "task.path=a", "line 2 and 28 more: the id 'x' is that of"),
        ({"a": '{"prompt": "1", "id": "x"}\n' * 30}, "task.path=a", "go by ids: change it; or set task.val_files"),
        ({"a": '{"prompt": "1"}\n{"prompt":\n'}, "task.path=a", "split; 1 of the 2 rows that were checked cannot"),
        ({"a": '{"prompt":\n'}, "task.path=a", "line 1: not valid JSON"),
        ({"a": "[1]\n" * 30}, "task.path=a", "a"),
        ({"a": '{"question": "1", "answer": "1"}\n' * 30}, "task.path=a", "task.columns.prompt"),
        ({"a": '{"prompt": "1", "answer": "1"}\n' * 30, "b": ""}, "task.path=a task.val_files=[b]", "b holds no rows"),
        (
            {"a": '{"prompt": "1", "answer": "1"}\n' * 30},
            "task.path=a task.val_files=[c]",
            "no such file or folder of .jsonl files: 'c'",
        ),
        ({"a": ""}, "task.path=a hydra.run.dir=a", "a"),
        ({"config.json": "{"}, "task=calculator model.name=.", "model.name=. cannot be loaded"),
        ({"a.yaml": "a: [1"}, "recipe=a.yaml", "a.yaml cannot be read"),
        ({"a.yaml": "a: [{content: #### 1}]"}, "recipe=a.yaml", 'begins a comment: quote it, as content: "#### 12"'),
    ],
)
def test_a_bad_file_is_told_in_a_line(files: dict[str, str], words: str, said: str, run: Run, place: Path) -> None:
    for name, text in files.items():
        (place / name).write_text(text)
    jsonl = [] if "recipe=" in words else ["recipe=jsonl", "model.name=tiny"]
    code, out, err = run("train", *jsonl, *words.split())
    assert (code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1, err
    assert sorted(path.name for path in place.iterdir()) == sorted(files)


def is_number(hint: Any) -> bool:
    """Whether a setting of this type is one number, perhaps none."""
    return hint is float or get_args(hint) == (float, type(None))


NUMBERS = [key for key, setting in options.schema(compose([]).choices).items() if is_number(setting.type)]


@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_nan_infinite_or_absurd(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(key)}=.* is no usable number"):
        composed(f"{key}={['nan', 'inf', '-inf', '1e30'][len(key) % 4]}")


# --- what is printed


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(words: list[str]) -> None:
        raise BrokenPipeError("of a server")

    monkeypatch.setattr(cli, "run_command", breaks)
    with pytest.raises(BrokenPipeError, match="of a server"):
        cli.main(["train"])


def test_the_general_help_needs_no_torch() -> None:
    code = (
        "import sys, mtgrpo.cli\n"
        "try: mtgrpo.cli.main(['--help'])\n"
        "finally: assert not {'torch', 'hydra'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert all(name in process.stdout for name in (*cli.COMMANDS, "--dry-run", "--multirun", "--cfg", "--version"))


def test_help_is_a_command_too(run: Run) -> None:
    assert run("help") == run("--help") == (0, cli.USAGE + "\n", "")
    assert run("help", "reward") == run("train", "--help", "reward") != run("--help")
    assert run("help", "train", "curriculum") == run("train", "--help", "curriculum") == run("--help", "curriculum")
    said = "no option speaks of 'curiculum'; did you mean curriculum? `mtgrpo train --help` lists all"
    assert said in run("train", "--help", "curiculum")[2]


def test_what_is_to_be_typed_is_said_as_the_command_was_called(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "mtgrpo"
    called.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(called)])
    assert f"; {called} data --help lists what there is" in run("data", "qqq")[2]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "; mtgrpo data --help lists what there is" in run("data", "qqq")[2]


def test_version(run: Run) -> None:
    assert run("--version") == (0, "mtgrpo 0.1.0\n", "")


def test_help_lists_every_setting_with_type_value_and_comment(run: Run, own: str) -> None:
    code, out, err = run("train", "--help", "recipe=gsm8k", f"reward={own}:Half", "seed=4")
    assert (code, err) == (0, "")
    made = composed("recipe=gsm8k", f"reward={own}:Half")
    assert [key for key in options.schema(made.choices) if f"  {key}  " not in out] == []
    assert "  rollout.group_size  int = 8                 siblings per task\n" in out
    assert "  kl.estimator  k1|k2|k3 = k3 " in out
    assert "  reward.target  float = 0.5                  what everything is worth\n" in out
    assert f"{'  seed  int = 4':<46}of everything random" in out
    assert "* task=gsm8k " in out and "  task=calculator " in out
    assert "* recipe=gsm8k " in out and "* reward=own.py:Half " in out
    assert max(map(len, out.splitlines())) <= 100
    assert "  recipe=gsm8k " in run("train", "--help", "recipe=gsm8k_tiny")[1]
    assert max(map(len, cli.USAGE.splitlines())) <= 100
    assert run("eval", "--help", "checkpoint=x", "hydra.run.dir=y")[0] == 0
    code, out, _ = run("train", "--help", "reward=[numeric,em]")
    assert code == 0 and "  reward.em.weight  float" in out
    assert "recipe=gsm8k " in out and "recipe=clip_higher" not in out and "recipe=from_scratch" not in out


def test_comments_stand_behind_above_or_below_a_field(place: Path) -> None:
    place.joinpath("noted.py").write_text(
        "class Noted:\n    a: str = '#'  # behind # it\n    # above,\n    # in two lines\n    b: int = 1\n"
        '    c: int = 2\n    """below"""\n    d: int = (\n        3\n    )  # é\n    e: int = 4\n'
    )
    noted = extension.load_file(place / "noted.py").Noted
    assert comments(noted) == {"a": "behind # it", "b": "above, in two lines", "c": "below", "d": "é", "e": ""}


def test_a_dry_run_begins_with_its_verdict_and_writes_nothing(run: Run, place: Path, no_model: None) -> None:
    code, out, err = run("train", "--dry-run", "seed=3", "kl.estimator=k1")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("task=calculator environment=tool_use")
    assert out.splitlines()[0] == (
        "no fault found, and nothing was run; a run would be steps of 32 tasks x 8 conversations up to "
        "trainer.steps=25; before and after them at most 100 held-out tasks x 8 conversations, and a greedy one each"
    )
    values = yaml.safe_load(run("train", "--cfg", "job", "seed=3", "kl.estimator=k1")[1])
    assert (values["seed"], values["kl"]["estimator"], values["environment"]["tools"]) == (3, "k1", ["calculator"])
    assert list(place.iterdir()) == []


def test_a_dry_run_of_several_prints_each(run: Run, place: Path, no_model: None) -> None:
    code, out, _ = run("train", "--dry-run", "-m", "seed=3,4", "kl.coef=range(0,2)", "trainer.steps=5")
    assert code == 0
    titles = [line for line in out.splitlines() if line.startswith("# run ")]
    varied = ["seed=3 kl.coef=0", "seed=3 kl.coef=1", "seed=4 kl.coef=0", "seed=4 kl.coef=1"]
    assert titles == [f"# run {number}: {words} trainer.steps=5" for number, words in enumerate(varied)]
    assert list(place.iterdir()) == []


def test_a_template_without_tools_is_refused_before_a_model_is_loaded(run: Run, place: Path, no_model: None) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (place / "plain.jinja").write_text(turns + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    words = ["train", "--dry-run", "chat.template=plain.jinja"]
    assert run(*words)[0] == 0, "tools are described in the prompt"
    code, _, err = run(*words, "chat.tools=template")
    assert code == 2
    assert "no place for tools; use chat.tools=prompt" in err
    bare = [*words, "chat.tools=template", "environment=single_turn", "sft.steps=0"]
    assert run(*bare)[0] == 0, "there are no tools"
    code, _, err = run(*bare, "condenser=keep_last", "condenser.when=on_request")
    assert code == 2
    assert "no place for tools" in err


# --- what is started


def test_parts_of_ones_own_make_a_run(run: Run, place: Path, own: str) -> None:
    parts = [f"task={own}:Sums", f"reward={own}:Half", f"algorithm={own}:Reinforce", "task.largest=5"]
    words = [
        *SMALL,
        *parts,
        "reward.target=0.75",
        "algorithm.truncated=keep",
        f"environment.tools=[calculator,'{own}:increment']",
    ]
    code, _, err = run("train", *words)
    assert code == 0, err
    (folder,) = place.glob("outputs/*-*-*/*-*-*")
    module = extension.load_file(Path(own))
    assert [0.75] * 4 in module.seen  # of the two groups
    assert [0.0, 1.0] in module.seen  # it was tried out before
    played = [json.loads(line) for line in (folder / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    assert {(line["task"], line["reward"]) for line in played} >= {("train/0", 0.75), ("train/1", 0.75)}
    assert played[0]["messages"][0]["content"] == "What is 0 + 1?"

    record = folder / ".hydra"
    assert yaml.safe_load((record / "overrides.yaml").read_text()) == words
    assert yaml.safe_load((record / "config.yaml").read_text())["reward"] == {
        "success_at": 1.0,
        "retries": 1,
        "target": 0.75,
    }
    choices = yaml.safe_load((record / "hydra.yaml").read_text())["hydra"]["runtime"]["choices"]
    assert choices["algorithm"] == f"{own}:Reinforce"

    checkpoint = max((folder / "checkpoints").glob("step_*"))
    code, _, err = run(
        "eval", f"checkpoint={checkpoint}", "trust_code=true", "reward.target=0.25", "hydra.run.dir=measured"
    )
    assert code == 0, err
    summary = json.loads((place / "measured" / "summary.json").read_text())
    assert summary["eval/reward"] == 0.25
    again = read_run(place / "measured", trusted=True).values
    assert (again["task"]["largest"], again["reward"]["target"], again["eval"]["tasks"]) == (5, 0.25, 2)


def test_the_tools_of_ones_own_are_given_to_the_environment(own: str) -> None:
    made = experiment(f"environment.tools=['{own}:increment']")
    opening = asyncio.run(made.environment.start(Task("1", (Message("user", "1 + 1?"),))))
    assert [(tool.name, tool.description) for tool in opening.tools] == [("increment", "Add one.")]


def test_the_checkpoint_s_run_is_the_recipe_of_its_evaluation(place: Path, own: str) -> None:
    first = composed("recipe=gsm8k", "seed=3", f"reward={own}:Half", "rollout.group_size=4")
    record = place / ".hydra"
    record.mkdir()
    (record / "config.yaml").write_text(first.values)
    (record / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": first.choices}}}))
    again = compose(parse(["trust_code=true"]), run=place)
    assert (again.values, again.choices) == (first.values, first.choices)
    other = compose(parse(["task=calculator", "seed=4", "trust_code=true"]), run=place)
    assert other.experiment.task == Calculator()
    assert (other.experiment.seed, other.experiment.rollout.group_size) == (4, 4)


def test_the_warm_start_alone(run: Run, place: Path) -> None:
    code, _, err = run("sft", *SMALL, "hydra.run.dir='a place'")
    assert code == 0, err
    assert (place / "a place" / "summary.json").is_file()
    assert len(list((place / "a place" / "checkpoints").iterdir())) == 1


def test_a_run_needs_an_empty_folder(run: Run, place: Path, no_model: None) -> None:
    place.joinpath("taken").mkdir()
    place.joinpath("taken", "file").touch()
    for words in (["hydra.run.dir=taken"], ["hydra.sweep.dir=taken", "-m"], ["hydra.run.dir=taken/file/below"]):
        code, _, err = run("train", *words)
        assert code == 2
        assert "taken" in err and len(err.splitlines()) == 1
    assert [path.name for path in place.rglob("*")] == ["taken", "file"]


def test_runs_of_one_second_have_folders_of_their_own(place: Path) -> None:
    wanted = place / "outputs" / "2026-11-22" / "10-00-00"
    with ExitStack() as stack:
        folders = [stack.enter_context(claimed(wanted, chosen=False)) for _ in range(3)]
    assert [folder.name for folder in folders] == ["10-00-00", "10-00-00-1", "10-00-00-2"]
    assert all(folder.is_dir() for folder in folders)


def test_a_run_that_is_refused_leaves_no_folder(place: Path) -> None:
    (place / "there").mkdir()
    for folder in ("there", "outputs/today/now"):
        with pytest.raises(ConfigError, match="no such model"), claimed(place / folder, chosen=True):
            (place / folder / ".hydra").mkdir()
            (place / folder / ".hydra" / "config.yaml").write_text("seed: 1\n")
            (place / folder / "metrics.jsonl").touch()
            raise ConfigError("no such model")
    assert list(place.iterdir()) == []
    with pytest.raises(ConfigError, match="see the log"), claimed(place / "there", chosen=True):
        (place / "there" / "mcp_time.log").write_text("what it said last\n")
        raise ConfigError("it does not start; see the log")
    assert (place / "there" / "mcp_time.log").is_file()


def test_a_run_that_is_refused_in_a_linked_folder_leaves_the_link(place: Path) -> None:
    (place / "disk").mkdir()
    (place / "there").symlink_to("disk")
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such model"), claimed(place / "there", chosen=True):
            (place / "there" / ".hydra").mkdir()
            (place / "there" / ".hydra" / "config.yaml").write_text("seed: 1\n")
            raise ConfigError("no such model")
        assert (place / "there").is_symlink() and list((place / "disk").iterdir()) == []


WRITTEN = [".lock", ".hydra/config.yaml", "metrics.jsonl", "notes.txt", "summary.json", "ranks/rank_0.log"]
WRITTEN += ["journal", "journal/step_000001.jsonl.gz", "trajectories/step_000001.jsonl", "tokens/step_000001.npz"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_does_not_go_on_through_links_to_what_is_outside(name: str, place: Path) -> None:
    for folder in (".hydra", "checkpoints", *{str(Path(one).parent) for one in WRITTEN}):
        (place / "run" / folder).mkdir(parents=True, exist_ok=True)
    (place / "run" / "checkpoints" / "step_000001").symlink_to(place)  # is read alone
    (place / "run" / "told.txt").write_text("told\n")
    (place / "run" / "also.txt").symlink_to("told.txt")
    with claimed(place / "run", chosen=True, resumed=True):
        pass
    link, mine = place / "run" / name, place / "mine"
    mine.write_text("mine\n")
    for target in (mine, place / "new"):  # or one that would be made
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        refused = pytest.raises(ConfigError, match=f"{link} is a link to {target}, outside of the run; .*: cp -rL ")
        with refused, claimed(place / "run", chosen=True, resumed=True):
            pass
    assert mine.read_text() == "mine\n" and not (place / "new").exists()


def test_two_processes_never_share_a_folder(place: Path) -> None:
    taken = pytest.raises(ConfigError, match=r"another process runs in .*run")
    with (
        claimed(place / "run", chosen=True),
        taken,
        claimed(place / "run", chosen=True, resumed=True),
    ):
        pass
    with claimed(place / "run", chosen=True):  # nothing but the lock is left
        pass


def test_the_same_command_goes_on_in_its_folder(run: Run, place: Path) -> None:
    words = [*SMALL, "trainer.steps=1", "hydra.run.dir=there", "log=[jsonl]", "resume=true"]
    for _ in range(2):
        assert run("train", *words)[0] == 0
    of_two = "with other settings than before: trainer.steps=2 (was 1)"
    unread = "; its checksums were not looked at"
    for more, told in ([], f": no step is left{unread}\n"), (["trainer.steps=2"], f"{unread}\n{of_two}\n"):
        out = run("train", *words, *more, "--dry-run")[1]
        assert f"\nit would go on from there/checkpoints/step_000001, after step 1{told}the first of its tasks" in out
        assert "demonstrations" not in out  # the warm start is done
    assert run("train", *words, "trainer.steps=2")[0] == 0
    said = (place / "there" / "notes.txt").read_text()
    assert said.count("begins at the start") == 1 and said.count("there/checkpoints/step_000001\n") == 2
    assert of_two in said
    steps = [json.loads(line) for line in (place / "there" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["stage"] == "reinforcement learning"] == [1, 2]
    code, _, err = run("train", *SMALL, "resume=true")
    assert (code, err) == (
        2,
        "mtgrpo: resume=true goes on in the folder of a run: add hydra.run.dir=FOLDER (or hydra.sweep.dir)\n",
    )
    code, _, err = run("train", *SMALL, "resume=there/checkpoints", "hydra.run.dir=another")
    assert code == 2 and "its newest is there/checkpoints/step_000002" in err
    assert run("eval", "checkpoint=there/checkpoints", "--dry-run")[0] == 0
    code, _, err = run("sft", *words, "--dry-run")
    assert (code, err) == (
        2,
        "mtgrpo: there is the folder of a run that trains: this needs another, as hydra.run.dir=PATH\n",
    )
    (place / "there" / "checkpoints" / "step_000002" / "model.safetensors").write_bytes(b"")
    out = run("train", *words, "--dry-run")[1]
    assert f"there/checkpoints/step_000001, after step 1: no step is left{unread}, step_000002 is damaged\n" in out


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (ConfigError("no such thing"), 2)])
def test_how_a_run_ends_is_in_the_exit_code(
    raised: BaseException, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", stop)
    left, _, err = run("train")
    assert left == code
    assert "Traceback" not in err


def test_a_defect_is_shown_with_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", stop)
    with pytest.raises(ZeroDivisionError):  # Python prints it and leaves with 1
        cli.main(["train"])


def test_a_full_disk_is_told_in_a_line(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/metrics.jsonl")

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", stop)
    code, _, err = run("train", "hydra.run.dir=run")
    assert code == 1
    told = "mtgrpo: the disk is full: cannot write run/metrics.jsonl; make room, then go on with hydra.run.dir="
    assert err.splitlines() == [f"{told}{place}/run resume=true"]


@pytest.mark.parametrize("asked", ["SIGTERM", "SIGINT"])
def test_a_sweep_that_is_ended_leaves_its_run_the_time_to_close(
    asked: str, run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal sends Ctrl-C to both; SIGTERM comes to the sweep alone."""
    process = place / "process"
    process.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        "def close(*_):\n    time.sleep(0.5)\n    open('closed', 'a').write('x')\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, close)\nsignal.signal(signal.SIGINT, close)\n"
        f"os.kill(os.getppid(), signal.{asked})\n"
        f"'{asked}' == 'SIGINT' and os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))
    code, out, _ = run("train", "seed=1,2", "-m")
    assert code == 130
    assert re.search(r"\nthe sweep goes on by its own command with resume=true hydra\.sweep\.dir=multirun/\S+\n$", out)
    assert (place / "closed").read_text() == "x"


def test_several_runs_are_processes_whose_failures_count(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place / "process"
    process.write_text(
        f"#!{sys.executable}\nimport sys\nopen('calls', 'a').write(repr(sys.argv[1:]) + '\\n')\n"
        "if 'seed=2' in sys.argv:\n    print('first\\nmtgrpo: no \\x1b[31mluck', file=sys.stderr)\n    sys.exit(3)\n"
    )
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))
    code, out, err = run("train", "seed=1,2,3", "kl.coef=0.5", "-m", 'hydra.sweep.dir="the user\'s sweep"')
    assert code == 1
    calls = [ast.literal_eval(line) for line in (place / "calls").read_text().splitlines()]
    common = ["kl.coef=0.5", "hydra.mode=RUN"]  # a configuration of the user's own may say MULTIRUN
    assert calls == [
        [*("-P", "-m", "mtgrpo", "train"), f"seed={n + 1}", *common, rf"hydra.run.dir='the user\'s sweep/{n}'"]
        for n in range(3)
    ]
    log = place / "the user's sweep" / "1" / "failed.log"
    failure = f"run 1 (seed=2) failed with exit code 3: mtgrpo: no \\x1b[31mluck ({log.relative_to(place)})"
    assert log.read_text() == "first\nmtgrpo: no \x1b[31mluck\n" and "first\n" in err
    quoted = f"{program()} report " + shlex.quote("the user's sweep")
    assert out.splitlines()[-2:] == [f"2 of 3 runs done, in the user's sweep ({quoted})", failure]
    code, out, _ = run("train", "seed=1,3", "-m")
    assert code == 0
    assert re.search(r"2 of 2 runs done, in (multirun/[-\d]+/[-\d]+) \(.* report \1\)$", out.strip())


@pytest.mark.real
def test_a_sweep_that_goes_on_runs_what_is_missing(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = place / "process"
    process.write_text(
        f"#!{sys.executable}\nimport os, sys\nfrom mtgrpo import cli\nfrom mtgrpo.commands import experiments\n"
        "from mtgrpo.record.writing import write_summary\n"
        "async def learn(made, folder):\n"
        "    open('calls', 'a').write(f'{made.seed} {made.trainer.steps}\\n')\n"
        "    if made.seed == 2 and not os.path.exists('mended'):\n        raise SystemExit(1)\n"
        "    write_summary(folder, {'eval/reward/after': 0.5})\n"
        "experiments._stage = lambda command: learn\ncli.main(sys.argv[4:])\n"
    )
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))

    def runs(*more: str) -> list[str]:
        (place / "calls").write_text("")
        run("train", "seed=1,2", "-m", "hydra.sweep.dir=all", *more)
        return (place / "calls").read_text().splitlines()

    assert runs() == ["1 25", "2 25"]
    (place / "mended").touch()
    assert runs("resume=true") == ["2 25"]
    assert runs("resume=true") == []
    assert runs("resume=true", "trainer.steps=30") == ["1 30", "2 30"], "they have other settings now"
    code, _, err = run("train", "seed=2,3", "-m", "hydra.sweep.dir=all", "resume=true")
    assert code == 2 and err.endswith(
        "mtgrpo: all/0 has seed=1, not 2: a sweep goes on by the same command and resume=true\n"
    )
    sweep = ("train", "hydra.sweep.dir=rewards", "trainer.steps=7", "-m")
    for expected in (["0 7", "0 7"], []):
        (place / "calls").write_text("")
        run(*sweep, "reward=em,f1", "resume=true")
        assert (place / "calls").read_text().splitlines() == expected
    code, _, err = run(*sweep, "reward=f1,em", "resume=true")
    assert code == 2 and "mtgrpo: rewards/0 has reward=em, not f1: a sweep" in err


@pytest.mark.real
def test_several_real_runs(place: Path, own: str) -> None:
    words = [*SMALL, f"reward={own}:Fails,{own}:Half", "--multirun"]
    command = [sys.executable, "-m", "mtgrpo", "train", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "OSError: the grader is away" in process.stderr
    assert "run 0 (reward=" in process.stdout
    (sweep,) = place.glob("multirun/*/*")
    assert not (sweep / "0" / "summary.json").exists()
    assert json.loads((sweep / "1" / "summary.json").read_text())["eval/reward/after"] == 0.5


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "mtgrpo", "trian"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "mtgrpo: there is no command 'trian'; did you mean train?\n"


SHOP = '''
from dataclasses import dataclass
from mtgrpo.rewards import Reward
from mtgrpo.tasks.calculator import Calculator
@dataclass
class Shop(Calculator):
    """Sums of a shop."""
    largest_sale: int = 3
@dataclass
class Short(Reward):
    """1 for everything."""
    def reward(self, trajectory):
        return 1.0
'''


@pytest.mark.usefixtures("place")
def test_a_recipe_names_options_as_the_command_line_does(run: Run) -> None:
    Path("shop.py").write_text(SHOP)
    Path("mine.yaml").write_text("task: shop.py:Shop\nreward: [numeric, shop.py:Short]\nseed: 3\n")
    words = ("train", "recipe=mine.yaml", "task.largest_sale=4", "reward.Short.weight=0.5")
    assert run(*words, "--dry-run")[0] == 0
    code, out, err = run(*words, "--cfg", "job")
    assert code == 0, err
    assert "largest_sale: 4" in out and "seed: 3" in out and "weight: 0.5" in out
    Path("mine.yaml").write_text("defaults: [jsonl]\ntask: shop.py\n")
    assert "names a file; name the class in it too" in run("train", "recipe=mine.yaml", "--dry-run")[2]
