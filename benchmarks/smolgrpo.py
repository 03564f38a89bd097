"""The first lesson of courses on GRPO, by us and by TRL's GRPOTrainer: reward beside reward, and seconds of a step.

Recipe smolgrpo: SmolLM2-135M-Instruct with adapters of rank 16 writes summaries that are to have 50 characters, 2 tasks
x 8 conversations of at most 96 new tokens, learning rate 2e-5 (mlabonne's model card, the course of Hugging Face). The
posts of the lesson are on the hub; here paragraphs of Wikipedia stand in their place, with the same words around. The
first `--steps` of the recipe's 1,000 steps are made in turns, each side in a process of its own, in float32: the same
prompts in the same order, adapters, sampling, optimiser, learning rate and loss (trl_side.py). TRL has 8 rows per
micro-batch, as in the lesson, and no activation checkpointing, which makes it quicker. No step is left out.

    smolgrpo.seconds_ratio     median seconds of a step, TRL's / ours
    smolgrpo.reward_gain       mean reward of the last quarter of the steps minus that of the first, ours
    smolgrpo.reward_gain_trl   the same of TRL's
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import finish
from sides import Step
from smollm2 import MODEL
from versus_trl import THREADS, sampled_tokens
from versus_trl_135m import prompt_tokens
from versus_trl_learning import race, reward

from mtgrpo.config.compose import compose, parse
from mtgrpo.tasks.published import data_folder

STEPS = 12
ROWS = 8  # per micro-batch of TRL's
CHARS = (200, 1800)  # of a paragraph: something to be summed up, in less than 512 tokens
PARTS = 4  # of the steps, each a column of the table
QUICK = ("rollout.prompts_per_step=1", "rollout.group_size=2", "sampling.max_new_tokens=8")


def write_prompts(passages: Path, file: Path) -> None:
    """The paragraphs of `passages` as the lesson has its posts, one JSON object a line."""
    rows = map(json.loads, passages.read_text().splitlines())
    chosen = [row for row in rows if CHARS[0] <= len(row["text"]) <= CHARS[1]]
    prompts = [f"TITLE: {row['title']}\n\nPOST: {row['text']}\n\nTL;DR:" for row in chosen]
    lines = [json.dumps({"id": row["id"], "prompt": text}) for row, text in zip(chosen, prompts, strict=True)]
    file.write_text("".join(f"{line}\n" for line in lines))


def words_of(prompts: Path, learning_rate: float) -> list[str]:
    """Of `mtgrpo train`: the recipe on these prompts."""
    return [
        "recipe=smolgrpo",
        "task=jsonl",
        f"task.path={prompts}",
        "algorithm.truncated=keep",  # TRL rewards what reached the limit like the rest
        f"model.name={MODEL}",
        "model.dtype=float32",
        f"optimizer.lr={learning_rate}",
    ]


def parts(rewards: Sequence[float]) -> list[float]:
    """The mean reward of each part of the steps, in order; the last one has what is left over."""
    count = min(PARTS, len(rewards))
    size = len(rewards) // count
    starts = range(0, size * count, size)
    return [statistics.mean(rewards[start : None if start == starts[-1] else start + size]) for start in starts]


def describe(steps: Sequence[Step]) -> dict[str, Any]:
    """One side."""
    rewards = [reward(step) for step in steps]
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "rollout_s": statistics.median(step["time/rollout_s"] for step in steps),
        "train_s": statistics.median(step["time/train_s"] for step in steps),
        "minutes": sum(step["seconds"] for step in steps) / 60,
        "peak_bytes": steps[-1]["peak_bytes"],
        "sampled_tokens": statistics.mean(map(sampled_tokens, steps)),
        "reward": [round(found, 3) for found in rewards],
        "parts": [round(found, 3) for found in parts(rewards)],
        "every_step_s": [round(step["seconds"], 3) for step in steps],
    }


def ratios_of(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """By the names of the targets."""
    own, theirs = sides["ours"], sides["trl"]
    return {
        "smolgrpo.seconds_ratio": round(theirs["seconds"] / own["seconds"], 3),
        "smolgrpo.reward_gain": round(own["parts"][-1] - own["parts"][0], 3),
        "smolgrpo.reward_gain_trl": round(theirs["parts"][-1] - theirs["parts"][0], 3),
    }


def main() -> None:
    """Race, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each side, at least 2")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of both sides; another one writes no file")
    parser.add_argument("--threads", type=int, default=THREADS, help="of TRL; ours chooses")
    parser.add_argument("--quick", action="store_true", help="2 steps of 1 task x 2 conversations of 8 tokens; no file")
    given = parser.parse_args()
    steps = 2 if given.quick else given.steps
    if steps < 2:
        parser.error(f"--steps must be at least 2, got {steps}")
    data = data_folder()
    if data is None:
        raise SystemExit("set MTGRPO_DATA to the folder of all data sets: the prompts are made of its search_qa")
    with tempfile.TemporaryDirectory() as place:
        prompts = Path(place) / "prompts.jsonl"
        write_prompts(data / "search_qa" / "passages.jsonl", prompts)
        words = [*words_of(prompts, given.learning_rate), *(QUICK if given.quick else ())]
        experiment = compose(parse(words)).experiment
        batch = experiment.rollout.prompts_per_step * experiment.rollout.group_size
        settings = {
            "completion": experiment.sampling.max_new_tokens,
            "micro_batches": max(1, batch // ROWS),
            "checkpointing": False,
        }
        length = prompt_tokens(words)
        found = race("smolgrpo", words, steps, threads=given.threads, **settings)
    sides = {name: describe(of) for name, of in found.items()}
    ratios = ratios_of(sides)
    print(json.dumps(ratios, indent=1))
    detail = sides | {"steps": steps, "learning_rate": given.learning_rate, "prompt_tokens": length, "rows": ROWS}
    detail |= {"trl_threads": given.threads, "trl_version": version("trl")}
    complete = not given.quick and (steps, given.learning_rate) == (STEPS, 2e-5)
    finish("smolgrpo", ratios, detail, "smolgrpo.json" if complete else None)


if __name__ == "__main__":
    main()
