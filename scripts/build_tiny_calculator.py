"""Build the weights that ship in mtgrpo/model/tiny_calculator: `python scripts/build_tiny_calculator.py [FOLDER]`.

It runs the warm start of recipe=calculator_from_scratch and keeps its weights in 16 bits, beside what made them and the
digest of the file. With one thread on such a processor it gives the same file, elsewhere one that behaves alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mtgrpo.model import tiny

COMMAND = "OMP_NUM_THREADS=1 mtgrpo sft recipe=calculator_from_scratch seed=1"
NAME = "model.safetensors"


def main(folder: Path) -> None:
    """Run, convert, write."""
    threads, _, *words = COMMAND.split()
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "mtgrpo", *words, f"hydra.run.dir={place}"]
        subprocess.run(command, check=True, env=os.environ | dict([threads.split("=")]))
        (checkpoint,) = sorted(Path(place, "checkpoints").glob("step_*"))[-1:]
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16)
        summary = json.loads(Path(place, "summary.json").read_text())
    model.save_pretrained(folder)
    digest = hashlib.sha256((folder / NAME).read_bytes()).hexdigest()
    measured = {name: summary[f"eval/{name}/after"] for name in ("greedy", "success", "pass@8")}
    origin = {"made_by": "scripts/build_tiny_calculator.py", "command": COMMAND, "sha256": digest, "held_out": measured}
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else tiny.WEIGHTS)
