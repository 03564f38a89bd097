"""docs/options.md, recipes.md and api.md, and the tables of what others call our options."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile
from typing import Any

from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.helptext import BASE, comments, summary
from mtgrpo.config.options import Setting, counterpart, options, schema
from mtgrpo.config.recipe import base, read_recipe, recipes, settle
from written.tables import ROOT, fields, joined, meaning, spelled, table

RESULTS = ROOT / "benchmarks" / "results"
OPTIONS = """# Options

Every option with its built-in default and meaning; recipes change some. This page is written from the source by
`make docs`. Type options as `key=value`; what stands to the right wins. Where the last column is empty, the row is
true of every part of the group.

```console
mtgrpo train recipe=gsm8k --help              # the options of a run, with its values
mtgrpo train advantage=gae --help advantage   # those of a part, or that speak of a word
mtgrpo train recipe=gsm8k --cfg job           # what a recipe comes to
```
"""
RECIPES = """# Recipes

Every recipe, what it sets and what was measured with it; this page is written from the source by `make docs`. The
same by purpose is in [the command](command.md#recipes). `tasks x siblings` are conversations of a step; held-out
success is at temperature 1, before and after. Where nothing was measured here, the text says what others published.

```console
mtgrpo train recipe=gsm8k_tiny --dry-run
mtgrpo train 'recipe=[gsm8k,qwen2.5_0.5b,lora]' trainer.steps=50 --dry-run   # from left to right, then what you set
```
"""
API = """# From Python

The names that are meant to be imported; this page is written from their docstrings by `make docs`. Whatever is not here
may change without notice. A file of each kind is in [your own agent](your_own_agent.md).
"""
NEWLINE = "\n"
OPTION = r"'[\w.]+=[^']*'|[a-z_]+(?:\.\w+)+(?:=[^\s,;]+)?|[a-z_]+=[^\s,;]+"  # how one is typed, in an answer
MEASURED = {  # recipe -> result, where one was measured with the recipe as it is, and not replaced by another
    "guess_number_tiny": "learning_guess_number_tiny",
    "gsm8k_tiny": "learning_gsm8k_tiny",
    "mcp_tiny": "mcp_tiny",
    "word_problems_tiny": "learning_word_problems_tiny",
}
OFFERED = {  # module -> its public names
    "mtgrpo": ("preset", "train", "rollout_with_advantages"),
    "mtgrpo.types": tuple(
        [
            "Task",
            "Message",
            "ToolCall",
            "ToolSpec",
            "Turn",
            "Trajectory",
            "CallRecord",
            "Group",
            "Completion",
            "Sampling",
            "Status",
            "Finish",
            "Limits",
        ]
    ),
    "mtgrpo.tasks": ("TaskSource", "IndexedStream", "Split"),
    "mtgrpo.tools": ("Tool", "ToolError"),
    "mtgrpo.environments": ("Environment", "Opening", "Reply"),
    "mtgrpo.rewards": ("Reward", "Score"),
    "mtgrpo.condensers": ("Condenser", "messages_of"),
    "mtgrpo.agents": ("Agent", "Outcome"),
    "mtgrpo.algorithms": ("Algorithm", "Baseline", "PerToken", "Tokens"),
    "mtgrpo.advantages": ("AdvantageEstimator",),
    "mtgrpo.log": ("Sink",),
    "mtgrpo.evaluation.statistics": ("compare", "mean_over_tasks", "mean_pass_at_k", "wilson"),
}


def default(key: str, setting: Setting) -> Any:
    """What a setting is where nobody sets it."""
    return fields(setting.owner)[key.rpartition(".")[2]]


def choice(key: str, setting: Setting) -> list[str]:
    """A row of the table of settings: name, default, meaning."""
    name = key.rpartition(".")[2]
    text = meaning(setting.owner, name)
    if inspect.isclass(setting.type) and issubclass(setting.type, Enum):
        text = f"{', '.join(member.name for member in setting.type)}. {text}".rstrip()
    return [f"`{key}`", spelled(default(key, setting)), text]


def options_page() -> str:
    """Every option: what can be chosen, then what can be set, group by group."""
    first = {group: next(iter(options(group))) for group in groups()}
    parts = [OPTIONS, "## general\n"]
    common = schema(first)
    parts.append(table(["setting", "default", "meaning"], [choice(k, s) for k, s in common.items() if "." not in k]))
    for group in groups():
        of = {name: schema({**first, group: name}) for name in options(group)}
        having: dict[str, dict[tuple[str, ...], list[str]]] = {}  # key -> row -> the parts of which it is true
        for name, known in of.items():
            for key, setting in known.items():
                if key.startswith(f"{group}."):
                    having.setdefault(key, {}).setdefault(tuple(choice(key, setting)), []).append(name)
        found = [(row, names) for rows in having.values() for row, names in rows.items()]
        rows = [[*row, "" if len(names) == len(of) else ", ".join(names)] for row, names in found]
        chosen = [[f"`{group}={name}`", summary(cls)] for name, cls in options(group).items()]
        parts += [f"\n## {group}\n", table(["option", "what it is"], chosen)]
        parts.append(table(["setting", "default", "meaning", "of"], rows) if rows else "")
    hints = inspect.get_annotations(Experiment, eval_str=True)
    for section in dict.fromkeys(key.partition(".")[0] for key in common if "." in key):
        if section not in groups():
            rows = [choice(key, setting) for key, setting in common.items() if key.startswith(f"{section}.")]
            about = summary(hints[section])
            parts.append(f"\n## {section}\n\n{about}\n\n{table(['setting', 'default', 'meaning'], rows)}")
    return joined(parts)


def measured(recipe: str) -> Iterator[tuple[str, float, float, str]]:
    """Of each run of the recipe in benchmarks/results: seed, held-out success before and after, what it took."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((RESULTS / f"{name}.json").read_text())["detail"]

    for name, seeds in read("unseen")["runs"].items():
        if name.partition(",")[0] == recipe:
            for seed, run in seeds.items():
                yield seed + name.removeprefix(recipe), run["before"], run["after"], ""
    for seed, run in read("smollm2")["recipes"].get(recipe, {}).items():
        took = f"{run['grpo']['steps']} steps, {run['grpo']['seconds']:.0f} s"
        yield seed, run["before"]["success"], run["grpo"]["success"], took
    for seed, run in read(MEASURED[recipe])["seeds"].items() if recipe in MEASURED else ():
        grpo = run["arms"]["grpo"]
        took = f"{grpo['train/steps']:.0f} steps, {grpo['time/rl_s']:.0f} s"
        yield seed, grpo["eval/success/before"], grpo["eval/success/after"], took


def recipes_page() -> str:
    """Every recipe that is no base of others."""
    parts = [RECIPES]
    for name, path in recipes().items():
        comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        said = " ".join(line.lstrip("# ") for line in comment if "@package" not in line)
        if said.startswith(BASE):
            continue
        link = f"../{path.relative_to(ROOT).as_posix()}"
        parts.append(f"## {name}\n\n{said} [{path.name}]({link})\n")
        if "behind another recipe" in said:
            continue
        settled = settle([base(), *read_recipe(name)], ())
        keys = ("rollout.prompts_per_step", "rollout.group_size", "trainer.steps", "optimizer.lr", "model.lora.rank")
        tasks, siblings, steps, rate, rank = (settled.values.get(k, default(k, settled.known[k])) for k in keys)
        model = f"`{settled.values['model.name']}`" + f", LoRA {rank}" * bool(rank)
        row = [str(settled.choices["task"]), model, settled.choices["algorithm"], f"{tasks} x {siblings}"]
        head = ["task", "model", "algorithm", "tasks x siblings", "steps", "learning rate"]
        parts.append(table(head, [[*row, str(steps), f"{float(rate):g}"]]))
        runs = [[seed, f"{before:.3f} -> {after:.3f}", took] for seed, before, after, took in measured(name)]
        shown = 3 if any(took for *_, took in runs) else 2
        parts.append(
            table(["seed", "held-out success", "GRPO took"][:shown], [run[:shown] for run in runs]) if runs else ""
        )
    return joined(parts)


def annotations(what: Any) -> dict[str, str]:
    """The types of fields or parameters as the source has them, and under "return" that of what is given back."""
    if inspect.isclass(what):
        bodies = [parsed(cls).body for cls in reversed(what.__mro__) if cls.__module__.startswith("mtgrpo")]
        found = [node for body in bodies for node in body if isinstance(node, ast.AnnAssign)]
        return {ast.unparse(node.target): ast.unparse(node.annotation) for node in found}
    function = parsed(what)
    told = {arg.arg: arg.annotation for arg in (*function.args.args, *function.args.kwonlyargs)}
    return {name: ast.unparse(node) for name, node in {**told, "return": function.returns}.items() if node}


def parsed(what: Any) -> Any:
    """The definition of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]


def signature(what: Any) -> str:
    """How it is made or called; "" of exceptions, enumerations and what is opened by others."""
    if inspect.isclass(what) and (issubclass(what, Enum | BaseException) or not dataclasses.is_dataclass(what)):
        return ""
    spoken, types = inspect.signature(what), annotations(what)
    typed = {name: p.replace(annotation=types.get(name, p.annotation)) for name, p in spoken.parameters.items()}
    spoken = spoken.replace(parameters=[*typed.values()], return_annotation=types.get("return", ""))
    starred = [p for p in spoken.parameters.values() if p.kind is p.KEYWORD_ONLY]
    words = [("*, " if p in starred[:1] else "") + str(p) for p in spoken.parameters.values()]
    result = "" if inspect.isclass(what) else f" -> {spoken.return_annotation}"
    inside = (
        f"({', '.join(words)}){result}"
        if sum(map(len, words)) < 60
        else f"(\n    {f',{NEWLINE}    '.join(words)},\n){result}"
    )
    named = re.sub(r"<(\w+\.\w+): .*?>", r"\1", inside)
    return re.sub(r"(: )'([^']*)'", r"\1\2", re.sub(r"<factory>|<[^<>]* at \w+>", "...", named))


def prose(docstring: str) -> str:
    """A docstring in Markdown: what is indented or drawn stays as it stands."""
    parts = [
        f"```text\n{part}\n```" if re.search(r"^\s|  ", part, flags=re.M) else " ".join(part.split())
        for part in inspect.cleandoc(docstring).split("\n\n")
    ]
    return "\n\n".join(parts)


def api_page() -> str:
    """The public names with signature and docstring."""
    parts = [API]
    for module, names in OFFERED.items():
        parts.append(f"## {module}\n")
        for name in names:
            what = getattr(importlib.import_module(module), name)
            kind = "class" if inspect.isclass(what) else "async def" if inspect.iscoroutinefunction(what) else "def"
            own = vars(what) if inspect.isclass(what) else {}
            methods = {n: m for n, m in own.items() if inspect.isfunction(m) and not n.startswith("_") and m.__doc__}
            rows = [[f"`{n}`", text] for n, text in (comments(what) if kind == "class" else {}).items() if text]
            rows += [[f"`{n}()`", inspect.cleandoc(m.__doc__).splitlines()[0]] for n, m in methods.items()]
            parts.append(f"### {name}\n\n```text\n{kind} {name}{signature(what)}\n```\n\n{prose(what.__doc__ or '')}\n")
            parts.append(table(["of it", "what it is"], rows) if rows else "")
    return joined(parts)


def filled(text: str) -> str:
    """The page with its tables: between `<!-- names: A B -->` and `<!-- end -->` what A and B are called here."""

    def rows(found: re.Match[str]) -> str:
        answers = [[f"`{name}`", ours_of(name)] for name in found[1].split()]
        return f"<!-- names: {found[1]} -->\n{table(['theirs', 'here'], answers)}<!-- end -->"

    return re.sub(r"<!-- names: (.*?) -->\n.*?<!-- end -->", rows, text, flags=re.S)


def ours_of(name: str) -> str:
    """What another library's option is called here, itself where that is the same. Raises LookupError for no name."""
    if ours := counterpart(name):
        return re.sub(rf"^\w+(?=,|$)|(?<![\w./])(?:{OPTION})(?: (?:{OPTION}))*", r"`\g<0>`", ours)
    if name in schema({group: next(iter(options(group))) for group in groups()}):
        return f"`{name}`"
    raise LookupError(f"no name is known for {name}: see config/elsewhere.yaml")
