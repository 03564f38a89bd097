"""What users of Hydra know and type: its flags, folders, records, plus and tilde, sweeps, plugins, completion."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Run
from hydra_plugins.mtgrpo_launcher import _show  # pyright: ignore[reportPrivateUsage]
from mtgrpo import cli
from mtgrpo.commands.launch import WHAT
from mtgrpo.config.compose import (
    ExperimentLoader,
    _first,  # pyright: ignore[reportPrivateUsage]
    compose,
    parse,
)
from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.options import elsewhere, options, schema, unknown
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.rewards.composed import Composed
from mtgrpo.tasks.gsm8k import Gsm8k

pytestmark = pytest.mark.usefixtures("place")
SMALL = [
    *("trainer.steps=1", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=4", "eval.tasks=2", "eval.samples=2", "log=[jsonl]"),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Experiment, Path]]:
    """Runs are noted in place of being run."""
    found: list[tuple[Experiment, Path]] = []

    async def note(experiment: Experiment, folder: Path) -> None:
        found.append((experiment, folder))

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", note)
    return found


@pytest.fixture
def folder(place: Path) -> Path:
    """A configuration folder of the user's own."""
    own = place / "conf"
    (own / "recipe").mkdir(parents=True)
    (own / "recipe" / "short.yaml").write_text("# @package _global_\ndefaults: [gsm8k]\ntrainer: {steps: 7}\n")
    (own / "task").mkdir()
    (own / "task" / "sums.yaml").write_text("defaults: [one_step]\noperators: '+'\nlargest: 20\n")
    (own / "mine.yaml").write_text(
        "defaults:\n  - base\n  - override /recipe: [short, lora]\n  - override hydra/job_logging: stdout\n  - _self_\n"
        "seed: 5\nhydra: {run: {dir: 'out/${seed}'}}\n"
    )
    return own


def experiment(*words: str) -> Experiment:
    return compose(parse(words)).experiment


# --- what is composed


def test_a_list_of_recipes_is_merged_from_left_to_right() -> None:
    made = experiment("recipe=[gsm8k,qwen3_1.7b,lora]")
    assert isinstance(made.task, Gsm8k)
    assert (made.model.name, made.model.lora.rank, made.optimizer.lr) == ("Qwen/Qwen3-1.7B", 32, 1e-5)
    assert experiment("recipe=[lora,gsm8k]").optimizer.lr == 1e-6


def test_a_later_recipe_takes_its_own_option_without_the_settings_of_the_earlier_one() -> None:
    made = experiment("recipe=[gsm8k,jsonl]")
    assert made.task == experiment("recipe=jsonl").task
    assert made.eval.tasks == 100
    kept = experiment("recipe=[gsm8k,lora]")
    assert kept.task == experiment("recipe=gsm8k").task
    assert experiment("recipe=[gsm8k,lora]", "task=jsonl").task == experiment("task=jsonl").task


@pytest.mark.parametrize(
    ("order", "steps"), [("[gsm8k]", 7), ("[gsm8k, _self_]", 7), ("[_self_, gsm8k]", 200), ("[gsm8k, lora]", 7)]
)
def test_a_recipe_inherits(order: str, steps: int, place: Path) -> None:
    place.joinpath("mine.yaml").write_text(f"defaults: {order}\ntrainer: {{steps: 7}}\n")
    made = experiment("recipe=mine.yaml")
    assert isinstance(made.task, Gsm8k)
    assert made.trainer.steps == steps


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("defaults: [gsm9k]", "mine.yaml; did you mean gsm8k?"),
        ("defaults: [other.yaml]", "recipe=mine.yaml inherits itself"),
        ("defaults: [away.yaml]", "there is no file"),
        ("defaults: [{recipe: gsm8k}]", "chooses 'recipe'"),
    ],
)
def test_a_wrong_inheritance_is_told(content: str, said: str, place: Path) -> None:
    place.joinpath("mine.yaml").write_text(content)
    place.joinpath("other.yaml").write_text("defaults: [mine.yaml]")
    with pytest.raises(ConfigError) as refused:
        experiment("recipe=mine.yaml")
    assert said in str(refused.value)


def test_plus_adds_and_tilde_takes_away() -> None:
    tools = "environment.tools={calculator: {max_digits: 3}}"
    made = experiment(tools, "+environment.tools.next_page={}", "++environment.tools.calculator.max_digits=5")
    assert isinstance(made.environment, ToolUse)
    assert made.environment.tools == {"calculator": {"max_digits": 5}, "next_page": {}}
    assert experiment("recipe=gsm8k", "+recipe=lora").model.lora.rank == 32
    assert experiment("recipe=gsm8k", "~optimizer.lr").optimizer == type(made.optimizer)(warmup_steps=10)
    assert experiment("+seed=3").seed == experiment("++seed=3").seed == 3
    assert experiment("~recipe").sft.steps == 0


def test_what_is_taken_away_is_said(run: Run) -> None:
    code, _, err = run("train", "recipe=calculator", "~sft.steps", "--dry-run")
    assert code == 0 and "~sft.steps: sft.steps has its default in place of 0, of recipe=calculator" in err


def test_a_recipe_is_a_configuration_too(run: Run) -> None:
    code, out, err = run("train", "--config-name", "guess_number_tiny", "--dry-run")
    assert code == 0, err
    assert out.startswith("no fault found") and "recipe=guess_number_tiny" in out and "task=guess_number " in out


def test_what_stands_to_the_right_wins() -> None:
    assert experiment("optimizer.lr=1e-3", "optimizer={lr: 2e-3}").optimizer.lr == 2e-3
    assert experiment("optimizer={lr: 2e-3}", "optimizer.lr=1e-3").optimizer.lr == 1e-3
    made = experiment("environment.tools.calculator.max_digits=5", "environment.tools=[calculator]").environment
    assert isinstance(made, ToolUse)
    assert made.tools == {"calculator": {"max_digits": 5}}


def test_every_name_of_another_library_is_answered() -> None:
    assert len(elsewhere()) >= 150
    known = schema(compose(parse([])).choices)
    for name, ours in elsewhere().items():
        for typed in (name, f"x.y.{name}"):
            assert unknown(typed, known) == f"unknown option {typed}; here it is {ours}"


def words_of(answer: str) -> list[str]:
    """The settings and options that it names, of which the first may be a bare word."""
    first, *others = (word.strip("',") for word in answer.split())
    return [first, *(word for word in others if re.match(r"[a-z_]+(\.\w+)*(=|$)", word) and re.search("[.=]", word))]


ANSWERS = sorted({ours for ours in elsewhere().values() if not ours.startswith("no option: ")})


@pytest.mark.parametrize("typed", sorted({tuple(w for w in words_of(answer) if "=" in w) for answer in ANSWERS}))
def test_what_answers_name_exists_and_composes(typed: tuple[str, ...], place: Path) -> None:
    (place / "path/to").mkdir(parents=True)
    (place / "path/to/file.py").write_text(
        "from mtgrpo.environments import Environment\nfrom mtgrpo.rewards import Reward\n"
        "class NAME(Environment):\n    async def start(self, task): pass\n    async def step(self, message): pass\n"
        "class Name(Reward):\n    def reward(self, trajectory): return 0.0\n"
    )
    known = schema(compose(parse(["model.name=Some/Model", *typed])).choices).keys()
    known |= {*groups(), "recipe", "hydra.run.dir", "log.wandb.project"}
    for answer in ANSWERS:
        words = words_of(answer)
        if tuple(word for word in words if "=" in word) == typed:
            assert {word.partition("=")[0] for word in words} <= known, answer


def test_names_of_others_are_answered_wherever_they_are_typed(run: Run) -> None:
    for typed, ours in (
        ("num_generations=4", "rollout.group_size"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "optimizer.lr"),
        ("env.dataset=ifeval", "task, by the name of the data set"),
        ("sft.learning_rate=1e-6", "sft.optimizer.lr"),
    ):
        with pytest.raises(ConfigError, match=f"here it is {re.escape(ours)}$"):
            experiment(typed)
    for typed in ("--micro_rollout_batch_size=4", "--micro-rollout-batch-size"):
        assert f"there is no {typed}; here it is batch.token_budget, in tokens; options are" in run("train", typed)[2]


def test_an_option_of_ours_is_never_taken_for_one_of_another_library() -> None:
    assert all(name not in options(group) for name in elsewhere() for group in groups())
    assert experiment("task=calculator", "task.max_steps=3").task == type(experiment().task)(
        max_steps=3, demonstrator=experiment().task.demonstrator
    )


# --- a list of options


def test_a_group_takes_a_list_whose_options_have_settings_of_their_own(place: Path) -> None:
    place.joinpath("mine.yaml").write_text(
        "defaults: [{override /reward: [numeric, em]}]\nreward: {numeric: {weight: 2}, success_at: 0.5}\n"
    )
    own = place / "own.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom mtgrpo.rewards import Reward\n@dataclass\nclass Half(Reward):\n"
        "    target: float = 0.5\n    def reward(self, trajectory): return self.target\n"
    )
    made = compose(parse(["recipe=mine.yaml", "reward.em.weight=0.2"]))
    of = {"numeric": {"weight": 2}, "em": {"weight": 0.2}}
    assert made.experiment.reward == Composed(success_at=0.5, of=of)
    assert made.choices["reward"] == ["numeric", "em"]
    mixed = experiment("reward=[numeric,own.py:Half]", "reward.Half.target=1", "reward.numeric.weight=0.25")
    assert mixed.reward == Composed(of={"numeric": {"weight": 0.25}, f"{own}:Half": {"target": 1}})
    for word, said in {
        "reward.numeric.wieght=1": "did you mean reward.numeric.weight?",
        "reward.tags.weight=1": "unknown option reward.tags.weight",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            experiment("reward=[numeric,em]", word)
    with pytest.raises(ConfigError, match="name each reward once"):
        experiment("reward=[numeric,numeric]")


# --- flags


def test_cfg_prints_what_hydra_composed(run: Run, place: Path) -> None:
    code, out, _ = run("train", "--cfg", "job", "seed=3")
    assert (code, yaml.safe_load(out)["seed"]) == (0, 3)
    code, out, _ = run("train", "--cfg", "job", "--package", "kl", "kl.coef=0.5")
    assert out.startswith("# @package kl\ncoef: 0.5\n")
    code, out, _ = run("train", "--cfg", "hydra", "--resolve")
    hydra = yaml.safe_load(out)["hydra"]
    assert hydra["job"]["name"] == "train"
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", hydra["run"]["dir"])
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "said"), [("defaults", "recipe/chosen"), ("searchpath", "config/recipes"), ("plugins", "ProcessLauncher")]
)
def test_info_says_what_hydra_does(what: str, said: str, run: Run) -> None:
    code, out, _ = run("train", "--info", what)
    assert code == 0
    assert said in out


def test_a_configuration_folder_of_ones_own(run: Run, folder: Path, started: list[tuple[Experiment, Path]]) -> None:
    assert (
        yaml.safe_load(run("train", "--cfg", "job", "--config-dir", "conf", "recipe=short")[1])["trainer"]["steps"] == 7
    )
    words = ["--config-dir", "conf", "--config-name", "mine", "model.name=tiny", "model.lora.rank=0"]
    code, _, err = run("train", *words, "task=calculator")
    assert code == 0, err
    ((made, place),) = started
    assert (made.seed, made.trainer.steps, made.model.lora.alpha) == (5, 7, 64)
    assert place == folder.parent / "out" / "5"
    hydra = yaml.safe_load((place / ".hydra" / "hydra.yaml").read_text())["hydra"]
    assert hydra["runtime"]["choices"]["recipe"] == ["short", "lora"]
    assert hydra["runtime"]["choices"]["hydra/job_logging"] == "stdout"
    task = yaml.safe_load(run("train", "--cfg", "job", "--config-dir", "conf", "task=sums", "task.largest=9")[1])[
        "task"
    ]
    assert (task["operators"], task["largest"]) == ("+", 9)
    assert "recipe=short\n" in run("train", "--help", "--config-dir", "conf")[1]
    code, _, err = run("train", *words, "recipe=gsm9k")
    assert "did you mean gsm8k?" in err


def test_both_folders_reach_the_runs_of_a_sweep(folder: Path, run: Run) -> None:
    other = folder.parent / "other"
    other.mkdir()
    flags = ExperimentLoader([other, folder]).flags
    code, out, err = run("train", "--cfg", "job", *flags, "recipe=short", "task=sums")
    assert code == 0, err
    assert flags == ["--config-dir", str(other), "--config-path", str(folder)]
    assert yaml.safe_load(out)["task"]["largest"] == 20
    assert run("train", "--cfg", "job", *ExperimentLoader([folder, other]).flags, "recipe=short")[0] == 0


def test_a_recipe_sets_more_of_an_option_of_ones_own(folder: Path) -> None:
    (folder / "algorithm").mkdir()
    (folder / "algorithm" / "mygrpo.yaml").write_text("defaults: [grpo]\nclip_high: 0.33\n")
    recipe = folder / "recipe" / "mine.yaml"
    recipe.write_text("defaults: [{override /algorithm: mygrpo}]\nalgorithm: {clip_high: 0.44, clip_low: 0.11}\n")

    def clips(*words: str) -> tuple[float, float]:
        made: Any = compose(parse(words), folders=[folder]).experiment.algorithm
        return made.clip_low, made.clip_high

    plain = clips()
    assert clips("recipe=mine") == clips("recipe=mine", "algorithm=mygrpo") == (0.11, 0.44)
    assert clips("algorithm=mygrpo") == (plain[0], 0.33)
    assert clips("recipe=mine", "algorithm.clip_high=0.5") == (0.11, 0.5)
    assert clips("recipe=mine", "algorithm=grpo") == clips("~recipe") == (0.2, 0.2)


def test_torchrun_starts_training_alone(run: Run, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("train")
    assert code == 2
    assert "WORLD_SIZE=2, but RANK is not set: start with torchrun" in err
    for rank, told in (("0", "WORLD_SIZE=2: eval takes one process; start it without torchrun"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        code, out, err = run("eval")
        assert (code, out) == (2 * bool(told), "") and told in err and bool(err) == bool(told)
    monkeypatch.delenv("RANK")
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        assert run("train", "--cfg", "job")[0] == 0


# --- the folder of a run and its record


def test_the_folder_may_be_named_after_options_and_the_time(run: Run, started: list[tuple[Experiment, Path]]) -> None:
    code, _, err = run("train", "hydra.run.dir='out/${now:%Y}/${seed}_${hydra.job.override_dirname}'", "seed=4")
    assert code == 0, err
    ((made, place),) = started
    assert made.seed == 4
    assert re.fullmatch(r".*/out/\d{4}/4_seed=4", str(place))
    record = place / ".hydra"
    assert yaml.safe_load((record / "overrides.yaml").read_text()) == ["seed=4"]
    assert yaml.safe_load((record / "config.yaml").read_text())["seed"] == 4
    hydra = yaml.safe_load((record / "hydra.yaml").read_text())["hydra"]
    assert hydra["runtime"]["choices"]["task"] == "calculator"
    assert hydra["runtime"]["output_dir"] == str(place)


def test_a_job_may_run_in_its_folder(
    run: Run, started: list[tuple[Experiment, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[Path] = []

    async def note(*_: object) -> None:
        where.append(Path.cwd())

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", note)
    assert run("train", "hydra.job.chdir=true", "hydra.run.dir=there")[0] == 0
    assert where[0].name == "there"


# --- several runs


def test_a_sweep_is_hydra_s_own(run: Run, place: Path, started: list[tuple[Experiment, Path]]) -> None:
    words = ["hydra/launcher=basic", "hydra.sweep.dir=all", "hydra.sweep.subdir='${hydra.job.num}_${seed}'"]
    code, _, err = run("train", "-m", "seed=3,4", "reward=numeric,em", *words)
    assert code == 0, err
    assert [(made.seed, type(made.reward).__name__, path.name) for made, path in started] == [
        (3, "Numeric", "0_3"),
        (3, "EM", "1_3"),
        (4, "Numeric", "2_4"),
        (4, "EM", "3_4"),
    ]
    assert yaml.safe_load((place / "all" / "multirun.yaml").read_text())["hydra"]["mode"] == "MULTIRUN"
    assert yaml.safe_load((place / "all" / "1_3" / ".hydra" / "overrides.yaml").read_text())[:2] == [
        "seed=3",
        "reward=em",
    ]


def test_a_sweep_goes_on_in_its_folder(run: Run, place: Path, started: list[tuple[Experiment, Path]]) -> None:
    words = ["train", "-m", "seed=3,4", "hydra/launcher=basic", "hydra.sweep.dir=all", "resume=true"]
    for _ in range(2):
        code, _, err = run(*words)
        assert code == 0, err
    assert [path.name for _, path in started] == ["0", "1"] * 2
    code, _, err = run(*words[:-1])
    assert (code, "is not empty" in err) == (2, True)


def test_settings_of_an_option_that_a_sweep_chooses(run: Run, started: list[tuple[Experiment, Path]]) -> None:
    code, _, err = run("train", "-m", "reward=numeric,em", "reward.success_at=0.5", "hydra/launcher=basic")
    assert code == 0, err
    assert [made.reward.success_at for made, _ in started] == [0.5, 0.5]
    code, _, err = run("train", "hydra.mode=MULTIRUN", "seed=range(1,3)", "hydra/launcher=basic")
    assert code == 0, err
    assert [made.seed for made, _ in started[2:]] == [1, 2]
    code, _, err = run("train", "-m", "algorithm=glob(*grpo)", "hydra/launcher=basic")
    assert code == 0, err
    assert [type(made.algorithm).__name__ for made, _ in started[4:]] == ["DrGRPO", "GRPO"]


def test_what_a_file_gives_the_sweeper_is_checked_too(run: Run, folder: Path) -> None:
    (folder / "many.yaml").write_text("hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}\n")
    words = ["--config-dir", "conf", "--config-name", "many", "--dry-run"]
    code, out, err = run("train", *words, "trainer.steps=3")
    assert code == 0, err
    assert re.findall("# run .*", out) == ["# run 0: seed=1 trainer.steps=3", "# run 1: seed=2 trainer.steps=3"]
    (folder / "many.yaml").write_text("hydra: {mode: MULTIRUN, sweeper: {params: {sft.optimizer.lr: '0.1,-1'}}}\n")
    code, _, err = run("train", *words)
    assert (code, "sft.optimizer.lr" in err) == (2, True)
    for word in ("hydra.sweeper.params={seed: '1,2'}", "+hydra.sweeper.params.seed='1,2'"):
        code, _, err = run("train", "-m", word, "--dry-run")
        assert (code, "here give the settings themselves, as seed=1,2" in err) == (2, True)


def test_a_pattern_of_names_is_told_where_it_cannot_be_used(run: Run) -> None:
    assert run("train", "--info", "defaults", "algorithm=glob(g*)")[0] == 0
    code, _, err = run("train", "algorithm=glob(g*)")
    assert (code, "add --multirun" in err) == (2, True)
    code, _, err = run("train", "-m", "algorithm=glob(zz*)")
    assert (code, "algorithm=glob(zz*) stands for no value at all" in err) == (2, True)
    with pytest.raises(ConfigError, match="ConfigLoader is not set"):
        _first(parse(["algorithm=glob(g*)"])[0])


def test_a_sweep_with_one_wrong_run_begins_none(run: Run, place: Path, started: list[tuple[Experiment, Path]]) -> None:
    code, _, err = run("train", "-m", "sft.optimizer.lr=0.1,-1", "hydra/launcher=basic")
    assert code == 2
    assert "sft.optimizer.lr" in err
    assert (started, list(place.iterdir())) == ([], [])


OPTUNA = ("-m", "hydra/sweeper=optuna", "hydra/launcher=basic", "optimizer.lr=tag(log,interval(1e-5,1e-1))")


def test_optuna_chooses_by_the_held_out_reward_of_the_runs_before(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[float, int, float]] = []

    async def learn(made: Experiment, folder: Path) -> None:
        chosen.append((made.optimizer.lr, made.rollout.group_size, made.kl.coef))
        reward = 1 - abs(math.log10(made.optimizer.lr) + 3) / 2 - made.kl.coef
        (folder / "summary.json").write_text(json.dumps({"eval/reward/after": reward} if len(chosen) != 2 else {}))

    monkeypatch.setattr("mtgrpo.stages.trainer.run_training", learn)
    words = [*OPTUNA, "rollout.group_size=interval(2,4)", "kl.coef=0,0.5", "seed=3", "hydra.sweeper.trials=6"]
    code, out, err = run("train", *words)
    assert code == 0, err
    assert len(chosen) == 6 and all(1e-5 <= lr <= 1e-1 and group in (2, 3, 4) for lr, group, _ in chosen)
    lr, group, coef = max(chosen[:1] + chosen[2:], key=lambda one: 1 - abs(math.log10(one[0]) + 3) / 2 - one[2])
    said = rf"best of 5 trials: run {chosen.index((lr, group, coef))}, held-out reward \S+, with "
    settings = f"optimizer.lr={lr} rollout.group_size={group} kl.coef={coef:g}"
    assert re.fullmatch(said + re.escape(settings), out.splitlines()[-1]), out
    before = chosen[:2]
    chosen.clear()
    assert run("train", *words[:-1], "hydra.sweeper.trials=2")[0] == 0
    assert chosen == before  # the same command makes the same choices


RESUMABLE = """#!{python}
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(words["hydra.run.dir"].strip("'"))
(folder / ".hydra").mkdir(parents=True, exist_ok=True)
(folder / ".hydra/config.yaml").write_text(json.dumps({{"optimizer": {{"lr": float(words["optimizer.lr"])}}}}))
if not (folder / "summary.json").exists():
    (folder / "summary.json").write_text(json.dumps({{"eval/reward/after": float(words["optimizer.lr"])}}))
"""


def test_a_search_that_goes_on_with_other_choices_begins_these_trials_anew(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place / "process"
    process.write_text(RESUMABLE.format(python=sys.executable))
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))

    def results() -> dict[str, tuple[float, float]]:
        kept = {path.parent: json.loads(path.read_text()) for path in (place / "all").glob("*/summary.json")}
        lr = {path: yaml.safe_load((path / ".hydra/config.yaml").read_text())["optimizer"]["lr"] for path in kept}
        return {path.name: (lr[path], summary["eval/reward/after"]) for path, summary in kept.items()}

    words = [word for word in OPTUNA if "launcher" not in word]
    words += ["hydra.sweep.dir=all", "hydra.sweeper.trials=2"]
    assert run("train", *words)[0] == 0
    first = results()
    for others in (True, False):  # the second time the same choices are made
        code, out, err = run("train", *words, "hydra.sweeper.seed=1", "resume=true")
        assert code == 0, err
        found = results()
        assert {f"{name}.before-1": kept for name, kept in first.items()}.items() <= found.items()
        assert len(found) == 4 and all(lr == reward for lr, reward in found.values()), "an old result under new values"
        assert ("it begins anew" in out) == others
    out = run("train", *words, "resume=true")[1]
    assert f"all/0 has optimizer.lr={found['0'][0]}, not {first['0'][0]}: it begins anew" in out
    assert results()["0.before-2"] == found["0"] and results()["0"] == first["0"]


def test_a_search_is_described_and_its_ends_are_checked(run: Run, started: list[tuple[Experiment, Path]]) -> None:
    code, out, err = run("train", *OPTUNA, "rollout.group_size=2,4", "trainer.steps=3", "--dry-run")
    assert code == 0, err
    assert out.startswith(
        "# 20 trials: optimizer.lr from 1e-05 to 0.1, on a log scale; rollout.group_size one of 2, 4; one of them:\n"
    )
    code, _, err = run("train", *OPTUNA, "rollout.group_size=2,-4")
    assert (code, "rollout.group_size must be" in err, started) == (2, True, [])
    code, _, err = run("train", *OPTUNA, "hydra.sweeper.trials=2")  # none of them has a result
    assert (code, "none of 2 trials has come to its end" in err, len(started)) == (1, True, 2)


@pytest.mark.parametrize("gone", [BrokenPipeError, ValueError])
def test_what_a_run_says_is_read_where_nobody_hears_it(gone: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _: str) -> None:
            raise gone

    monkeypatch.setattr(sys, "stderr", Gone())
    said: deque[bytes] = deque()
    _show([b"first\n", b"second\n"], said)
    assert list(said) == [b"first\n", b"second\n"]


@pytest.mark.real
def test_a_sweep_s_runs_return_what_a_sweeper_optimises(place: Path) -> None:
    words = ["-m", "seed=1", *SMALL, "hydra.sweep.dir=all"]
    done = subprocess.run(
        [sys.executable, "-m", "mtgrpo", "train", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    from mtgrpo.record.reading import held_out_reward  # noqa: PLC0415

    expected = json.loads((place / "all" / "0" / "summary.json").read_text())["eval/reward/after"]
    assert held_out_reward(place / "all" / "0") == expected


# --- the shell


def completed(line: str, shell: str = "bash") -> list[str]:
    """What the shell offers at the end of `line`."""
    environment = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    command = [sys.executable, "-m", "mtgrpo", "-sc", f"query={shell}"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, ""), process.stderr
    return process.stdout.split("\n")[:-1] if shell == "fish" else process.stdout.split()


def test_the_shell_completes_commands_options_and_settings(run: Run) -> None:
    assert completed("mtgrpo ") == list(cli.COMMANDS)
    assert {"algorithm=", "recipe=", "trainer."} <= set(completed("mtgrpo train "))
    assert {"recipe=gsm8k", "recipe=lora"} <= set(completed("mtgrpo train recipe=g")) | set(
        completed("mtgrpo train recipe=l")
    )
    assert "algorithm=grpo" in completed("mtgrpo train algorithm=g")
    assert "trainer.steps=" in completed("mtgrpo train recipe=gsm8k trainer.st")
    assert completed("mtgrpo train sede=1 tr") == []
    assert completed("mtgrpo show ru") == [], "the shell offers files"
    assert completed("mtgrpo launch s") == list(WHAT)
    assert "recipe=gsm8k" in completed("mtgrpo launch docker seed=1 recipe=gs")


def test_fish_has_a_line_for_each_word_that_it_offers() -> None:
    assert completed("mtgrpo sh", "fish") == list(cli.COMMANDS)
    assert "recipe=gsm8k" in completed("mtgrpo train recipe=g", "fish")


@pytest.mark.parametrize(("shell", "function"), [("bash", "bash"), ("zsh", "bash"), ("fish", "fish")])
def test_a_shell_is_told_how_to_ask(shell: str, function: str, run: Run) -> None:
    code, out, _ = run("--shell-completion", f"install={shell}")
    assert code == 0 and f"hydra_{function}_completion" in out


def test_bash_completes_at_the_prompt(place: Path) -> None:
    """The function that bash is given, called as it calls it for a word that is half typed."""
    program = place / "mtgrpo"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtgrpo "$@"\n')
    program.chmod(0o755)
    typed = f"{program} launch docker recipe=gsm8k_"
    asked = f"""
source <({program} -sc install=bash)
COMP_LINE={shlex.quote(typed)} COMP_CWORD=3
hydra_bash_completion
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("recipe=gsm8k_tiny\n", "")


# --- what is imported


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["--help"], {"hydra", "torch", "transformers"}),
        (["train", "rollout.grup_size=2"], {"torch", "transformers", "peft", "huggingface_hub"}),
        (["train", "sft.optimizer.lr=-1"], {"torch", "transformers", "peft", "huggingface_hub"}),
        (["train", "--help"], {"torch", "transformers", "peft", "huggingface_hub"}),
        (["train", "--cfg", "job"], {"torch", "transformers", "peft", "huggingface_hub"}),
    ],
)
def test_an_answer_that_needs_no_model_imports_no_library_of_models(words: list[str], without: set[str]) -> None:
    code = (
        f"import sys, mtgrpo.cli\ntry: mtgrpo.cli.main({words})\n"
        f"finally: assert not {without} & set(sys.modules), {without} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode in (0, 2)
    assert "Error" not in process.stderr


@pytest.mark.parametrize("value", ["läufe/b", "läufe/b c", "~/läufe", "läufe/x=1", "Où es-tu ?", "日本"])
def test_letters_beyond_ascii_need_no_quotes(value: str) -> None:
    (typed,), (by_hand,) = parse([f"hydra.run.dir={value}"]), parse([f"hydra.run.dir='{value}'"])
    assert typed.value() == value and typed.input_line == by_hand.input_line


def test_a_model_from_scratch_wants_its_own_learning_rate(place: Path) -> None:
    said = "model.name=tiny starts from scratch, and {}.lr=1e-06 hardly moves it"
    for content, steps, names in (
        ("task: calculator", 200, ["sft.optimizer", "optimizer"]),
        ("task: calculator\nsft: {optimizer: {lr: 3e-3}}", 200, ["optimizer"]),
        ("task: calculator", 0, ["optimizer"]),
        ("defaults: [from_scratch]\nmodel: {name: tiny-2m}", 200, []),
        ("defaults: [from_scratch]", 200, []),
        ("model: {name: other/model}", 200, []),
    ):
        Path("own.yaml").write_text(content)
        notes = compose(parse(["recipe=own.yaml", f"sft.steps={steps}"])).experiment.notes
        told = [note for note in notes if "starts from scratch" in note]
        assert len(told) == len(names), content
        assert all(note.startswith(said.format(name)) for note, name in zip(told, names, strict=True))
