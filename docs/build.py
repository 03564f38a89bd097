"""Writes docs/algorithms.md from the classes and their docstrings: `make docs`. A test compares."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator, Place
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.config.helptext import comments, summary
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.policy.reference import ReferenceSettings
from mtgrpo.rollout.settings import Curriculum, Filter

TARGET = Path(__file__).with_name("algorithms.md")
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


if __name__ == "__main__":
    TARGET.write_text(page())
