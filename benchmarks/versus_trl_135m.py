"""Whole training steps of a real model, SmolLM2-135M-Instruct, by us and by TRL's GRPOTrainer: seconds and memory.

Recipe smollm2 (worked examples before the problem, one turn of at most 48 new tokens), 8 tasks x 8 conversations, in
float32. Model, prompts token for token, order of tasks, sampling, optimiser and loss are the same on both sides
(trl_side.py), and so is a reward that differs in every group: here a group that is rewarded alike is not trained, TRL
trains it. That no group is left out is checked at every step. The worked examples are computed once here and for every
conversation there, so the ratio depends on their number: the recipe's two, and four.

    trl        as it comes: the whole batch in one micro-batch, activation checkpointing
    trl_best   no checkpointing; the best of 8, 4, 2 and 1 rows per micro-batch in one step on a quarter of the batch

A side is a process of its own. Ours takes its steps in turns with trl_best, `--rounds` times, then with trl,
`--rounds-default` times: a step of TRL's takes minutes. No step is left out, the first ones count on both sides.
Memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from record import finish
from sides import HERE, Side, Step
from smollm2 import MODEL
from versus_trl import THREADS, ours, report, summary, trl

from mtgrpo.config.compose import compose, parse
from mtgrpo.stages.checks import open_tasks, open_tokenizer
from mtgrpo.tasks import Split
from mtgrpo.tasks.one_step import OneStep
from mtgrpo.types import Message


@dataclass(frozen=True)
class Scale:
    """How much work is measured."""

    prompts: int  # tasks a step
    siblings: int
    new_tokens: int
    rows: Sequence[int]  # per micro-batch of trl_best: what is tried
    examples: int = 0  # worked ones before the problem; 0 = the recipe's two

    def words(self) -> list[str]:
        """Of `mtgrpo train`."""
        return [
            "recipe=smollm2",
            "algorithm.truncated=keep",  # TRL rewards what reached a limit like the rest
            f"model.name={MODEL}",
            "model.dtype=float32",
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.group_size={self.siblings}",
            f"sampling.max_new_tokens={self.new_tokens}",
            f"reward={HERE / 'spread.py'}:Spread",
            "optimizer.lr=1e-5",  # so that both sides go on sampling the same
            "optimizer.schedule=constant",
            *([f"task.examples={worked(self.examples)}"] if self.examples else []),
        ]

    def settings(self, rows: int, prompts: int) -> dict[str, Any]:
        """Of trl_side.py, for micro-batches of `rows`."""
        micro_batches = prompts * self.siblings // rows
        return {"completion": self.new_tokens, "micro_batches": micro_batches, "checkpointing": False}


FULL = Scale(prompts=8, siblings=8, new_tokens=48, rows=(8, 4, 2, 1))
FEW_SHOT = replace(FULL, examples=4)
QUICK = Scale(prompts=1, siblings=2, new_tokens=8, rows=(2, 1))


def worked(count: int) -> str:
    """The messages of `count` examples that no task repeats, as the command line takes them."""
    source = OneStep(operators="+*", largest=29, largest_factor=10)
    messages: list[Message] = []
    for task in islice(source.stream(Split.train, seed=2**31), count):
        messages += [*task.messages, *source.demonstration(task, 0)]
    listed = [f'{{role: {message.role}, content: "{message.content}"}}' for message in messages]
    return f"[{', '.join(listed)}]"


def prompt_tokens(words: Sequence[str]) -> float:
    """How long the prompts of the first step are, on average."""
    experiment = compose(parse(words)).experiment
    (tasks, _), (_, chat) = open_tasks(experiment), open_tokenizer(experiment)
    first = islice(tasks, experiment.rollout.prompts_per_step)
    return statistics.mean(len(chat.open(task.messages, ())) for task in first)


def sweep(scale: Scale, threads: int, folder: Path) -> dict[int, float]:
    """For each number of rows per micro-batch, the seconds of one step of TRL's on a quarter of the batch."""
    prompts = max(1, scale.prompts // 4)
    words = [*scale.words(), f"rollout.prompts_per_step={prompts}", "trainer.steps=1"]
    found: dict[int, float] = {}
    for rows in scale.rows:
        with trl(words, folder, threads, **scale.settings(rows, prompts)) as side:
            found[rows] = round(side.step()["seconds"], 3)
        print(f"a quarter of the batch, {rows} rows per micro-batch: {found[rows]:.1f} s", flush=True)
    return found


def checked(step: Step) -> Step:
    """A step, unless it trained less than it sampled."""
    alike = step["frac_reward_zero_std"] if "frac_reward_zero_std" in step else 1 - step["reward/groups_with_variance"]
    assert alike == 0, f"{alike:.0%} of the groups are rewarded alike"
    return step


def measure(case: str, scale: Scale, rounds: int, rounds_default: int, threads: int) -> dict[str, Any]:
    """The sweep, then ours in turns with each of the rivals."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tried = sweep(scale, threads, folder)
        rows = min(tried, key=lambda rows: tried[rows])
        rivals: dict[str, tuple[int, dict[str, Any]]] = {
            "trl_best": (rounds, scale.settings(rows, scale.prompts)),
            "trl": (rounds_default, {"completion": scale.new_tokens}),
        }
        steps: dict[str, list[Step]] = {"ours": []}
        loaded: dict[str, Step] = {}
        with ours([*scale.words(), f"trainer.steps={rounds + rounds_default}"], folder) as own:
            loaded["ours"] = own.loaded
            for name, (turns, settings) in rivals.items():
                with trl([*scale.words(), f"trainer.steps={turns}"], folder, threads, **settings) as rival:
                    loaded[name] = rival.loaded
                    steps[name] = []
                    for _ in range(turns):
                        steps["ours"].append(taken("ours", own))
                        steps[name].append(taken(name, rival))
    detail: dict[str, Any] = {
        "sweep_s": tried,
        "rows": rows,
        "rounds": {name: len(of) for name, of in steps.items()},
        "prompt_tokens": prompt_tokens(scale.words()),
    }
    for name, of in steps.items():
        detail[name] = summary(of, loaded[name]) | {"peak_bytes": of[-1]["peak_bytes"]}
    for name in steps:
        report(case, name, detail[name], detail["ours"])
    return detail


def taken(name: str, side: Side) -> Step:
    """One step, printed."""
    step = checked(side.step())
    print(f"{name:9}{step['seconds']:8.2f} s", flush=True)
    return step


def ratios_of(cases: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """By the names of the targets."""
    ratios: dict[str, float | None] = {}
    for name, detail in cases.items():
        own = detail["ours"]
        ratios[f"versus_trl.{name}"] = round(detail["trl"]["seconds"] / own["seconds"], 3)
        ratios[f"versus_trl.{name}_best"] = round(detail["trl_best"]["seconds"] / own["seconds"], 3)
        ratios[f"versus_trl.{name}_memory"] = round(own["peak_bytes"] / detail["trl"]["peak_bytes"], 3)
    return ratios


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="steps of trl_best")
    parser.add_argument("--rounds-default", type=int, default=1, help="steps of trl")
    parser.add_argument("--threads", type=int, default=THREADS, help="of TRL; ours chooses")
    parser.add_argument("--quick", action="store_true", help="1 task x 2 conversations of 8 tokens; writes no file")
    given = parser.parse_args()
    cases = {"135m": QUICK} if given.quick else {"135m": FULL, "135m_4_shot": FEW_SHOT}
    found = {name: measure(name, cases[name], given.rounds, given.rounds_default, given.threads) for name in cases}
    ratios = ratios_of(found)
    print(json.dumps(ratios, indent=1))
    settings = {"model": "SmolLM2-135M-Instruct", "trl_threads": given.threads, "trl_version": version("trl")}
    file = None if given.quick else "versus_trl_135m.json"
    finish("versus_trl_135m", ratios, found | settings, file, found["135m"]["ours"]["threads"])


if __name__ == "__main__":
    main()
