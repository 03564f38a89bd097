"""Does a real model learn on a GPU? SmolLM2-135M-Instruct, the recipe of the CPU, its curve and its time.

python benchmarks/gpu/learn.py [WORDS of mtgrpo train ...]

gpu.learn_gain     held-out success after training minus before, in percentage points
gpu.learn_seconds  of the training steps

Without a GPU and without WORDS both are null.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from learning import command
from record import absent, finish

from mtgrpo.model import smollm2

FIGURES = ["gpu.learn_gain", "gpu.learn_seconds"]


def main(words: list[str]) -> None:
    """One run, and what it learned."""
    if not torch.cuda.is_available():
        print("missing: a GPU", flush=True)
        if not words:
            absent("gpu_learn", FIGURES)
            return
    if not any(word.startswith("model.name=") for word in words) and not (smollm2.folder() / "config.json").is_file():
        sys.exit("missing: the model; run mtgrpo data smollm2, or give model.name=FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        summary = command(["train", "recipe=smollm2", "checkpoint.keep_last=1", *words], Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["stage"] == "reinforcement learning"]
    gain = 100 * (summary["eval/success/after"] - summary["eval/success/before"])
    ratios: dict[str, float | None] = dict(zip(FIGURES, (gain, summary["time/rl_s"]), strict=True))
    detail = {"words": words, "success": [row["reward/success"] for row in rows], "summary": summary}
    finish("gpu_learn", ratios, detail, "gpu_learn.json" if torch.cuda.is_available() and not words else None)


if __name__ == "__main__":
    main(sys.argv[1:])
