"""Writes from the source what repeats it, for readers and for coding agents: `make docs`. A test compares.

docs/algorithms.md from the classes and their docstrings, docs/extras.md from pyproject.toml; AGENTS.md (for who changes
mtgrpo), skills/mtgrpo/SKILL.md (for who trains with it), llms.txt and CITATION.cff from the pages and the package.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mtgrpo import __version__, cli
from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator, Place
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.config.helptext import comments, summary
from mtgrpo.config.options import options
from mtgrpo.config.recipe import recipes
from mtgrpo.errors import ConfigError
from mtgrpo.policy.reference import ReferenceSettings
from mtgrpo.rollout.settings import Curriculum, Filter
from mtgrpo.runtime.packages import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
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
3. Train into a folder that you name; the same command goes on where it was cut off.
4. Read `runs/a/summary.json` and `mtgrpo report runs/a`, then conversations: `mtgrpo show runs/a --failures`.

```console
mtgrpo train recipe=jsonl model.name=tiny task.path=problems.jsonl task.val_files=[held_out.jsonl] --dry-run
mtgrpo train trainer.steps=2 hydra.run.dir=runs/b resume=true
mtgrpo show runs/a --failures
mtgrpo eval checkpoint=runs/a/checkpoints/step_000025
mtgrpo export runs/a/checkpoints/step_000025 --to hf --out my-model
```

Look an option up before you use it: `mtgrpo train --help WORD`. All of them are in `docs/options.txt`.

## Your own parts

A tool is a function with annotations and a docstring, a reward a dataclass with `reward(self, trajectory)`, each in a
file: `environment.tools=[calculator,shop.py:price] reward=shop.py:Brisk`. Whole examples: README.md and
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
`pip install 'mtgrpo[math,search]'`, from the source `pip install -e '.[math,search]' -c constraints.txt`.
`mtgrpo doctor` says which are there, and a run that lacks one says so before it begins.

"""
INTRODUCTION = """# Algorithms and advantages

You have a run and want another algorithm: choose one from the table, and its settings behind it.

```console
mtgrpo train algorithm=cispo algorithm.clip_high=3 advantage=return_to_go advantage.gamma=0.95 --dry-run
```

An `algorithm` sets the baseline and the loss of a token, an `advantage` the return of each turn. Pairs that are not in
the table are refused at start. `make docs` writes this page from the source.
"""
TERMS = """
## Terms

- rho_t: probability of a token under the policy, divided by that under the old policy (`correction.old_policy`). Its
  logarithm is clamped to [-20, 20], where it has no gradient (`policy/log_ratio_clamped`). The ratio of a trajectory
  (gspo, gmpo, `correction.weight=sequence`) is over all tokens sampled in it.
- sg(): no gradient flows through it.
- group: the trajectories of one task. Advantages, loss and gradient do not depend on how a trajectory is stored in
  segments or micro-batches, except with `algorithm.average=sequence_mean`.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "&#124;") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def spelled(value: Any) -> str:
    """A default, as a user would type it."""
    if isinstance(value, Enum):
        return str(value.name)
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def fields(cls: type) -> dict[str, Any]:
    """The settings of a class, by name, with their defaults."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        made = field.default_factory
        given[field.name] = field.default if made is dataclasses.MISSING else made()
    return given


def meaning(cls: type, name: str) -> str:
    """The comment of a setting, of the nearest class that has one."""
    return next((notes[name] for c in cls.__mro__ if name in (notes := comments(c))), "")


def settings(prefix: str, cls: type, without: Iterable[str] = ()) -> str:
    """The settings of a class, with defaults."""
    rows = [
        [f"`{prefix}.{name}`", spelled(default), meaning(cls, name)]
        for name, default in fields(cls).items()
        if name not in without
    ]
    return table(["setting", "default", "meaning"], rows) if rows else ""


def split(cls: type) -> tuple[str, str]:
    """Of a docstring: what it is, and when to take it."""
    text, _, when = inspect.cleandoc(cls.__doc__ or "").partition("\nWhen: ")
    return text.rstrip(), " ".join(when.split()).rstrip(".")


def section(group: str, name: str, cls: type, without: Iterable[str]) -> str:
    """One option: its docstring, and the settings of its own."""
    return f"### {group}={name}\n\n```text\n{split(cls)[0]}\n```\n\n{settings(group, cls, without)}\n"


def shared() -> tuple[list[str], str]:
    """The settings that several algorithms have, and two tables: their meaning, and defaults where these differ."""
    of = {name: fields(cls) for name, cls in options("algorithm").items()}
    names = ["average", *(name for name in fields(GRPO) if name not in fields(Algorithm))]
    defaults = {name: {spelled(given[name]) for given in of.values() if name in given} for name in names}
    meanings = [
        [f"`algorithm.{name}`", "below" if len(defaults[name]) > 1 else min(defaults[name]), meaning(GRPO, name)]
        for name in names[1:]
    ]
    differ = [name for name in names if len(defaults[name]) > 1]
    rows = [[name, *(spelled(given[one]) if one in given else "" for one in differ)] for name, given in of.items()]
    return names, f"{table(['setting', 'default', 'meaning'], meanings)}\n{table(['algorithm', *differ], rows)}"


def members(cls: type[Enum]) -> str:
    """The members of an enumeration and what they mean."""
    source = inspect.getsource(cls).splitlines()
    rows: list[list[str]] = []
    for member in cls:
        line = next((line for line in source if line.strip().startswith(f"{member.name} =")), "")
        rows.append([f"`{member.name}`", line.partition("#")[2].strip()])
    return table(["value", "meaning"], rows)


def pairs() -> str:
    """When to take each algorithm, and the estimators that go with it."""
    algorithms: dict[str, Algorithm] = {name: cls() for name, cls in options("algorithm").items()}
    algorithms["reinforce_pp, group_baseline=true"] = ReinforcePP(group_baseline=True)
    advantages: dict[str, AdvantageEstimator] = {name: cls() for name, cls in options("advantage").items()}
    rows: list[list[str]] = []
    for name in sorted(algorithms):
        fitting: list[str] = []
        for estimator_name, estimator in advantages.items():
            with suppress(ConfigError):
                estimator.check(SimpleNamespace(algorithm=algorithms[name], rewards_turns=True))
                fitting.append(estimator_name)
        rows.append(
            [name, split(type(algorithms[name]))[1], "all" if len(fitting) == len(advantages) else ", ".join(fitting)]
        )
    return table(["algorithm", "when", "advantages"], rows)


def page() -> str:
    """The whole page."""
    advantages, algorithms = options("advantage"), options("algorithm")
    common, tables = shared()
    when = [[name, split(cls)[1]] for name, cls in advantages.items()]
    parts = [INTRODUCTION, pairs(), table(["advantage", "when"], when), TERMS, "## Algorithms\n"]
    parts += [
        "Of all algorithms, then of several; others have theirs in their section:\n",
        settings("algorithm", Algorithm, ["average"]),
        tables,
    ]
    parts += [section("algorithm", name, cls, {*fields(Algorithm), *common}) for name, cls in algorithms.items()]
    parts += ["## Advantages\n", settings("advantage", AdvantageEstimator)]
    parts += [section("advantage", name, cls, fields(AdvantageEstimator)) for name, cls in advantages.items()]
    parts += [f"## algorithm.average\n\n{inspect.cleandoc(Average.__doc__ or '')}\n", members(Average)]
    for prefix, cls, kinds in (
        ("kl", KL, {"estimator": Estimator, "place": Place}),
        ("reference", ReferenceSettings, {}),
        ("correction", Correction, {"old_policy": OldPolicy, "weight": Weight, "reject": Reject}),
        ("filter", Filter, {}),
        ("curriculum", Curriculum, {}),
    ):
        text = inspect.cleandoc(cls.__doc__ or "") or summary(cls)
        parts.append(f"\n## {prefix}\n\n{text}\n\n{settings(prefix, cls)}")
        for name, kind in kinds.items():
            about = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
            parts.append(f"\n`{prefix}.{name}`: {about}\n\n{members(kind)}")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


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
    more = f"Behind another, as `recipe=[gsm8k,lora]`: {', '.join(behind)}.\n"
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


def pages() -> dict[Path, str]:
    """Every file that is written from the source, but docs/options.txt and llms.txt, by its place."""
    made = {"docs/algorithms.md": page(), "docs/extras.md": extras(), "AGENTS.md": agents()}
    made |= {"skills/mtgrpo/SKILL.md": skill(), "CITATION.cff": citation()}
    return {ROOT / name: text for name, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (ROOT / "llms.txt").write_text(llms())
