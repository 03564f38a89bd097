"""What coding agents read: AGENTS.md, SKILL.md, llms.txt; docs/extras.md and CITATION.cff."""

from __future__ import annotations

import itertools
import re
import textwrap
import tomllib

from mtgrpo import __version__, cli
from mtgrpo.config.recipe import recipes
from mtgrpo.runtime.packages import PACKAGES
from written.tables import ROOT, table

AGENTS = """# For coding agents that change mtgrpo

This page is written from CONTRIBUTING.md, ARCHITECTURE.md and the Makefile by `make docs`. To train with mtgrpo read
`skills/mtgrpo/SKILL.md` instead.

## Build and test

`make setup` makes `.venv`. Run the tests of what you touch, such as `.venv/bin/pytest -n 0 -q tests/test_tools.py`;
those marked `real`, `slow` or `gpu` run with `-m real` and so on. Before a commit: `make lint`, and the fast tests.

"""
SKILL = """---
name: mtgrpo
description: Train a language model with GRPO over multi-turn conversations with tools, evaluate it, look into its
  conversations and export it, with the command mtgrpo. For reinforcement learning of agents on one machine or many.
---

# Train with mtgrpo

This page is written from the source by `make docs`. One command does all of it, and settings are words `key=value`.

## The way

1. `mtgrpo doctor` says what this machine has, and what to type for the rest.
2. Choose a recipe (below) and a model, and check everything without running anything: `--dry-run`.
3. Train into a folder that you name; the same command with `resume=true` goes on where it was cut off.
4. Read `runs/a/summary.json` and `mtgrpo report runs/a`, then conversations: `mtgrpo show runs/a --failures`.

```console
mtgrpo train 'recipe=[jsonl,smollm2_135m]' task.path=problems.jsonl 'task.val_files=[held_out.jsonl]' --dry-run
mtgrpo train 'recipe=[jsonl,smollm2_135m]' task.path=problems.jsonl 'task.val_files=[held_out.jsonl]' \
hydra.run.dir=runs/a
mtgrpo report runs/a
mtgrpo show runs/a --failures
mtgrpo eval checkpoint=runs/a/checkpoints/step_000020
mtgrpo export runs/a/checkpoints/step_000020 --to hf --out my-model
```

Every option is in `docs/options.md`. Look one up before you use it: `mtgrpo train WORDS --help WORD` shows those of
what is chosen, with the values of the run.

## Your own parts

A tool is a function with annotations and a docstring, a reward a dataclass with `reward(self, trajectory)`, each in a
file: `'environment.tools=[calculator,shop.py:price]' reward=shop.py:Brisk`. Whole examples: README.md and
docs/your_own_agent.md. A file of tasks has a line of JSON for each, with `prompt` (or `messages`) and `answer`.

## Traps

- A run is cut short by the first of `trainer.steps`, `epochs`, `total_turns`, `wall_time_s`. Set one for a first try.
- Groups whose rewards are all alike teach nothing: look at `reward/groups_with_variance` before you change an option.
  A model that never succeeds needs a warm start (`sft.steps`) or easier tasks, one that always does harder ones.
- `sampling.max_new_tokens` bounds a turn, `environment.max_context_length` a conversation: `rollout/truncated` says how
  many were cut, and those rarely earn anything.
- A tool raises `ToolError` for what the model did wrong, which the model reads. Any other exception is an outage: the
  conversation is retried, then left out (`rollout/failed`), and nothing is learned from it.
- Success on held-out tasks counts (`eval/success`), not the training reward; compare it before and after.
- A warning in `notes.txt` names the setting to change. Do not switch checks off to go on.
- `checkpoint=FOLDER` of somebody else names code: `trust_code=true` only after you have read it.
- Runs beside each other share cores: give each `OMP_NUM_THREADS`, or run them one after the other.
- Without a network: `HF_HUB_OFFLINE=1`, a model by its folder, data below `MTGRPO_DATA`.
- Exit codes: 0 done, 1 the run failed, 2 a word is wrong; the error, one line, says what to type instead.

"""
EXTRAS = """# Extras

This page is written from `pyproject.toml` by `make docs`. Each extra brings what a task, a reward or a service needs:
`pip install 'mtgrpo[math,search]'`, in the environment where mtgrpo is.
`mtgrpo doctor` says which are there, and a run that lacks one says so before it begins.

"""


def extras() -> str:
    """What each extra of pyproject.toml brings, and for what."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows: list[list[str]] = []
    for name, wanted in found.items():
        purposes = dict.fromkeys(package.purpose for package in PACKAGES.values() if package.extra == name)
        named = [re.split(r"[\[<>=]", package)[0] for package in wanted]
        row = "tests, linters, and most of the above" if name == "dev" else ", ".join(purposes)
        rows.append([f"`{name}`", row, "see `pyproject.toml`" if name == "dev" else ", ".join(named)])
    return EXTRAS + table(["extra", "for", "packages"], rows)


def part(page: str, title: str) -> str:
    """A section of a page at the root, its heading included."""
    text = (ROOT / page).read_text()
    return text[text.index(f"## {title}\n") :].partition("\n## ")[0].rstrip() + "\n\n"


def agents() -> str:
    """AGENTS.md, for agents that change mtgrpo."""
    targets = re.findall(
        r"^(setup|lint|test|test-real|test-chaos|docs|demo):.*## (.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    made = table(["make", "does"], [[f"`make {name}`", does] for name, does in targets])
    rooms = part("ARCHITECTURE.md", "The rooms of src/mtgrpo, from the bottom up")
    return f"{AGENTS}{made}\n{part('CONTRIBUTING.md', 'House rules')}{rooms}".rstrip() + "\n"


def skill() -> str:
    """SKILL.md, for agents that train with mtgrpo."""
    named = "".join(f"- `mtgrpo {name}`: {does}\n" for name, does in cli.COMMANDS.items())
    behind: list[str] = []
    listed: list[str] = []
    for name, path in recipes().items():
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()[1:])
        text = " ".join(line.removeprefix("# ") for line in lines)
        if "to be put behind another recipe" in text:
            behind.append(f"`{name}`")
        elif not text.startswith("Base: "):
            listed.append(f"- `{name}`: {re.split(r'[.:](?: |$)| [(]', text)[0]}\n")
    more = f"Behind another, as `'recipe=[gsm8k,lora]'`: {', '.join(behind)}.\n"
    return f"{SKILL}## Commands\n\n{named}\n## Recipes\n\n{''.join(listed)}\n{more}"


def llms() -> str:
    """llms.txt: the pages and what each is about, by its first sentences."""
    lines = [f"# mtgrpo {__version__}\n\n> {about()}\n\n## Pages\n"]
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "skills/mtgrpo/SKILL.md"]:
        text = re.sub(r"^(---|```).*?^(---|```).*?$", "", path.read_text(), flags=re.M | re.S)
        title, *rest = [block for block in text.split("\n\n") if block.strip()]
        said = " ".join(block for block in rest if block[0] not in " #|!<-")
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(said.split()))
        plain = re.sub(r"^This page is written.*?`make docs`\. ", "", plain)
        first = textwrap.shorten(re.split(r"(?<=[.]) ", plain)[0], 200, placeholder=" ...")
        lines.append(f"- [{title.strip().removeprefix('# ')}]({path.relative_to(ROOT)}): {first}")
    return "\n".join(lines) + "\n"


def about() -> str:
    """The package in a sentence."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]


def citation() -> str:
    """CITATION.cff."""
    lines = ["cff-version: 1.2.0", "message: If you use mtgrpo, please cite it as below.", "type: software"]
    lines += ["title: mtgrpo", f"abstract: {about()}", f"version: {__version__}", "license: Apache-2.0"]
    return "\n".join([*lines, "authors:", "  - name: The mtgrpo developers", ""])
