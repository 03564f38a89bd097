"""Writes docs/algorithms.md from the classes and their docstrings: `make docs`. A test compares."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight
from mtgrpo.algorithms.kl import KL, Estimator, Place
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.config.helptext import comments, summary
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.policy.reference import ReferenceSettings
from mtgrpo.rollout.settings import Curriculum, Filter

TARGET = Path(__file__).with_name("algorithms.md")
INTRODUCTION = """# Algorithms and advantages

This page is written from the source by `make docs`.

A run has one `algorithm`, which sets the baseline and the loss of a token, and one `advantage`, the estimator that
computes the return of each turn. Both are chosen by name, their settings follow them:

```console
mtgrpo train algorithm=cispo algorithm.clip_high=3 advantage=return_to_go advantage.gamma=0.95 --dry-run
```

Statistics of a group are over its trajectories. How a trajectory is stored (its turns in one segment or in many, its
tokens in one micro-batch or in many) changes neither advantage nor loss nor gradient, with one exception that exists to
reproduce others: `algorithm.average=sequence_mean`. The ratio of a trajectory (gspo, gmpo,
`correction.weight=sequence`) is over all tokens that the policy sampled in it, whatever turn or segment they belong to.

In the formulas rho_t is the probability of a token under the policy divided by that under the old policy
(`correction.old_policy`), sg() stops the gradient, and a group is the trajectories of one task. Logarithms of ratios
are clamped to [-20, 20], where they have no gradient; `policy/log_ratio_clamped` is the share of such tokens.
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


def settings(prefix: str, cls: type, base: type | None = None) -> str:
    """The settings of a class, with defaults; of those that `base` has only the ones with another default."""
    inherited = {f.name: f.default for f in dataclasses.fields(base)} if base else {}
    rows: list[list[str]] = []
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if field.name in inherited and inherited[field.name] == default:
            continue
        meaning = next((notes[field.name] for c in cls.__mro__ if field.name in (notes := comments(c))), "")
        rows.append([f"`{prefix}.{field.name}`", spelled(default), meaning])
    return table(["setting", "default", "meaning"], rows) if rows else ""


def section(group: str, name: str, cls: type, base: type) -> str:
    """One option: its docstring, and the settings of its own."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return f"### {group}={name}\n\n```text\n{text}\n```\n\n{settings(group, cls, base)}\n"


def members(cls: type[Enum]) -> str:
    """The members of an enumeration and what they mean."""
    source = inspect.getsource(cls).splitlines()
    rows: list[list[str]] = []
    for member in cls:
        line = next((line for line in source if line.strip().startswith(f"{member.name} =")), "")
        rows.append([f"`{member.name}`", line.partition("#")[2].strip()])
    return table(["value", "meaning"], rows)


def pairs() -> str:
    """Which estimator goes with which algorithm."""
    algorithms: dict[str, Algorithm] = {name: cls() for name, cls in options("algorithm").items()}
    algorithms["reinforce_pp, group_baseline=true"] = ReinforcePP(group_baseline=True)
    advantages: dict[str, AdvantageEstimator] = {name: cls() for name, cls in options("advantage").items()}
    rows: list[list[str]] = []
    for name in sorted(algorithms):
        cells: list[str] = []
        for estimator in advantages.values():
            try:
                estimator.check(SimpleNamespace(algorithm=algorithms[name], rewards_turns=True))
                cells.append("yes")
            except ConfigError:
                cells.append("")
        rows.append([name, *cells])
    return table(["algorithm", *advantages], rows)


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        "## Which estimator goes with which algorithm\n",
        "Other pairs are refused at start.\n",
        pairs(),
    ]
    parts.append("\n## Algorithms\n\nCommon to all:\n")
    parts.append(settings("algorithm", Algorithm))
    parts += [section("algorithm", name, cls, Algorithm) for name, cls in options("algorithm").items()]
    parts.append("## Advantages\n\nCommon to all:\n")
    parts.append(settings("advantage", AdvantageEstimator))
    parts += [section("advantage", name, cls, AdvantageEstimator) for name, cls in options("advantage").items()]
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
