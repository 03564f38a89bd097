"""What a received record reaches: every setting of every part, spelled in every way, read by a watched process.

`trust.reached` is how many of the records reached anything: a socket, a process, a file outside the run's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from record import finish

HOSTILE = Path(__file__).resolve().parent.parent / "tests" / "attack" / "hostile_records.py"
SMALL = ("sft.steps=1", "sft.batch_size=2", "eval.tasks=2", "eval.samples=1", "sampling.max_new_tokens=4")


def main() -> None:
    """Make a small run, as others would send it, and read it with each attack in its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try one of so many attacks of a kind")
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        run, settings = Path(place) / "run", {**os.environ, "XDG_CONFIG_HOME": f"{place}/settings"}
        words = [sys.executable, "-m", "mtgrpo", "sft", *SMALL, f"hydra.run.dir={run}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=settings)
        read = [sys.executable, str(HOSTILE), str(run), str(given.every)]
        found = json.loads(subprocess.run(read, check=True, capture_output=True, text=True, env=settings).stdout)
    attacks = found["attacks"]
    counts = {kind: {"tries": entry["tries"], "reached": len(entry["reached"])} for kind, entry in attacks.items()}
    examples = [each for entry in attacks.values() for each in entry["reached"]][:5]
    detail = {"every": given.every, "refused": found["refused"], "examples": examples, "attacks": counts}
    reached = float(sum(entry["reached"] for entry in counts.values()))
    finish("trust", {"trust.reached": reached}, detail, "trust.json")


if __name__ == "__main__":
    main()
