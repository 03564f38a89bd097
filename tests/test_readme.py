"""Every code block of README and docs: commands run with --dry-run, files as they stand."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from written import agents, algorithms

from conftest import Run
from mtgrpo import cli, memory
from mtgrpo.config.compose import compose, parse
from mtgrpo.config.experiment import groups
from mtgrpo.config.options import options, schema
from mtgrpo.config.recipe import recipes
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.log import Sink
from mtgrpo.parts import extension
from mtgrpo.parts.extension import load_file
from mtgrpo.rewards import Score, scores
from mtgrpo.tasks import Split
from mtgrpo.tasks.jsonl import Jsonl
from mtgrpo.types import Finish, Message, Task, ToolCall, Trajectory, Turn
from recorded import make_recorded

ROOT = Path(__file__).parents[1]
OPTIONS = ROOT / "docs" / "options.txt"
SKILL = ROOT / "skills/mtgrpo/SKILL.md"
PATHS = (ROOT / "README.md", SKILL, *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.stem: path.read_text() for path in PATHS}
(BILL,) = re.findall(r"^```python\n(# bill.py.*?)^```$", PAGES["tasks_and_rewards"], flags=re.M | re.S)
README, OWN, VERL = PAGES["README"], PAGES["your_own_agent"], PAGES["coming_from_verl"]
# Their commands are run below or in tests of their own; servers are needed for those of the last.
TRIED_ELSEWHERE = {"agents", "algorithms", "coming_from_skyrl", "coming_from_verl", "many_devices", "sagemaker"}
TRIED_ELSEWHERE |= {"your_own_agent", "vllm"}
WRITTEN = {"algorithms", "api", "architectures", "options", "recipes"}  # from the source


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.M | re.S)


def commands(page: str) -> list[str]:
    lines = [re.split(r"\s+#", line)[0] for block in blocks("console", page) for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split(" ; ") if part.strip().startswith("mtgrpo")]


def spoken(path: Path) -> list[str]:
    """What a file of the source says: its texts, or its comments where it is YAML."""
    if path.suffix == ".yaml":
        return re.findall(r"^#.*", path.read_text(), flags=re.M)
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_what_is_typed_with_brackets_is_quoted() -> None:
    """zsh takes a bare `log=[jsonl]` for a pattern of file names, finds no such file and runs nothing."""
    code = re.compile(r"^```(?:python|json|yaml|text)\b.*?^```$", flags=re.M | re.S)
    pages = [*PATHS, *(ROOT / "docs/tutorials").glob("*.md"), OPTIONS, ROOT / "llms.txt", ROOT / "CONTRIBUTING.md"]
    written = {path: [code.sub("", path.read_text())] for path in pages}
    sources = [path for end in ("py", "yaml") for path in (ROOT / "src").rglob(f"*.{end}")]
    written |= {path: spoken(path) for path in (*sources, *(ROOT / "examples").glob("*.py"))}
    bare = re.compile(r"(?<![\w.'\"/-])(?<!found: )(?<!, )\w+(?:\.\w+)*=\[[\w.{]\S*")  # zsh says `found: `
    found = {path.name: bare.findall(text) for path, texts in written.items() for text in texts if bare.search(text)}
    assert found == {}


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the pages, and a finished run at the path that they name."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("problems.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(blocks("json")))
    for name, block in zip(("shop.py", "my_agent.py"), blocks("python"), strict=True):
        (folder / name).write_text(block)
    (folder / "example.yaml").write_text(*blocks("yaml"))
    for name in ("bills.jsonl", "more_bills.jsonl"):
        (folder / name).write_text("".join(blocks("json", PAGES["tools"])))
    named = [*blocks("yaml", PAGES["command"]), *blocks("python", PAGES["tools"]), BILL]
    named += blocks("python", PAGES["first_task"])
    for block in named:
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    words = ["sft.steps=1", "trainer.steps=1", "rollout.prompts_per_step=1", "eval.tasks=1", "eval.samples=1"]
    with pytest.raises(SystemExit) as done:
        cli.main(["train", *words, f"hydra.run.dir={folder}/runs/a", "log=[jsonl]"])
    assert done.value.code == 0
    checkpoints = folder / "runs/a/checkpoints"
    shutil.copytree(checkpoints / "step_000001", checkpoints / "step_000020")
    (checkpoints / "step_000001").rename(checkpoints / "step_000025")
    shutil.copytree(folder / "runs/a", store := folder / "runs/store")
    (store / "checkpoints/step_000025").rename(store / "checkpoints/step_000015")
    return folder


@pytest.mark.parametrize("page", sorted(PAGES.keys() - TRIED_ELSEWHERE))
def test_every_command_is_accepted(
    page: str, newcomer: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTGRPO_DATA", str(data_folder))
    monkeypatch.setattr(memory, "planned", lambda experiment, *_: (experiment, []))  # test_recipes.py has what it plans
    monkeypatch.chdir(newcomer)
    assert len(commands(README)) == 8 + 2
    for command in commands(PAGES[page]):
        words = shlex.split(command)[1:]
        if words[0] in ("train", "sft", "eval", "play", "export", "launch") and not {"--help", "--dry-run"} & set(
            words
        ):
            words.append("--dry-run")
        if words[0] == "train" and "resume=true" not in words:  # its folder is there, for the commands after it
            words = [word for word in words if not word.startswith("hydra.run.dir=")]
        words += ["--once"] if words[0] == "watch" else []
        if words[0] == "view" and "--out" not in words:  # which otherwise serves until Ctrl-C
            words += ["--out", f"page{len(list(newcomer.glob('page*')))}"]
        if any(re.match(r"(recipe|model\.name)=\S*smollm2", word) for word in words):  # a model that has to be fetched
            words = [word for word in words if word != "model.name=smollm2"] + ["model.name=tiny"]
            words += [] if any(word.startswith("recipe=") for word in words) else ["recipe=pretrained"]
        with pytest.raises(SystemExit) as done:
            cli.main(words)
        assert done.value.code == 0, (command, capsys.readouterr().err)


def test_the_worked_example_calls_the_tool_and_is_told_what_it_says(
    newcomer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(newcomer)
    (line,) = (line for line in commands(README) if "example.yaml" in line)
    experiment = compose(parse([*shlex.split(line)[2:], "model.name=tiny"])).experiment
    asked, called, answer, said = experiment.task.worked
    (call,) = called.tool_calls
    assert (asked.role, answer) == (
        "user",
        Message("tool", load_file(newcomer / "shop.py").price("lamp"), name="price"),
    )
    assert call == ToolCall("price", {"thing": "lamp"}) and said.content.endswith("#### 80")
    assert call.name in {spec.name for spec in experiment.environment.tool_specs}


async def test_the_tools_and_the_reward_of_the_pages(newcomer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(newcomer)
    task = next(Jsonl(path="bills.jsonl", val_files=["more_bills.jsonl"]).stream(Split.train, 0))
    environment = ToolUse(tools=["till.py:Till", "weekday.py:weekday", "notes.py:Notes"])

    async def told(playing: ToolUse, tool: str, **arguments: str) -> str:
        reply = await playing.step(Message("assistant", tool_calls=(ToolCall(tool, arguments),)))
        return reply.messages[0].content

    for _ in range(2):  # conversations, each with a receipt of its own
        async with environment.conversation(task) as (playing, _):
            assert await told(playing, "Till", thing="tea") == "tea 3 EUR\n"
            assert await told(playing, "Till", thing="lamp") == "tea 3 EUR\nlamp 40 EUR\n"
            assert await told(playing, "Till", thing="car") == "error: there is no car"
            assert await told(playing, "look", key="a") == "error: there is no such note"
            assert await told(playing, "keep", key="a", value="b") == await told(playing, "look", key="a") == "b"
            assert await told(playing, "weekday", day="2026-02-28") == "Saturday"
            assert (await told(playing, "weekday", day="2026-02-30")).startswith("error: day is out of range")
    reward = load_file(newcomer / "bill.py").Bill()
    graded = [
        Trajectory(task, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))])
        for text in ("#### 43", "#### 44", "none")
    ]
    assert [score.total for score in await scores(reward, graded) if isinstance(score, Score)] == [1, 0, 0]


async def test_the_first_task(
    newcomer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(newcomer)
    store = load_file(newcomer / "store.py")
    task = next(store.Store().stream(Split.train, 0))
    call, told, answer = next(demo for seed in range(40) if len(demo := store.Store().demonstration(task, seed)) == 3)
    async with ToolUse(tools=["store.py:Count"]).conversation(task) as (playing, _):
        assert (await playing.step(call)).messages[0].content == told.content == task.answer
        wrong = Message("assistant", tool_calls=(ToolCall("Count", {"thing": "cars"}),))
        assert (await playing.step(wrong)).messages[0].content.startswith("error: there are pears, ")
    turns = [Turn([], [], [], [], Finish.STOP, answer)]
    (score,) = await scores(store.Right(per_turn=0.1), [Trajectory(task, turns=turns)])
    assert isinstance(score, Score) and score.total == pytest.approx(0.9)


def test_the_numbers_of_a_token(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_recorded(place / "runs/a")
    (place / "record.py").write_text(*blocks("python", PAGES["debug_one_token"]))
    load_file(place / "record.py")
    assert re.search(r"nats at entry \d+, token \d+, paid ", capsys.readouterr().out)


def test_every_recipe_has_a_row() -> None:
    section = PAGES["command"].partition("\n## Recipes\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert named == set(recipes())


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    folder = ROOT if page == "README" else ROOT / "docs"
    for link in re.findall(r"\]\(([^):]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        assert (folder / path).exists(), link
        text = (folder / path).read_text() if path and anchor else PAGES[page]
        heads = re.findall(r"^#+ (.*)$", text, flags=re.M)
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert "shared/data" not in README


def test_no_sentence_stands_twice() -> None:
    seen: set[str] = set()
    for page, text in PAGES.items():
        if page in WRITTEN:
            continue
        prose = re.sub(r"^```.*?^```$|^[|#< ].*?$", "\n", text, flags=re.M | re.S)
        for paragraph in re.split(r"\n\s*\n", prose):
            for sentence in re.split(r"(?<=[.:;?!]) ", " ".join(paragraph.split())):
                assert len(sentence) < 40 or sentence not in seen, (page, sentence)
                seen.add(sentence)


def test_what_is_written_from_the_source_is_current() -> None:
    pages = load_file(OPTIONS.with_name("build.py")).pages() | {ROOT / "llms.txt": agents.llms()}
    assert [path for path, text in pages.items() if path.read_text() != text] == [], "run `make docs`"
    assert all(len(pages[path].splitlines()) < 120 for path in (SKILL, ROOT / "AGENTS.md"))
    for line in re.findall(r"^```console\n(.*?)^```$", algorithms.page(), flags=re.M | re.S):
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


def test_the_names_beside_those_of_verl_exist() -> None:
    chosen = {"task": "parquet", "environment": "tool_use", "condenser": "keep_last", "reward": "context_efficiency"}
    chosen |= {"algorithm": "grpo", "advantage": "trajectory", "engine": "local", "agent": "none", "parallel": "auto"}
    chosen |= {"cluster": "local"}
    known = schema(chosen)
    rows = [line.split("|") for line in VERL.splitlines() if line.startswith("| `")]
    ours = [
        word for row in rows for cell in row[2:4] for name in re.findall(r"`([^`]+)`", cell) for word in name.split()
    ]
    names = {word.partition("=")[0] for word in ours if "." in word.partition("=")[0]}
    assert len(names) > 30
    assert names <= set(known), names - set(known)


def every_option() -> set[str]:
    """Those of all parts, and the fields of a task, as functions of one's own see it."""
    chosen = {group: next(iter(options(group))) for group in groups()}
    known = {key for group in groups() for option in options(group) for key in schema({**chosen, group: option})}
    known |= set(schema({**chosen, "reward": [*options("reward")]}))
    return known | {f"task.{field.name}" for field in dataclasses.fields(Task)}


def texts(file: Path) -> Iterator[str]:
    """What stands in quotation marks in a Python file, with ... for the values of f-strings."""
    for node in ast.walk(ast.parse(file.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        said = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
        if all(isinstance(part, str) for part in said) and said != ["..."]:
            yield "".join(said)


def test_the_errors_are_those_that_are_printed() -> None:
    said = [text for file in (ROOT / "src").rglob("*.py") for text in texts(file)]
    said += [(ROOT / "scripts/setup.sh").read_text()]
    rows = [line.split(" | ") for line in PAGES["errors"].splitlines() if line.startswith("| ")]
    messages = [message for row in rows for message in re.findall("`([^`]+)`", row[0])]
    assert len(messages) > 70
    patterns = [".*".join(map(re.escape, message.split("..."))) for message in messages]
    absent = [p for p in patterns if not any(re.search(p, text, flags=re.S) for text in said)]
    assert absent == []
    known = {*every_option(), *groups(), "hydra.run.dir"}
    words = {word for row in rows for cell in row for span in re.findall("`([^`]+)`", cell) for word in span.split()}
    named = {word.partition("=")[0] for word in words if re.match(r"[a-z_][\w.]*=", word)}
    assert len(named) > 30
    assert [name for name in named if not any(f".{key}".endswith(f".{name}") for key in known)] == []


def test_the_options_that_are_named_exist() -> None:
    known = every_option()
    for page, text in PAGES.items():
        if page.startswith(
            "coming_from_"
        ):  # with names of others; what they are here is read from a table, or tested above
            continue
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
        words = [re.split("[=/]", word)[0] for span in spans for word in span.split()]
        sections = {key.partition(".")[0] for key in known}
        names = {word for word in words if "." in word and word.partition(".")[0] in sections} - {"chat.py"}  # a file
        assert names <= known, (page, names - known)


@pytest.mark.parametrize("page", ["coming_from_verl", "coming_from_skyrl"])
def test_what_a_user_of_theirs_types_is_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (command,) = [line for line in PAGES[page].splitlines() if line.startswith("mtgrpo train")]
    with pytest.raises(SystemExit) as done:
        cli.main([*shlex.split(command)[1:], "model.name=tiny", "--dry-run"])
    assert done.value.code == 0
