"""docs/algorithms.md, from the classes of algorithms and advantages and their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.correction import Correction, OldPolicy, Reject, Weight
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.algorithms.kl import KL, Estimator, Place
from mtgrpo.algorithms.reinforce_pp import ReinforcePP
from mtgrpo.config.helptext import summary
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.policy.settings import ReferenceSettings
from mtgrpo.rollout.settings import Curriculum, Filter
from written.tables import fields, joined, meaning, settings, spelled, table

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
        settings("algorithm", Algorithm, kinds={"average": Average}),
        tables,
    ]
    parts += [section("algorithm", name, cls, {*fields(Algorithm), *common}) for name, cls in algorithms.items()]
    parts += ["## Advantages\n", settings("advantage", AdvantageEstimator)]
    parts += [section("advantage", name, cls, fields(AdvantageEstimator)) for name, cls in advantages.items()]
    for prefix, cls, kinds in (
        ("kl", KL, {"estimator": Estimator, "place": Place}),
        ("reference", ReferenceSettings, {}),
        ("correction", Correction, {"old_policy": OldPolicy, "weight": Weight, "reject": Reject}),
        ("filter", Filter, {}),
        ("curriculum", Curriculum, {}),
    ):
        text = inspect.cleandoc(cls.__doc__ or "") or summary(cls)
        parts.append(f"## {prefix}\n\n{text}\n\n{settings(prefix, cls, kinds=kinds)}")
    return joined(parts)
