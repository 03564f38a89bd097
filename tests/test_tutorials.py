"""The tutorials and notebooks: each is run, and what it claims holds. The five files of examples/ are used."""

from __future__ import annotations

import codeop
import io
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from conftest import PROJECT, Run
from mtgrpo import cli
from mtgrpo.parts.extension import load_file

notebooks = load_file(PROJECT / "scripts/notebooks.py")
TUTORIALS = sorted((PROJECT / "tutorials").glob("[0-9]*.py"))
NOTEBOOKS = sorted((PROJECT / "examples").glob("*.ipynb"))
FILES = ("tool", "environment", "reward", "algorithm", "condenser")
SMALL = [
    *("trainer.steps=1", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=4"),
    *("sampling.max_new_tokens=8", "eval.tasks=1", "eval.samples=2", "environment.max_turns=3", "log=[jsonl]"),
]


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, as a reader has it."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("MPLBACKEND", "agg")


def typed(line: str) -> str:
    """What a command prints; one of mtgrpo runs in this process, which has imported torch already."""
    words = shlex.split(line)
    if words[0] not in ("mtgrpo", "python") or "--multirun" in words:
        return notebooks.type_command(line)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        if words[0] == "python":
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
            return out.getvalue()
        with pytest.raises(SystemExit) as left:
            cli.main(words[1:])
        assert not left.value.code, out.getvalue()
    return out.getvalue()


def ran(name: str) -> str:
    """All that a tutorial prints, run in the working folder."""
    return "".join(cell.printed for cell in notebooks.run(PROJECT / "tutorials" / f"{name}.py", typed))


def summary(folder: str) -> dict[str, float]:
    return json.loads(Path(folder, "summary.json").read_text())


def steps(folder: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == "reinforcement learning"]


def rises(folder: str, name: str, by: float) -> bool:
    return summary(folder)[f"eval/{name}/after"] >= summary(folder)[f"eval/{name}/before"] + by


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_short_and_its_page_is_new(path: Path) -> None:
    text = path.read_text()
    assert 30 <= sum(map(bool, text.splitlines())) <= 95
    cells = notebooks.read(path)
    assert cells[0].is_text and "\nYou want " in cells[0].source and "## What next" in cells[-1].source
    page = (notebooks.PAGES / f"{path.stem}.md").read_text()
    assert notebooks.digest(path) in page.splitlines()[0], f"old: scripts/notebooks.py tutorials/{path.name}"
    recalled = notebooks.recalled(path)
    written, pictures = notebooks.as_page(recalled, path)
    assert page == written, f"old: scripts/notebooks.py --words tutorials/{path.name}"
    assert {name: (notebooks.PAGES / name).read_bytes() for name in pictures} == pictures
    assert (notebooks.PAGES / f"{path.stem}.ipynb").read_text() == notebooks.as_notebook(recalled)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_can_be_pasted_into_python(path: Path) -> None:
    """Line by line: an empty line ends what is indented, nothing but it does."""
    for cell in notebooks.read(path):
        waiting: list[str] = []
        for line in [*cell.code.splitlines(), ""] if not cell.call() else []:
            waiting.append(line)
            if codeop.compile_command("\n".join(waiting)) is not None:
                waiting = []
        assert not any(waiting), waiting
        assert "plt." not in cell.code or "plt.show()" in cell.code


@pytest.mark.parametrize("path", [*TUTORIALS, *NOTEBOOKS], ids=lambda path: path.stem)
def test_every_link_of_a_tutorial_leads_somewhere(path: Path) -> None:
    folder = notebooks.PAGES if path.suffix == ".py" else path.parent
    texts = [cell.source for cell in notebooks.read(path) if cell.is_text]
    links = [link for text in texts for link in re.findall(r"\]\(([^):]+)\)", text)]
    for link in links:
        target, _, anchor = link.partition("#")
        page = (folder / target).read_text() if anchor else ""
        heads = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
        assert (folder / target).exists(), link
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_every_tutorial_has_a_test() -> None:
    assert {path.stem for path in TUTORIALS} == CLAIMS.keys()


def test_cells_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        '# %% [markdown]\n# # One\n#\n# Text\n\n# %%\nfrom cells import sh\n\n# %%\nsh("a b"\n   " c")\n# %%\nx = 1\n'
    )
    cells = notebooks.read(path)
    assert [cell.is_text for cell in cells] == [True, False, False, False]
    assert cells[0].source == "# One\n\nText" and cells[2].call() == ["sh", "a b c"] and cells[3].call() == []
    sources = ["".join(cell["source"]) for cell in json.loads(notebooks.as_notebook(cells))["cells"]]
    assert sources == ["# One\n\nText", "!a b c", "x = 1"]
    cells[2].printed = "told\n"
    text, head, *blocks = notebooks.as_page(cells, path)[0].split("\n\n# One\n\n")[1].split("\n\n")
    assert (text, head) == ("Text", notebooks.HEAD.format(name="own"))
    command, output, code = blocks  # the command is copied without what it prints
    assert command == '```console title="Terminal"\na b c\n```' and output == "```text\ntold\n```"
    assert code == '```python title="Python"\nx = 1\n```\n'


def test_a_cell_prints_draws_and_awaits(place: Path) -> None:
    path = place / "own.ipynb"
    code = "import asyncio\nfrom matplotlib import pyplot\nprint(await asyncio.sleep(0, 7))\npyplot.plot([1, 2])"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": code}]}))
    (cell,) = notebooks.run(path)
    assert cell.printed == "7\n" and [picture[1:4] for picture in cell.pictures] == [b"PNG"]


def see_it_learn(printed: str) -> None:
    assert rises("runs/first", "greedy", 0.5) and rises("runs/first", "success", 0.1)
    assert "calculator" in printed and "held-out success" in printed


def read_a_run(printed: str) -> None:
    assert "reward/groups_with_variance" in printed and "advantage" in printed
    assert Path("page/index.html").exists() and Path("runs/a/report.html").exists()


def your_tool(printed: str) -> None:
    assert "-> price(" in printed and rises("runs/shop", "success", 0.2)


def your_reward(printed: str) -> None:
    trap, cured = steps("runs/trap"), steps("runs/cured")
    assert trap[-1]["reward/mean"] > trap[0]["reward/mean"]
    assert trap[-1]["reward/right/mean"] < trap[0]["reward/right/mean"] - 0.1
    assert cured[-1]["reward/right/mean"] > cured[0]["reward/right/mean"] + 0.2


def your_game(printed: str) -> None:
    assert rises("runs/corridor", "success", 0.2) and "right" in printed


def a_real_model(printed: str) -> None:
    assert "success" in printed and len(steps("runs/one_step")) == 1


def long_conversations(printed: str) -> None:
    whole, condensed, cut = printed.split("expected")[:3]
    longest = [
        max(int(line.split()[0]) for line in part.splitlines() if "tokens" in line) for part in (whole, condensed)
    ]
    assert longest[1] < 192 < longest[0]
    assert printed.count("reward 1.0 completed") == 2 and "reward 0.0 truncated" in printed and cut


def turn_rewards(printed: str) -> None:
    first, last = steps("runs/turns")[0], steps("runs/turns")[-1]
    assert last["reward/turns_of_trajectory"] > first["reward/turns_of_trajectory"] + 0.5
    assert "paid for each turn: [1.0" in printed


def an_agent(printed: str) -> None:
    assert {step["agent/exact_share"] for step in steps("runs/agent")} == {1.0}
    assert rises("runs/agent", "greedy", 0.3)


def mcp(printed: str) -> None:
    assert rises("runs/mcp", "greedy", 0.3) and "[tool calculator]" in printed


def search(printed: str) -> None:
    assert "Ada Lovelace" in printed and "4 passages" in printed


def slow_tools(printed: str) -> None:
    assert {step["rollout/staleness_max"] for step in steps("runs/each")} == {0.0}
    assert {step["rollout/staleness_max"] for step in steps("runs/ahead")} == {0.0, 1.0}


def kill_and_resume(printed: str) -> None:
    assert printed.count("all digits the same: True") == 4 and "exit code -9" in printed


def sweeps(printed: str) -> None:
    real, control = (f"runs/control/{number}" for number in (0, 1))
    assert rises(real, "greedy", 0.5) and not rises(control, "greedy", 0.2)


def export(printed: str) -> None:
    assert "chat.py" in printed and printed.count("392 + 296") >= 3


CLAIMS: dict[str, Callable[[str], None]] = {
    "101_see_it_learn": see_it_learn,
    "102_read_a_run": read_a_run,
    "103_your_tool": your_tool,
    "104_your_reward_and_its_traps": your_reward,
    "105_your_game": your_game,
    "106_a_real_model": a_real_model,
    "107_long_conversations": long_conversations,
    "108_turn_rewards": turn_rewards,
    "109_an_agent_that_exists": an_agent,
    "110_mcp": mcp,
    "111_search_wikipedia": search,
    "112_slow_tools_async": slow_tools,
    "113_kill_and_resume": kill_and_resume,
    "114_sweeps_and_controls": sweeps,
    "115_export_and_serve": export,
}
SLOW = {"106_a_real_model", "112_slow_tools_async", "114_sweeps_and_controls"}


@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CLAIMS])
def test_a_tutorial_does_what_it_says(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    CLAIMS[name](ran(name))


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_short_and_accepted(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    text = (PROJECT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    (command,) = [line.strip() for line in text.splitlines() if line.startswith("    mtgrpo ")]
    code, _, err = run(*shlex.split(command)[1:], "--dry-run")
    assert code == 0, err


@pytest.mark.real
@pytest.mark.parametrize("name", FILES)
def test_an_example_trains(name: str, run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    (command,) = [
        line.strip() for line in (PROJECT / f"examples/{name}.py").read_text().splitlines() if "mtgrpo train" in line
    ]
    code, _, err = run(*shlex.split(command)[1:], *SMALL, f"hydra.run.dir={place}/run")
    assert code == 0, err
    (step,) = steps(f"{place}/run")
    assert step["rollout/failed"] == 0


def test_the_notebook_of_every_setting_prints_what_it_says(place: Path) -> None:
    path = PROJECT / "examples/understand_grpo.ipynb"
    cells = notebooks.run(path)
    assert [cell.printed for cell in cells] == [cell.printed for cell in notebooks.stored(path)]
    assert sum(len(cell.pictures) for cell in cells) == 7


@pytest.mark.real
def test_the_notebook_of_this_machine_trains(place: Path) -> None:
    cells = notebooks.run(PROJECT / "examples/local_training.ipynb")
    assert rises("runs/notebook", "greedy", 0.5)
    assert sum(len(cell.pictures) for cell in cells) == 1 and any("calculator(" in cell.printed for cell in cells)
