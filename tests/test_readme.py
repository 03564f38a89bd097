"""Every code block of the README: commands run with --dry-run, files as they stand."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import Run
from mtgrpo import cli
from mtgrpo.config.options import options, schema
from mtgrpo.log import Sink
from mtgrpo.parts import extension
from mtgrpo.parts.extension import load_file

README = (Path(__file__).parents[1] / "README.md").read_text()
OPTIONS = Path(__file__).parents[1] / "docs" / "options.txt"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def commands() -> list[str]:
    lines = [line.partition("#")[0] for block in blocks("console") for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split(";") if part.strip().startswith("mtgrpo")]


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> Path:
    """A folder with the README's own files, and a finished run at the path the README names."""
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    monkeypatch.chdir(tmp_path)
    for name in ("problems.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(blocks("json")))
    for name, block in zip(("tools.py", "short.py", "my_agent.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(block)
    (path,) = set(re.findall(r"checkpoint=(\S+)/checkpoints/step_000070", README))
    words = ["sft.steps=1", "trainer.steps=1", "rollout.prompts_per_step=1", "eval.tasks=1", "eval.samples=1"]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", *words, f"hydra.run.dir={path}", "log=[jsonl]"])
    assert done.value.code == 0
    checkpoints = tmp_path / path / "checkpoints"
    (checkpoints / "step_000001").rename(checkpoints / "step_000070")
    return tmp_path


def test_every_command_is_accepted(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands()
    assert len(found) >= 10
    for command in found:
        words = shlex.split(command)[1:]
        if "--help" not in words and words[0] != "show":
            words.append("--dry-run")
        recipes = {"recipe=gsm8k", "recipe=jsonl", "recipe=smollm2"}  # whose models have to be fetched
        needs_hub = bool(recipes & set(words))
        words = [word for word in words if not word.startswith("model.name=")]
        words += ["model.name=tiny"] if needs_hub else []
        with pytest.raises(SystemExit) as done:
            cli.main(words)
        assert done.value.code == 0, (command, capsys.readouterr().err)


def test_every_path_exists() -> None:
    root = Path(__file__).parents[1]
    paths = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(paths) >= 6
    assert [path for path in paths if not (root / path).exists()] == []


def test_the_page_of_algorithms_is_current() -> None:
    build = load_file(OPTIONS.with_name("build.py"))
    assert OPTIONS.with_name("algorithms.md").read_text() == build.page(), "run `make docs`"
    for line in re.findall(r"^```console\n(.*?)^```$", build.page(), flags=re.M | re.S):
        with pytest.raises(SystemExit) as done:
            cli.main(line.split()[1:])
        assert done.value.code == 0


@pytest.mark.parametrize(
    ("group", "page"),
    [
        *((group, "tasks_and_rewards.md") for group in ("task", "reward", "environment", "condenser")),
        ("log", "metrics.md"),
    ],
)
def test_every_option_has_a_row(group: str, page: str) -> None:
    text = OPTIONS.with_name(page).read_text()
    (rows,) = re.findall(rf"^\| `{group}=` \|.*\n\| --- .*\n((?:\|.*\n)+)", text, flags=re.M)
    named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(extension.options("mtgrpo.log", Sink) if group == "log" else options(group))


@pytest.mark.parametrize("group", ["algorithm", "advantage"])
def test_every_algorithm_and_advantage_is_described(group: str) -> None:
    text = OPTIONS.with_name("algorithms.md").read_text()
    assert set(re.findall(rf"^### {group}=(\w+)$", text, flags=re.M)) == set(options(group))


def test_the_list_of_options_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert OPTIONS.read_text() == capsys.readouterr().out, "run `make docs`"


OWN = (Path(__file__).parents[1] / "docs" / "your_own_agent.md").read_text()
QUICK = ["trainer.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.tasks=2", "eval.samples=1"]


@pytest.fixture
def own_agent(place: Path) -> Path:
    """A folder with the files of the page of one's own agent, each of which begins with its name."""
    found = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", OWN, flags=re.M | re.S)
    assert len(found) == OWN.count("```python") == 10
    for name, block in found:
        (place / name).write_text(block)
    return place


@pytest.mark.real
@pytest.mark.parametrize("number", range(3))
def test_one_s_own_agent_is_trained_by_the_command(number: int, own_agent: Path, run: Run) -> None:
    (block,) = re.findall(r"^```console\n(.*?)^```$", OWN, flags=re.M | re.S)
    words = shlex.split(block.splitlines()[number])[1:]
    few = [word.replace("sft.steps=300", "sft.steps=2") for word in words if not word.startswith("trainer.steps")]
    code, _, err = run(*few, *QUICK, "hydra.run.dir=run")
    assert code == 0, err
    assert (own_agent / "rewards.txt").exists() == ("rewards_only" in " ".join(words))


@pytest.mark.real
def test_one_s_own_agent_is_trained_from_a_script_and_from_a_notebook(
    own_agent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_file(own_agent / "script.py")
    assert re.search(r"^[\d.]+ -> [\d.]+$", capsys.readouterr().out, flags=re.M)
    assert json.loads((own_agent / "runs/from_script/summary.json").read_text())["train/steps"] == 1

    async def cell() -> None:
        cells = compile((own_agent / "notebook.py").read_text(), "notebook", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(cells, {"__name__": "notebook"})

    asyncio.run(cell())
    assert "'eval/success/after'" in capsys.readouterr().out


def test_what_to_train_with_an_engine_of_one_s_own(own_agent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_file(own_agent / "engine.py")
    assert capsys.readouterr().out.splitlines()[-1] == "[0.45, -0.45, 0.45, -0.45]"


VERL = (Path(__file__).parents[1] / "docs" / "coming_from_verl.md").read_text()


def test_the_names_beside_those_of_verl_exist() -> None:
    chosen = {"task": "parquet", "environment": "tool_use", "condenser": "keep_last", "reward": "context_efficiency"}
    chosen |= {"algorithm": "grpo", "advantage": "trajectory", "engine": "local", "agent": "none"}
    known = schema(chosen)
    rows = [line.split("|") for line in VERL.splitlines() if line.startswith("| `")]
    ours = [
        word for row in rows for cell in row[2:4] for name in re.findall(r"`([^`]+)`", cell) for word in name.split()
    ]
    names = {word.partition("=")[0] for word in ours if "." in word.partition("=")[0]}
    assert len(names) > 30
    assert names <= set(known), names - set(known)


def test_the_options_in_the_readme_exist() -> None:
    chosen = {"environment": "tool_use", "condenser": "keep_last", "reward": "em", "algorithm": "grpo"}
    known: set[str] = set()
    for task in ("jsonl", "parquet", "reasoning_gym"):
        options = {**chosen, "task": task, "advantage": "trajectory", "engine": "local", "agent": "verifiers"}
        known |= set(schema(options))
    groups = {name.partition(".")[0] for name in known}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S))
    words = [word.partition("=")[0] for span in spans for word in span.split()]
    names = {word for word in words if "." in word and word.partition(".")[0] in groups and not word.endswith(".py")}
    assert len(names) > 12
    assert names <= known, names - known


def test_what_a_user_of_verl_types_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    monkeypatch.chdir(tmp_path)
    row = {
        "data_source": "own",
        "prompt": [{"role": "user", "content": "What is 17 * 23?"}],
        "reward_model": {"style": "rule", "ground_truth": "391"},
        "extra_info": {"split": "train", "index": 0},
    }
    for name in ("train", "test"):
        parquet.write_table(table({key: [value] for key, value in row.items()}), f"{name}.parquet")
    (command,) = [line for line in VERL.splitlines() if line.startswith("mtgrpo train")]
    with pytest.raises(SystemExit) as done:
        cli.main([*shlex.split(command)[1:], "model.name=tiny", "--dry-run"])
    assert done.value.code == 0
