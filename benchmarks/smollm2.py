"""Does a real model learn? SmolLM2-135M-Instruct before and after GRPO, and the controls beside it.

    python benchmarks/smollm2.py [--recipes R ...] [--seeds S ...] [--arms A ...]

For every recipe and seed, from the weights as they were published:

    grpo       the recipe as it is
    shuffled   the same with advantages permuted over the batch, half of the steps: has no signal
    own        supervised steps on the policy's own successes, sampled anew each step, for as many seconds as GRPO took
    lora       GRPO of adapters in place of the weights, one seed

Every arm is a process of its own, `--jobs` of them at once, and is kept in `--folder` when it is done: what was
interrupted goes on where it stopped. Success is measured before and after on the same held-out tasks at temperature 1,
and averaged over each task's samples. Its 95 % interval is Wilson's, over tasks: the sample size is what the variance
between them amounts to. That of a gain is Newcombe's, made of the two, and wider than it need be, for it takes no
notice that the tasks are the same. No interval tells how seeds differ.

    smollm2.gain_min      the least gain of GRPO over recipes and seeds, in percentage points
    smollm2.control_max   the largest gain with shuffled advantages
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning import command
from matplotlib.figure import Figure
from record import finish
from runs import last_checkpoint, steps_of

from mtgrpo.config.compose import compose, parse

MODEL = os.environ.get("MTGRPO_SMOLLM2", "smollm2")  # a folder, or the name that the package finds it by
RECIPES = ("smollm2", "smollm2_calculator")
SEEDS = (12, 13)
ARMS = ("grpo", "shuffled", "own", "lora")
LORA_SEED = 12
LORA_WORDS = ("model.lora.rank=16", "optimizer.lr=3e-4")
EVALUATION = ("eval.tasks=100", "eval.samples=2")
QUICK = (
    *("trainer.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=4"),
    *("sampling.max_new_tokens=24", "eval.tasks=4"),
)
NORMAL = statistics.NormalDist().inv_cdf(0.975)
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "smollm2.png"
Found = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where the arms of one recipe and seed begin."""

    recipe: str
    seed: int
    folder: Path
    words: Sequence[str]  # of `mtgrpo train`, for every arm
    steps: int

    def arm(self, name: str) -> Found:
        """One arm, done or kept."""
        if name == "before":
            return self._measured(name)
        if name == "own":
            return self._measured(name, imitate_s=self.arm("grpo")["seconds"])
        if name == "shuffled":
            return self._trained(name, "debug.advantages=shuffled", f"trainer.steps={max(1, self.steps // 2)}")
        return self._trained(name, *(LORA_WORDS if name == "lora" else ()))

    def _trained(self, name: str, *words: str) -> Found:
        folder = self.folder / name
        run = command(["train", *self.words, *words, "eval.tasks=1", "eval.samples=1"], folder)
        rows = steps_of(folder)
        found = {
            "seconds": run["time/rl_s"],
            "steps": len(rows),
            "training_success": [round(row["reward/success"], 4) for row in rows],
            "groups_with_variance": [round(row["reward/groups_with_variance"], 4) for row in rows],
        }
        found |= self._measured(name, folder)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # 1.6 GB, of no more use
        return found

    def _measured(self, name: str, trained: Path | None = None, imitate_s: float = 0.0) -> Found:
        """What held_out.py finds, of the checkpoint of the run in `trained` if there was one."""
        folder = self.folder / name / "held_out"
        if not (folder / "summary.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            words = [*self.words, f"model.name={last_checkpoint(trained)}"] if trained else self.words
            settings = {"words": list(words), "folder": str(folder), "imitate_s": imitate_s}
            process = [sys.executable, str(Path(__file__).with_name("held_out.py")), json.dumps(settings)]
            subprocess.run(process, check=True)
        found = json.loads((folder / "summary.json").read_text())
        return found | {"interval": interval(found["tasks"], found["samples"])}


def begin(recipe: str, seed: int, folder: Path, extra: Sequence[str]) -> Start:
    """Refuses to mix arms of different settings in one folder."""
    words = [f"recipe={recipe}", f"seed={seed}", f"model.name={MODEL}", *EVALUATION, *extra]
    composed, record = compose(parse(words)), folder / "config.yaml"
    if record.exists() and record.read_text() != composed.values:
        sys.exit(f"the arms in {folder} have other settings than now: remove it, or give another --folder")
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(composed.values)
    return Start(recipe, seed, folder, words, composed.experiment.trainer.steps)


def interval(tasks: Sequence[float], samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean success; `tasks` has the success of each, a mean of `samples`.

    Samples of one task are alike, so that they count for less than as many tasks: the sample size is that of
    independent samples whose mean would vary as much, between the number of tasks and that of samples.
    """
    mean, size = statistics.mean(tasks), float(len(tasks))
    if variance := statistics.pvariance(tasks) / size:
        size = min(mean * (1 - mean) / variance, size * samples)
    centre = (mean + NORMAL**2 / (2 * size)) / (1 + NORMAL**2 / size)
    half = NORMAL / (1 + NORMAL**2 / size) * math.sqrt(mean * (1 - mean) / size + NORMAL**2 / (4 * size**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def gain(before: Found, after: Found) -> Found:
    """How much success rose, in percentage points, and Newcombe's 95 % interval (1998, method 10)."""
    points = after["success"] - before["success"]
    (low_before, high_before), (low_after, high_after) = before["interval"], after["interval"]
    down = math.hypot(after["success"] - low_after, high_before - before["success"])
    up = math.hypot(high_after - after["success"], before["success"] - low_before)
    return {"points": 100 * points, "interval": (100 * (points - down), 100 * (points + up))}


def ratios_of(recipes: Mapping[str, Mapping[int, Mapping[str, Found]]]) -> dict[str, float | None]:
    """By the names of the targets; null where an arm was not measured."""

    def gains(arm: str) -> list[float]:
        seeds = [found for by_seed in recipes.values() for found in by_seed.values()]
        return [round(found[arm]["gain"]["points"], 2) for found in seeds if arm in found]

    return {
        "smollm2.gain_min": min(gains("grpo"), default=None),
        "smollm2.control_max": max(gains("shuffled"), default=None),
    }


def run_seed(start: Start, arms: Iterable[str], kept_only: bool) -> dict[str, Found]:
    """The arms of one recipe and seed, one after another; perhaps those alone that are kept."""
    found: dict[str, Found] = {}
    for name in ("before", *arms):
        if name == "lora" and start.seed != LORA_SEED:
            continue
        if kept_only and not (start.folder / name / "held_out" / "summary.json").exists():
            continue
        where, began = f"{start.recipe}, seed {start.seed}, {name}", time.perf_counter()
        print(f"{time.strftime('%H:%M')}  {where} ...", flush=True)
        found[name] = start.arm(name)
        low, high = found[name]["interval"]
        said = f"success {found[name]['success']:.3f} ({low:.3f}-{high:.3f})"
        if name != "before":
            found[name]["gain"] = gain(found["before"], found[name])
            low, high = found[name]["gain"]["interval"]
            said += f", gain {found[name]['gain']['points']:+.1f} points ({low:+.1f} to {high:+.1f})"
        print(f"{time.strftime('%H:%M')}  {where}: {said}, {(time.perf_counter() - began) / 60:.1f} min", flush=True)
    return found


def draw(recipes: Mapping[str, Mapping[int, Mapping[str, Found]]], file: Path) -> None:
    """A PNG: the success of every step's conversations, a panel for each recipe; points are held-out success."""
    figure: Any = Figure(figsize=(4 * len(recipes), 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(recipes), sharey=True, squeeze=False)[0]
    for axes, (recipe, seeds) in zip(panels, recipes.items(), strict=True):
        for number, (seed, found) in enumerate(seeds.items()):
            if "shuffled" in found:
                draw_arm(axes, found, "shuffled", "0.6", "" if number else "advantages shuffled")
            if "grpo" in found:
                draw_arm(axes, found, "grpo", f"C{number}", f"GRPO, seed {seed}")
        axes.set_title(recipe, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("success: training, and held out (points, 95 %)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=max(1, len(labels)))
    figure.savefig(file, format="png")


def draw_arm(axes: Any, found: Mapping[str, Found], arm: str, color: str, label: str) -> None:
    """Training success pale, its average over three steps on it, held-out success before and after."""
    values = found[arm]["training_success"]
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(values), color=color, linewidth=2.2, label=label)
    for step, measured in ((0, found["before"]), (len(values), found[arm])):
        low, high = measured["interval"]
        error = [[measured["success"] - low], [high - measured["success"]]]
        axes.errorbar([step], [measured["success"]], error, color=color, marker="o", capsize=3)


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and its two neighbours."""
    windows = (values[max(0, middle - 1) : middle + 2] for middle in range(len(values)))
    return [statistics.mean(window) for window in windows]


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at once; 8 GB each")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/smollm2"), help="keeps finished arms")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every arm, e.g. trainer.steps=5")
    parser.add_argument("--kept", action="store_true", help="report the arms that are kept, run none")
    parser.add_argument("--quick", action="store_true", help="two steps of two groups, four tasks; its folder is apart")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    extra = [*(QUICK if given.quick else ()), *given.set]
    root = given.folder.resolve() / ("quick" if given.quick else "full")
    wanted = [(recipe, seed) for recipe in given.recipes for seed in given.seeds]
    starts = [begin(recipe, seed, root / recipe / f"seed_{seed}", extra) for recipe, seed in wanted]
    with ThreadPoolExecutor(given.jobs) as pool:
        running = [pool.submit(run_seed, start, given.arms, given.kept) for start in starts]
    recipes: dict[str, dict[int, dict[str, Found]]] = {recipe: {} for recipe in given.recipes}
    for (recipe, seed), done in zip(wanted, running, strict=True):
        recipes[recipe][seed] = done.result()
    ratios = ratios_of(recipes)
    complete = (given.recipes, given.seeds, given.arms) == (list(RECIPES), list(SEEDS), list(ARMS)) and not extra
    picture = PICTURE if complete else root / "smollm2.png"
    draw(recipes, picture)
    print(f"{json.dumps(ratios, indent=1)}\nthe curves are in {picture}", flush=True)
    settings = {"threads": given.threads, "jobs": given.jobs, "evaluation": EVALUATION, "overrides": extra}
    finish("smollm2", ratios, {"recipes": recipes} | settings, "smollm2.json" if complete else None)


if __name__ == "__main__":
    main()
