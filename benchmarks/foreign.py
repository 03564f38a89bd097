"""Do agents of others learn, as they come from PyPI? `python benchmarks/foreign.py --agents openai_agents`

The recipe calculator, led by an agent of tests/foreign_agents.py in the place of the environment: one warm start for a
seed, and from its weights GRPO with the agent, in the Python of .venv-agents (`make agents-env`). Both are taken up
where they were interrupted, and what benchmarks/results/foreign.json has is not repeated.

    foreign.AGENT = held-out success after GRPO, the mean over seeds; the goal is 0.85
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from record import RESULTS, finish

PROJECT = Path(__file__).resolve().parent.parent
PYTHON = PROJECT / ".venv-agents" / "bin" / "python"
MODULE = PROJECT / "tests" / "foreign_agents.py"
AGENTS = ("openai_agents", "langgraph", "smolagents")
GOAL = 0.85
FILE = "foreign.json"


def command(words: list[str], folder: Path) -> dict[str, float]:
    """Run `mtgrpo` with `words`, or go on with what is in `folder`; what it measured."""
    if not (folder / "summary.json").exists():
        resumed = ["resume=true"] if list(folder.glob("checkpoints/step_*")) else []
        path = os.pathsep.join([str(PROJECT / "src"), str(PROJECT / "tests")])
        arguments = [str(PYTHON), "-m", "mtgrpo", *words, *resumed, f"hydra.run.dir={folder}", "log=[jsonl]"]
        subprocess.run(arguments, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "summary.json").read_text())


def trained(agent: str, seed: int, root: Path, more: list[str]) -> dict[str, Any]:
    """Held-out success of one agent before and after, and what its steps took and what it sent, in the mean."""
    recipe, warm = "recipe=calculator_from_scratch", root / f"warm_start_{seed}"
    command(["sft", recipe, f"seed={seed}", "eval.every_steps=0"], warm)
    start = sorted((warm / "checkpoints").glob("step_*"))[-1]
    words = ["train", recipe, f"model.name={start}", "sft.steps=0", f"seed={seed}"]
    words += ["agent=python", f"agent.function={MODULE}:{agent}", "agent.max_requests=6"]
    folder = root / f"{agent}_{seed}"
    summary = command([*words, *more], folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/rollout_s" in row]
    names = ("time/rollout_s", "time/train_s", "agent/requests", "agent/exact_share", "policy/mismatch/kl")
    found: dict[str, Any] = {name: statistics.fmean(step.get(name, 0.0) for step in steps) for name in names}
    found |= {name: summary[f"eval/success/{name}"] for name in ("before", "after")}
    found |= {"steps": len(steps), "curve": [step["reward/success"] for step in steps], "overrides": more}
    print(f"{agent}, seed {seed}: {found['before']:.3f} -> {found['after']:.3f}", flush=True)
    return found


def main() -> None:
    """Run what is missing, report all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=["openai_agents", "langgraph"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmarks/foreign"), help="keeps runs")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides, e.g. trainer.steps=24")
    given = parser.parse_args()
    file = RESULTS / FILE
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())["detail"]["runs"] if file.exists() else {}
    for agent in given.agents:
        for seed in given.seeds:
            if str(seed) not in found.get(agent, {}):
                found.setdefault(agent, {})[str(seed)] = trained(agent, seed, given.folder.resolve(), given.set)
                ratios: dict[str, float | None] = {
                    f"foreign.{name}": statistics.fmean(one["after"] for one in by.values())
                    for name, by in found.items()
                }
                finish("foreign", ratios, {"goal": GOAL, "runs": found}, FILE)


if __name__ == "__main__":
    main()
