"""The site of docs/: its navigation, its links, and in a browser what it looks like and what a newcomer finds."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from written import reference

from chromium import AXE, SERIOUS, Page, chromium
from mtgrpo.cli import COMMANDS
from mtgrpo.parts.extension import load_file

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
VENV = ROOT / ".venv-docs"
STAGE = load_file(DOCS / "stage.py")
NOTEBOOKS = load_file(ROOT / "scripts/notebooks.py")
QUESTIONS = {  # what a newcomer looks for -> pages of which one comes among the first three
    "out of memory": {"out_of_memory"},
    "my own reward": {"first_task", "your_own_agent", "tasks_and_rewards"},
    "resume": {"durability"},
    "vllm": {"vllm"},
    "LoRA": {"models", "recipes", "options", "out_of_memory"},
    "wandb": {"metrics"},
    "tool calls": {"tools", "metrics"},
    "multi gpu": {"many_devices"},
    "it does not learn": {"it_does_not_learn"},
    "export": {"durability", "view"},
    "rank was killed": {"errors"},
    "bubblewrap sandbox": {"errors", "tasks_and_rewards"},
    "loss NaN": {"errors"},
    "jupyter": {path.stem for path in (DOCS / "tutorials").glob("*.md")},
    "macOS": {"install"},
    "dataset format": {"tasks_and_rewards"},
    "batch size": {"command"},
}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [*STAGE.pages(STAGE.configuration())]
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    there |= {path.name for path in ROOT.glob("*.md") if path.name != "README.md"}
    assert sorted(listed) == sorted(there)


def test_tutorials_are_in_the_navigation_where_there_are_any(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    titles = [title for section in STAGE.configuration(tmp_path)["nav"] for title in section]
    assert "Tutorials" not in titles and "How to" in titles
    (tmp_path / "docs/tutorials").mkdir(parents=True)
    for name in ("103_your_tool.md", "101_see_it_learn.md"):
        (tmp_path / "docs/tutorials" / name).touch()
    (section,) = [section for section in STAGE.configuration(tmp_path)["nav"] if "Tutorials" in section]
    assert section["Tutorials"] == ["tutorials/101_see_it_learn.md", "tutorials/103_your_tool.md"]


def heads(page: Path) -> set[str]:
    """The anchors of a page, as Markdown for Python makes them."""
    plain = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in re.findall(r"^#+ (.*)$", plain, flags=re.M))
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    STAGE.stage(ROOT, tmp_path)
    place = tmp_path / "docs"
    seen: set[str] = set()
    for page in sorted(place.rglob("*.md")):
        for link in re.findall(r"\]\(([^):\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            aim = (page.parent / path).resolve() if path else page
            assert aim.is_relative_to(place) and aim.is_file(), (page.name, link)
            assert not anchor or anchor in heads(aim), (page.name, link)
            seen.add(aim.name)
    assert {"grpo.py.txt", "BENCHMARKS.md", "curve.png"} <= seen


def test_an_unknown_name_of_another_library_is_an_error() -> None:
    text = "<!-- names: learning_rate temperature max_completion_length report_to -->\n<!-- end -->"
    assert "| `learning_rate` | `optimizer.lr` |" in (page := reference.filled(text))
    assert "| `sampling.max_new_tokens` for a turn, `rollout.max_trajectory_tokens` for all of them |" in page
    assert "| `'log=[console,jsonl,wandb]'` |" in page
    with pytest.raises(LookupError, match="no_such_thing"):
        reference.filled("<!-- names: no_such_thing -->\n<!-- end -->")


def test_an_option_has_a_row_for_each_default_and_meaning() -> None:
    rows: dict[str, list[list[str]]] = {}
    for line in reference.options_page().splitlines():
        if line.startswith("| `"):
            key, *cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
            rows.setdefault(key.strip("`"), []).append(cells)

    def defaults(key: str) -> dict[str, str]:
        return {part: default for default, _, of in rows[key] for part in of.split(", ")}

    assert defaults("algorithm.clip_high")["dapo"] == "0.28" and defaults("algorithm.clip_high")["grpo"] == "0.2"
    assert defaults("algorithm.divide_by_std")["dr_grpo"] == "false"
    assert defaults("algorithm.divide_by_std")["grpo"] == "true"
    assert defaults("algorithm.average")["grpo"] == "token_mean"
    assert defaults("environment.max_turns")["tool_use"] == "8"
    assert {said for _, said, of in rows["task.path"] if of == "bfcl"} == {"the folder"}
    assert defaults("algorithm.truncated") == {"": "penalise"}  # of all


def test_what_is_typed_in_a_shell_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    typed: list[str] = []
    for page in DOCS.glob("*.md"):
        for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(), flags=re.M | re.S):
            typed += block.splitlines()
    made = [line.split()[1] for line in typed if line.startswith("make ")]
    ours = [line.split()[1] for line in typed if line.startswith(".venv/bin/mtgrpo ")]
    assert {"demo", "vllm-cpu"} <= set(made) <= targets
    assert {"view", "train"} <= set(ours) <= set(COMMANDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew."""
    if not (VENV / "bin" / "zensical").exists():
        pytest.skip("there is no .venv-docs: make docs-env makes it")
    folder = tmp_path_factory.mktemp("site")
    STAGE.stage(ROOT, folder)
    command = [VENV / "bin" / "zensical", "build", "--strict", "-f", "mkdocs.yml"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0 and "No issues found" in built.stdout + built.stderr, built.stdout + built.stderr
    return folder / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Generator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextlib.asynccontextmanager
async def opened(address: str, profile: Path) -> AsyncGenerator[Page]:
    """A browser that complains of nothing and asks this address alone."""
    async with chromium(profile) as page:
        await page.call("Network.enable")
        yield page
        assert page.asked and not [url for url in page.asked if not url.startswith((address, "data:"))]
        assert page.complaints == []


async def shown(page: Page, url: str) -> None:
    await page.call("Page.navigate", url=url)
    await page.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")


@pytest.mark.real
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
async def test_everybody_can_read_it(dark: bool, width: int, address: str, tmp_path: Path) -> None:
    if not AXE.is_file():
        pytest.skip("no axe-core: make mcp-servers")
    async with opened(address, tmp_path / "profile") as page:
        await page.size(width, 900, dark)
        for name in ("index", "first_task", "options", "coming_from_trl", "errors", "tutorials/101_see_it_learn"):
            await shown(page, f"{address}/{name}.html")
            scheme = await page.value("document.body.dataset.mdColorScheme")
            assert scheme == ("slate" if dark else "default")
            await page.value(AXE.read_text() + "; null")
            assert await page.value(SERIOUS) == [], name
            wide = await page.value("document.documentElement.scrollWidth")
            assert wide <= width, name


ROOTS = "[...document.querySelectorAll('*')].map(element => element.shadowRoot).filter(root => root)"
FOUND = f"{ROOTS}.flatMap(root => [...root.querySelectorAll('a')].map(link => link.href))"


async def results(page: Page, question: str) -> list[str]:
    """The pages that the search of the site finds, the best first."""
    typing = f"{ROOTS}.some(root => root.activeElement?.tagName === 'INPUT')"
    await page.until(f"{typing} || (document.querySelector('.md-search__button')?.click(), false)")
    await page.call("Input.insertText", text=question)
    words = question.replace(" ", "+")
    await page.until(f"{FOUND}.some(link => link.includes({json.dumps(f'h={words}')}))")
    return list(dict.fromkeys(Path(link.partition("?")[0]).stem for link in await page.value(FOUND)))


@pytest.mark.real
async def test_a_newcomer_finds_what_they_look_for(address: str, tmp_path: Path) -> None:
    missed: dict[str, list[str]] = {}
    async with opened(address, tmp_path / "profile") as page:
        await page.size(1280, 900)
        for question, pages in QUESTIONS.items():
            await shown(page, "about:blank")
            await shown(page, f"{address}/index.html")
            found = await results(page, question)
            if not pages & set(found[:3]) or "CHANGELOG" in found:
                missed[question] = found[:6]
    assert missed == {}


COPIES = """(() => {
  let copied = "";
  addEventListener("copy", (event) => { copied = event.target.value; }, true);
  return [...document.querySelectorAll("div.highlight:has(.filename)")].map((block) => {
    block.querySelector("[data-clipboard-target]").click();
    return [block.querySelector(".filename").innerText, copied];
  });
})()"""


@pytest.mark.real
async def test_what_is_copied_can_be_typed(address: str, tmp_path: Path) -> None:
    calls = [(cell.call(), cell.code) for cell in NOTEBOOKS.read(ROOT / "tutorials/104_your_reward_and_its_traps.py")]
    typed = [["Terminal", call[1]] if call else ["Python", code] for call, code in calls if code and "file" not in call]
    async with opened(address, tmp_path / "profile") as page:
        await shown(page, f"{address}/tutorials/104_your_reward_and_its_traps.html")
        await page.until("document.querySelector('[data-clipboard-target]') !== null")
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # a window without focus copies nothing
        copies = await page.call("Runtime.evaluate", expression=COPIES, returnByValue=True, userGesture=True)
    assert copies["result"]["value"] == typed
